// A Llama-style transformer whose attention runs over kvsnip caches, one per layer.
//
// All that a cache asks of the model is in Transformer::attention(): keys go in after RoPE at the token's own position,
// attend() answers for all heads, and positions are never renumbered, however many of them have been evicted.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <kvsnip/kvsnip.hpp>
#include <kvsnip/registry.hpp>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weights.hpp"

namespace toy {

struct ForwardOptions {
  bool more = false;        ///< the prompt goes on in the next call (chunked prefill)
  bool all_logits = false;  ///< logits of every token, not only of the last
};

namespace detail {

/// Every column of x divided by its root mean square, times `weight`. @param x, out  (dim, tokens)
inline void rms_norm(const Eigen::MatrixXf& x, const Eigen::VectorXf& weight, Eigen::MatrixXf& out) {
  out.resize(x.rows(), x.cols());
  for (Index t = 0; t < x.cols(); ++t) {
    const float mean_square = x.col(t).squaredNorm() / static_cast<float>(x.rows());
    out.col(t) = x.col(t).cwiseProduct(weight) / std::sqrt(mean_square + rms_epsilon);
  }
}

/// The angles of RoPE for consecutive positions, shared by all heads and layers.
class Rope {
 public:
  Rope(Index head_dim, Index first_position, Index tokens) : cos_(head_dim / 2, tokens), sin_(head_dim / 2, tokens) {
    for (Index i = 0; i < head_dim / 2; ++i) {
      const double frequency = std::pow(rope_theta, -2 * static_cast<double>(i) / static_cast<double>(head_dim));
      for (Index t = 0; t < tokens; ++t) {
        const double angle = static_cast<double>(first_position + t) * frequency;  // float is too coarse far out
        cos_(i, t) = static_cast<float>(std::cos(angle));
        sin_(i, t) = static_cast<float>(std::sin(angle));
      }
    }
  }

  /// Turns the pairs (2i, 2i + 1) of every head. @param x  (heads * head_dim, tokens)
  void rotate(Eigen::MatrixXf& x) const {
    const Index pairs = cos_.rows();
    for (Index t = 0; t < x.cols(); ++t) {
      for (Index row = 0; row < x.rows(); row += 2) {
        const float c = cos_(row / 2 % pairs, t), s = sin_(row / 2 % pairs, t);
        const float a = x(row, t), b = x(row + 1, t);
        x(row, t) = a * c - b * s;
        x(row + 1, t) = a * s + b * c;
      }
    }
  }

 private:
  Eigen::MatrixXf cos_, sin_;  ///< (head_dim / 2, tokens)
};

}  // namespace detail

/// One sequence. T is what keys and values are stored as; everything else is float.
template <class T>
class Transformer {
 public:
  using Cache = kvsnip::KVCache<T, kvsnip::AnyPolicy>;

  /// Sees the model at work, for pictures and measurements.
  struct Watcher {
    virtual ~Watcher() = default;
    /// A layer's cache has taken the tokens in, and attends next.
    /// @param q  (query_heads * head_dim, tokens), after RoPE
    virtual void before_attention(Index layer, const typename Cache::Step& step, const Eigen::MatrixXf& q) = 0;
    /// All layers have, and evicted what they had to.
    virtual void after_forward() = 0;
  };

  /// @param policy  each layer has its own copy
  /// @param budget  slots a kv_head of a layer may keep
  Transformer(std::shared_ptr<const Weights> weights, const kvsnip::AnyPolicy& policy, Index budget)
      : weights_(std::move(weights)) {
    caches_.reserve(weights_->layers.size());
    const kvsnip::Rope rope = kvsnip::Rope::standard(config().head_dim(), kvsnip::Rope::Pairing::interleaved, rope_theta);
    for (Index i = 0; i < config().num_layers; ++i) caches_.emplace_back(config().shape(), budget, policy, rope);
  }
  /// @param policy  a spec such as "scissorhands(history_window=100)"
  Transformer(std::shared_ptr<const Weights> weights, std::string_view policy, Index budget)
      : Transformer(std::move(weights), kvsnip::make_policy(policy), budget) {}

  /// The next tokens of the sequence in one pass. After an exception call reset(): layers may disagree.
  /// @param tokens  (tokens), at least one, each below vocab_size
  /// @return logits (vocab_size, 1), or (vocab_size, tokens) if all are asked for; valid until the next call
  const Eigen::MatrixXf& forward(std::span<const Token> tokens, ForwardOptions options = {}) {
    embed(tokens);
    const detail::Rope rope(config().head_dim(), tokens_seen_, x_.cols());
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      attention(i, rope, options.more);
      feed_forward(weights_->layers[i]);
    }
    tokens_seen_ += x_.cols();
    if (watcher_ != nullptr) watcher_->after_forward();

    if (!options.all_logits && x_.cols() > 1) x_ = x_.rightCols(1).eval();
    detail::rms_norm(x_, weights_->rms_final, normed_);
    logits_.noalias() = weights_->classifier() * normed_;
    return logits_;
  }
  const Eigen::MatrixXf& forward(Token token) { return forward(std::span<const Token>(&token, 1)); }

  /// @param watcher  not owned; null for none
  void watch(Watcher* watcher) { watcher_ = watcher; }

  /// A new sequence: the caches are as after construction.
  void reset() {
    for (Cache& cache : caches_) cache.reset();
    tokens_seen_ = 0;
  }

  const Config& config() const { return weights_->config; }
  const std::vector<Cache>& caches() const { return caches_; }  ///< (num_layers)
  Index tokens_seen() const { return tokens_seen_; }           ///< since reset(); also the next token's position

  /// What the caches of all layers have allocated.
  kvsnip::Bytes bytes() const {
    kvsnip::Bytes sum{};
    for (const Cache& cache : caches_) {
      const kvsnip::Bytes bytes = cache.bytes();
      sum.keys += bytes.keys, sum.values += bytes.values, sum.positions += bytes.positions;
      sum.policy += bytes.policy, sum.scratch += bytes.scratch;
    }
    return sum;
  }
  /// Keys and values of every token seen: what a cache that evicts nothing needs at least.
  Index full_cache_bytes() const {
    return config().num_layers * tokens_seen_ * 2 * config().kv_dim() * static_cast<Index>(sizeof(T));
  }

 private:
  void embed(std::span<const Token> tokens) {
    if (tokens.empty()) throw std::invalid_argument("Transformer: forward() needs at least one token");
    x_.resize(config().dim, static_cast<Index>(tokens.size()));
    for (Index t = 0; t < x_.cols(); ++t) {
      const Token token = tokens[static_cast<std::size_t>(t)];
      if (token < 0 || token >= config().vocab_size)
        throw std::invalid_argument("Transformer: token " + std::to_string(token) + " is not in the vocabulary of " +
                                    std::to_string(config().vocab_size));
      x_.col(t) = weights_->token_embedding.row(token).transpose();
    }
  }

  void attention(std::size_t index, const detail::Rope& rope, bool more) {
    const Layer& layer = weights_->layers[index];
    detail::rms_norm(x_, layer.rms_attention, normed_);
    q_.noalias() = layer.wq * normed_;
    k_.noalias() = layer.wk * normed_;
    v_.noalias() = layer.wv * normed_;
    rope.rotate(q_);
    rope.rotate(k_);

    typename Cache::Step step = caches_[index].update(k_, v_, {.more = more, .first_position = tokens_seen_});
    if (watcher_ != nullptr) watcher_->before_attention(static_cast<Index>(index), step, q_);
    attended_.resize(q_.rows(), q_.cols());
    kvsnip::attend(step, q_, attended_);
    x_.noalias() += layer.wo * attended_;
  }

  void feed_forward(const Layer& layer) {
    detail::rms_norm(x_, layer.rms_ffn, normed_);
    gate_.noalias() = layer.w1 * normed_;
    up_.noalias() = layer.w3 * normed_;
    gate_.array() *= up_.array() / (1.0f + (-gate_.array()).exp());  // SwiGLU: silu(gate) * up
    x_.noalias() += layer.w2 * gate_;
  }

  std::shared_ptr<const Weights> weights_;
  std::vector<Cache> caches_;  ///< (num_layers)
  Index tokens_seen_ = 0;
  Watcher* watcher_ = nullptr;

  Eigen::MatrixXf x_;             ///< (dim, tokens) the residual stream
  Eigen::MatrixXf normed_;        ///< (dim, tokens)
  Eigen::MatrixXf q_, attended_;  ///< (query_heads * head_dim, tokens)
  Eigen::MatrixXf k_, v_;         ///< (kv_heads * head_dim, tokens)
  Eigen::MatrixXf gate_, up_;     ///< (hidden_dim, tokens)
  Eigen::MatrixXf logits_;        ///< (vocab_size, tokens or 1)
};

}  // namespace toy
