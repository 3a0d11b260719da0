// attend(step, q, out): exact softmax attention over a step, then its attention callback.
#pragma once

#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/step_attention.hpp"
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
  detail::attend_step(step, q, out, parallel_for);
}

}  // namespace kvsnip
