// What a Llama-style model is made of: tokens, sizes and matrices.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <kvsnip/policy.hpp>
#include <vector>

namespace toy {

using kvsnip::Index;
using Token = std::int32_t;
inline constexpr Token bos_token = 1;  ///< opens a text; a model that produces it has ended one

inline constexpr float rms_epsilon = 1e-5f;
inline constexpr double rope_theta = 10000;

struct Config {
  Index dim = 0;         ///< width of the residual stream
  Index hidden_dim = 0;  ///< width inside the feed-forward block
  Index num_layers = 0;
  Index query_heads = 0;  ///< a multiple of kv_heads
  Index kv_heads = 0;
  Index vocab_size = 0;           ///< tokens 0 .. vocab_size - 1
  Index seq_len = 0;              ///< longest sequence it was trained on [tokens]; generation may go on beyond
  bool shared_classifier = true;  ///< the output matrix is the token embedding
  Index own_head_dim = 0;         ///< 0: dim / query_heads

  Index head_dim() const { return own_head_dim > 0 ? own_head_dim : dim / query_heads; }
  Index query_dim() const { return query_heads * head_dim(); }
  Index kv_dim() const { return kv_heads * head_dim(); }
  kvsnip::Shape shape() const { return {query_heads, kv_heads, head_dim()}; }

  friend bool operator==(const Config&, const Config&) = default;
};

/// (out, in), so that y = W * x for activations x (in, tokens); one output's weights are contiguous, as in the files.
template <class Scalar>
using BasicMatrix = Eigen::Matrix<Scalar, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Matrix = BasicMatrix<float>;

template <class Scalar>
struct BasicLayer {
  using Matrix = BasicMatrix<Scalar>;
  using Vector = Eigen::VectorX<Scalar>;

  Vector rms_attention;  ///< (dim)
  Matrix wq;             ///< (query_dim, dim)
  Matrix wk;             ///< (kv_dim, dim)
  Matrix wv;             ///< (kv_dim, dim)
  Matrix wo;             ///< (dim, query_dim)
  Vector rms_ffn;        ///< (dim)
  Matrix w1;             ///< (hidden_dim, dim), the gate
  Matrix w2;             ///< (dim, hidden_dim), back to the residual stream
  Matrix w3;             ///< (hidden_dim, dim)

  explicit BasicLayer(const Config& c)
      : rms_attention(c.dim),
        wq(c.query_dim(), c.dim),
        wk(c.kv_dim(), c.dim),
        wv(c.kv_dim(), c.dim),
        wo(c.dim, c.query_dim()),
        rms_ffn(c.dim),
        w1(c.hidden_dim, c.dim),
        w2(c.dim, c.hidden_dim),
        w3(c.hidden_dim, c.dim) {}
};
using Layer = BasicLayer<float>;

template <class Scalar>
struct BasicWeights {
  using Matrix = BasicMatrix<Scalar>;
  using Vector = Eigen::VectorX<Scalar>;

  Config config;
  Matrix token_embedding;                  ///< (vocab_size, dim), row = token
  std::vector<BasicLayer<Scalar>> layers;  ///< (num_layers)
  Vector rms_final;                        ///< (dim)
  Matrix own_classifier;                   ///< (vocab_size, dim), or empty when the embedding is shared

  /// Allocates every matrix and fills none.
  explicit BasicWeights(const Config& c)
      : config(c),
        token_embedding(c.vocab_size, c.dim),
        rms_final(c.dim),
        own_classifier(c.shared_classifier ? 0 : c.vocab_size, c.shared_classifier ? 0 : c.dim) {
    layers.reserve(static_cast<std::size_t>(c.num_layers));
    for (Index i = 0; i < c.num_layers; ++i) layers.emplace_back(c);
  }

  const Matrix& classifier() const { return config.shared_classifier ? token_embedding : own_classifier; }
  Matrix& classifier() { return config.shared_classifier ? token_embedding : own_classifier; }
};
using Weights = BasicWeights<float>;

/// Calls f with every matrix and vector, in the order of llama2.c's files: kind by kind, each for all layers. With more weights
/// of the same shape, with those that match.
template <class F, class W, class... More>
void for_each_tensor(F&& f, W& weights, More&... more) {
  const auto of_all_layers = [&](auto tensor) {
    for (std::size_t i = 0; i < weights.layers.size(); ++i) f(tensor(weights.layers[i]), tensor(more.layers[i])...);
  };
  f(weights.token_embedding, more.token_embedding...);
  of_all_layers([](auto& layer) -> auto& { return layer.rms_attention; });
  of_all_layers([](auto& layer) -> auto& { return layer.wq; });
  of_all_layers([](auto& layer) -> auto& { return layer.wk; });
  of_all_layers([](auto& layer) -> auto& { return layer.wv; });
  of_all_layers([](auto& layer) -> auto& { return layer.wo; });
  of_all_layers([](auto& layer) -> auto& { return layer.rms_ffn; });
  of_all_layers([](auto& layer) -> auto& { return layer.w1; });
  of_all_layers([](auto& layer) -> auto& { return layer.w2; });
  of_all_layers([](auto& layer) -> auto& { return layer.w3; });
  f(weights.rms_final, more.rms_final...);
  if (!weights.config.shared_classifier) f(weights.own_classifier, more.own_classifier...);
}

}  // namespace toy
