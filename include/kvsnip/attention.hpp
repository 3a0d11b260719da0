// attend(step, q, out): exact softmax attention over a step, then its attention callback.
#pragma once

#include <algorithm>
#include <cmath>

#include "kvsnip/detail/decode_kernel.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

/// The default executor: calls fn(i) for i in [0, n). An engine passes its own: any callable (Index n, auto fn) that
/// calls fn once for every i, on any threads, and returns when all are done. Results do not depend on it.
struct Serial {
  template <class Fn>
  void operator()(Index n, Fn fn) const {
    for (Index i = 0; i < n; ++i) fn(i);
  }
};

namespace detail {

/// All queries of one kv_head, in tiles; the policy gets the rows it wants, in order.
/// @param q, out  (query_heads * head_dim, queries)
/// @param end_head  tell the policy; false leaves the step as it is, so that the kernel alone can be measured
template <class Step, class Q, class Out>
void attend_head(Step step, Index kv_head, const Q& q, Out& out, bool end_head = true) {
  using T = typename Step::Scalar;
  const Index group = step.shape().group_size(), dim = step.shape().head_dim, slots = step.size(kv_head), queries = q.cols();
  const Index wanted = step.wanted_rows(), rows = group * dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  const T* keys = step.keys(kv_head).data();
  const T* values = step.values(kv_head).data();
  const std::span<const Index> new_slots = step.new_slots(kv_head);
  const bool prompt = step.phase() != Phase::decode;

  const Index tile = std::min(tile_queries, std::max<Index>(queries, 1));
  float* scaled = thread_scratch(tile * rows * 2 + tile * group * slots);
  float* sums = scaled + tile * rows;
  float* weights = sums + tile * rows;
  for (Index first = 0; first < queries; first += tile) {
    const Index end = std::min(first + tile, queries), count = end - first;
    for (Index j = 0; j < count; ++j)
      Eigen::Map<Eigen::VectorXf>(scaled + j * rows, rows) = q.col(first + j).segment(kv_head * rows, rows) * scale;
    // In a prompt the new tokens are the last slots: those after the tile's are not even looked at.
    const Index visible = prompt ? slots - (queries - end) : slots;
    const std::span<const Index> later = new_slots.subspan(static_cast<std::size_t>(first + 1), static_cast<std::size_t>((prompt ? end : queries) - first - 1));
    attention_weights(keys, visible, dim, scaled, count, group, later, weights);
    weighted_values(values, visible, dim, weights, visible, count * group, sums);
    for (Index j = 0; j < count; ++j) out.col(first + j).segment(kv_head * rows, rows) = Eigen::Map<Eigen::VectorXf>(sums + j * rows, rows);
    const Index unwanted = std::max<Index>(queries - wanted - first, 0);  // of this tile
    if (end_head && unwanted < count) {
      for (Index column = count * group - 1; visible < slots && column >= 0; --column) {  // widen the columns to all slots
        std::copy_backward(weights + column * visible, weights + (column + 1) * visible, weights + column * slots + visible);
        std::fill(weights + column * slots + visible, weights + (column + 1) * slots, 0.0f);
      }
      step.accept(kv_head, weights + unwanted * group * slots, (count - unwanted) * group);
    }
  }
  if (end_head && wanted == 0) step.done(kv_head);
}

}  // namespace detail

/// Attend to a step and end it: logits q . k / sqrt(head_dim), causal, softmax and sums in float32 whatever the cache
/// stores. A query with nothing to see gets zeros.
/// @param q    (query_heads * head_dim, num_queries), after RoPE; query head h in rows [h * head_dim, (h + 1) * head_dim)
/// @param out  the same shape
/// @throws std::invalid_argument  shapes, or a query that is not finite: before anything is computed
/// @throws std::logic_error       the step is over
template <class Step, class ParallelFor = Serial>
void attend(Step step, const Eigen::Ref<const Eigen::MatrixXf>& q, Eigen::Ref<Eigen::MatrixXf> out, ParallelFor&& parallel_for = {}) {
  const Shape shape = step.shape();
  const Index rows = shape.query_heads * shape.head_dim, queries = step.num_queries();
  detail::require(q.rows() == rows && q.cols() == queries, "attend: q must be query_heads * head_dim x num_queries = ", rows, " x ", queries,
                  ", got ", q.rows(), " x ", q.cols());
  detail::require(out.rows() == rows && out.cols() == queries, "attend: out must be query_heads * head_dim x num_queries = ", rows, " x ",
                  queries, ", got ", out.rows(), " x ", out.cols());
  detail::require_state(step.is_untouched(), "attend: a kv_head of this step has had its callback already");
  for (Index j = 0; j < queries; ++j)
    for (Index h = 0; h < shape.query_heads; ++h)
      detail::require(detail::all_within(q.col(j).data() + h * shape.head_dim, shape.head_dim, detail::max_magnitude<float>()),
                      "attend: q must be finite and at most ", detail::max_magnitude<float>(), " in magnitude, not so for kv_head ",
                      h / shape.group_size(), ", query at position ", step.first_position() + j);
  parallel_for(shape.kv_heads, [&](Index kv_head) { detail::attend_head(step, kv_head, q, out); });
}

}  // namespace kvsnip
