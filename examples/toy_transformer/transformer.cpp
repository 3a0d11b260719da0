#include "transformer.hpp"

#include <kvsnip/kvsnip.hpp>
#include <stdexcept>
#include <string>
#include <utility>

namespace toy {

template <class T>
Transformer<T>::Transformer(std::shared_ptr<const Weights> weights, const kvsnip::AnyPolicy& policy, Index budget) : weights_(std::move(weights)) {
  caches_.reserve(weights_->layers.size());
  const kvsnip::Rope rope = kvsnip::Rope::standard(config().head_dim(), kvsnip::Rope::Pairing::interleaved, rope_theta);
  for (Index i = 0; i < config().num_layers; ++i) caches_.emplace_back(config().shape(), budget, policy, rope);
}

template <class T>
Transformer<T>::Transformer(std::shared_ptr<const Weights> weights, std::string_view policy, Index budget)
    : Transformer(std::move(weights), kvsnip::make_policy(policy), budget) {}

template <class T>
const Eigen::MatrixXf& Transformer<T>::forward(std::span<const Token> tokens, ForwardOptions options) {
  embed(tokens);
  const Rope rope(config().head_dim(), tokens_seen_, x_.cols());
  for (std::size_t i = 0; i < caches_.size(); ++i) {
    attention(i, rope, options.more);
    feed_forward(weights_->layers[i]);
  }
  tokens_seen_ += x_.cols();
  if (watcher_ != nullptr) watcher_->after_forward();

  if (!options.all_logits && x_.cols() > 1) x_ = x_.rightCols(1).eval();
  rms_norm(x_, weights_->rms_final, normed_);
  logits_.noalias() = weights_->classifier() * normed_;
  return logits_;
}

template <class T>
void Transformer<T>::reset() {
  for (Cache& cache : caches_) cache.reset();
  tokens_seen_ = 0;
}

template <class T>
kvsnip::Bytes Transformer<T>::bytes() const {
  kvsnip::Bytes sum{};
  for (const Cache& cache : caches_) {
    const kvsnip::Bytes bytes = cache.bytes();
    sum.keys += bytes.keys, sum.values += bytes.values, sum.positions += bytes.positions;
    sum.policy += bytes.policy, sum.scratch += bytes.scratch;
  }
  return sum;
}

template <class T>
void Transformer<T>::embed(std::span<const Token> tokens) {
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

template <class T>
void Transformer<T>::attention(std::size_t index, const Rope& rope, bool more) {
  const Layer& layer = weights_->layers[index];
  rms_norm(x_, layer.rms_attention, normed_);
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

template <class T>
void Transformer<T>::feed_forward(const Layer& layer) {
  rms_norm(x_, layer.rms_ffn, normed_);
  gate_.noalias() = layer.w1 * normed_;
  up_.noalias() = layer.w3 * normed_;
  gate_.array() *= up_.array() / (1.0f + (-gate_.array()).exp());  // SwiGLU: silu(gate) * up
  x_.noalias() += layer.w2 * gate_;
}

template class Transformer<float>;
template class Transformer<Eigen::half>;
template class Transformer<Eigen::bfloat16>;

}  // namespace toy
