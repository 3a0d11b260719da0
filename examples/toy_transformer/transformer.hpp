// A Llama-style transformer whose attention runs over kvsnip caches, one per layer.
//
// All that a cache asks of the model is in Transformer::attention(): keys go in after RoPE at the token's own position,
// attend() answers for all heads, and positions are never renumbered, however many of them have been evicted.
#pragma once

#include <Eigen/Core>
#include <kvsnip/registry.hpp>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "layers.hpp"
#include "weights.hpp"

namespace toy {

struct ForwardOptions {
  bool more = false;        ///< the prompt goes on in the next call (chunked prefill)
  bool all_logits = false;  ///< logits of every token, not only of the last
};

/// One sequence. T is what keys and values are stored as, float, Eigen::half or Eigen::bfloat16; everything else is float.
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
  Transformer(std::shared_ptr<const Weights> weights, const kvsnip::AnyPolicy& policy, Index budget);
  /// @param policy  a spec such as "scissorhands(history_window=100)"
  Transformer(std::shared_ptr<const Weights> weights, std::string_view policy, Index budget);

  /// The next tokens of the sequence in one pass. After an exception call reset(): layers may disagree.
  /// @param tokens  (tokens), at least one, each below vocab_size
  /// @return logits (vocab_size, 1), or (vocab_size, tokens) if all are asked for; valid until the next call
  const Eigen::MatrixXf& forward(std::span<const Token> tokens, ForwardOptions options = {});
  const Eigen::MatrixXf& forward(Token token) { return forward(std::span<const Token>(&token, 1)); }

  /// @param watcher  not owned; null for none
  void watch(Watcher* watcher) { watcher_ = watcher; }

  /// A new sequence: the caches are as after construction.
  void reset();

  const Config& config() const { return weights_->config; }
  const std::vector<Cache>& caches() const { return caches_; }  ///< (num_layers)
  Index tokens_seen() const { return tokens_seen_; }           ///< since reset(); also the next token's position

  /// What the caches of all layers have allocated.
  kvsnip::Bytes bytes() const;
  /// Keys and values of every token seen: what a cache that evicts nothing needs at least.
  Index full_cache_bytes() const {
    return config().num_layers * tokens_seen_ * 2 * config().kv_dim() * static_cast<Index>(sizeof(T));
  }

 private:
  void embed(std::span<const Token> tokens);
  void attention(std::size_t index, const Rope& rope, bool more);
  void feed_forward(const Layer& layer);

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
