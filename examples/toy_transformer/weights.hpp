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

struct Config {
  Index dim = 0;         ///< width of the residual stream, query_heads * head_dim()
  Index hidden_dim = 0;  ///< width inside the feed-forward block
  Index num_layers = 0;
  Index query_heads = 0;  ///< a multiple of kv_heads
  Index kv_heads = 0;
  Index vocab_size = 0;           ///< tokens 0 .. vocab_size - 1
  Index seq_len = 0;              ///< longest sequence it was trained on [tokens]; generation may go on beyond
  bool shared_classifier = true;  ///< the output matrix is the token embedding

  Index head_dim() const { return dim / query_heads; }
  Index kv_dim() const { return kv_heads * head_dim(); }
  kvsnip::Shape shape() const { return {query_heads, kv_heads, head_dim()}; }
};

/// (out, in), so that y = W * x for activations x (in, tokens); one output's weights are contiguous, as in the files.
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct Layer {
  Eigen::VectorXf rms_attention;  ///< (dim)
  Matrix wq;                      ///< (dim, dim)
  Matrix wk;                      ///< (kv_dim, dim)
  Matrix wv;                      ///< (kv_dim, dim)
  Matrix wo;                      ///< (dim, dim)
  Eigen::VectorXf rms_ffn;        ///< (dim)
  Matrix w1;                      ///< (hidden_dim, dim), the gate
  Matrix w2;                      ///< (dim, hidden_dim), back to the residual stream
  Matrix w3;                      ///< (hidden_dim, dim)

  explicit Layer(const Config& c)
      : rms_attention(c.dim),
        wq(c.dim, c.dim),
        wk(c.kv_dim(), c.dim),
        wv(c.kv_dim(), c.dim),
        wo(c.dim, c.dim),
        rms_ffn(c.dim),
        w1(c.hidden_dim, c.dim),
        w2(c.dim, c.hidden_dim),
        w3(c.hidden_dim, c.dim) {}
};

struct Weights {
  Config config;
  Matrix token_embedding;     ///< (vocab_size, dim), row = token
  std::vector<Layer> layers;  ///< (num_layers)
  Eigen::VectorXf rms_final;  ///< (dim)
  Matrix own_classifier;      ///< (vocab_size, dim), or empty when the embedding is shared

  /// Allocates every matrix and fills none.
  explicit Weights(const Config& c)
      : config(c),
        token_embedding(c.vocab_size, c.dim),
        rms_final(c.dim),
        own_classifier(c.shared_classifier ? 0 : c.vocab_size, c.shared_classifier ? 0 : c.dim) {
    layers.reserve(static_cast<std::size_t>(c.num_layers));
    for (Index i = 0; i < c.num_layers; ++i) layers.emplace_back(c);
  }

  const Matrix& classifier() const { return config.shared_classifier ? token_embedding : own_classifier; }
};

}  // namespace toy
