// A prompt whose attention weights are given, for policies that look at its last rows.
#pragma once

#include "random.hpp"

#include <kvsnip/kv_cache.hpp>

#include <vector>

namespace test {

/// Causal weights of every query over a whole prompt, (positions, queries * group_size), exact in float.
inline Eigen::MatrixXf causal_weights(Random& random, Index prompt, Index group) {
  Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(prompt, prompt * group);
  for (Index column = 0; column < weights.cols(); ++column)
    weights.col(column).head(column / group + 1) = random.weights(column / group + 1);
  return weights;
}

/// The same weights, the last `num_queries` queries', one matrix per query head.
inline std::vector<Eigen::MatrixXd> rows_per_query_head(const Eigen::MatrixXf& weights, Index num_queries, Index group) {
  std::vector<Eigen::MatrixXd> rows(static_cast<std::size_t>(group), Eigen::MatrixXd(weights.rows(), num_queries));
  const Index first = weights.cols() - num_queries * group;
  Index g = 0;
  for (Eigen::MatrixXd& head : rows) {
    for (Index j = 0; j < num_queries; ++j) head.col(j) = weights.col(first + j * group + g).cast<double>();
    ++g;
  }
  return rows;
}

/// Feeds the next positions of a prompt and the weights that the step asks for.
/// @param weights  of each kv_head, as causal_weights() makes them
template <class Cache>
void feed(Cache& cache, const std::vector<Eigen::MatrixXf>& weights, Index num_tokens, bool more) {
  const Index rows = cache.shape().kv_heads * cache.shape().head_dim, group = cache.shape().group_size();
  auto step =
      cache.update(Eigen::MatrixXf::Zero(rows, num_tokens), Eigen::MatrixXf::Zero(rows, num_tokens), {.more = more});
  const Index end = cache.tokens_seen(), wanted = step.wanted_rows();
  Index h = 0;
  for (const Eigen::MatrixXf& w : weights) {
    if (step.wants_attention())
      step.on_attention(h, w.block(0, (end - wanted) * group, step.size(h), wanted * group));
    else
      step.done(h);
    ++h;
  }
}

}  // namespace test
