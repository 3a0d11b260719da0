// What a step's attention yields of one kv_head on its way to the policy: rows averaged over the query group, queries; in
// decode kept aside until the step can no longer be taken back.
#pragma once

#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/convert.hpp"
#include "kvsnip/detail/packet.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// The first column with a weight that is negative or not finite, or -1.
inline Index first_bad_column(const AttentionRows::Weights& weights) {
  for (Index j = 0; j < weights.cols(); ++j)
    if (!all_weights(weights.col(j).data(), weights.rows())) return j;
  return -1;
}

/// @param weights  (slots, queries * group_size), a query's heads side by side
/// @param mean     (slots, queries)
inline void mean_over_group(const AttentionRows::Weights& weights, Index group_size, float* mean) {
  namespace ei = Eigen::internal;
  constexpr Index block = 4;  // packets: stay in registers while the heads are added
  const Index slots = weights.rows(), stride = weights.outerStride();
  const float share = 1.0f / static_cast<float>(group_size);
  for (Index j = 0; j < weights.cols() / group_size; ++j, mean += slots) {
    const float* heads = weights.data() + j * group_size * stride;
    Index slot = 0;
    for (; slot + block * packet_size <= slots; slot += block * packet_size) {
      Packet sum[block];
      for (Index p = 0; p < block; ++p) sum[p] = ei::ploadu<Packet>(heads + slot + p * packet_size);
      for (Index g = 1; g < group_size; ++g)
        for (Index p = 0; p < block; ++p) sum[p] = ei::padd(sum[p], ei::ploadu<Packet>(heads + g * stride + slot + p * packet_size));
      for (Index p = 0; p < block; ++p) ei::pstoreu(mean + slot + p * packet_size, ei::pmul(sum[p], ei::pset1<Packet>(share)));
    }
    for (; slot < slots; ++slot) {
      float sum = heads[slot];
      for (Index g = 1; g < group_size; ++g) sum += heads[g * stride + slot];
      mean[slot] = sum * share;
    }
  }
}
inline Eigen::MatrixXf mean_over_group(const AttentionRows::Weights& weights, Index group_size) {
  Eigen::MatrixXf mean(weights.rows(), weights.cols() / group_size);
  mean_over_group(weights, group_size, mean.data());
  return mean;
}

/// What a policy wants of every kv_head of a step.
struct Wants {
  Index rows = 0, queries = 0;  ///< of the last so many queries
  bool column_sums = false;
  friend bool operator==(const Wants&, const Wants&) = default;
};

class RowIntake {
 public:
  void begin(const Wants& wants) { left_ = wants.rows, queries_left_ = wants.queries > 0, sums_left_ = wants.column_sums; }
  /// Rows still to come.
  Index left() const { return left_; }
  /// The column sums have not come yet.
  bool sums_left() const { return sums_left_; }
  void sums_came() { sums_left_ = false; }
  /// The queries themselves have not come yet.
  bool queries_left() const { return queries_left_; }
  void queries_came() { queries_left_ = false; }
  bool is_untouched(const Wants& wants) const {
    return left_ == wants.rows && sums_left_ == wants.column_sums && queries_left_ == (wants.queries > 0);
  }
  bool is_complete() const { return left_ == 0 && !sums_left_ && !queries_left_; }
  void skip(Index queries) { left_ -= queries; }

  /// Keep the next piece of `wanted` rows.
  void keep(const AttentionRows::Weights& weights, Index group_size, Index wanted, bool query_heads) {
    const Index slots = weights.rows(), queries = weights.cols() / group_size, first = wanted - left_;
    if (first == 0) {
      mean_.resize(static_cast<std::size_t>(slots * wanted));
      per_query_head_.resize(query_heads ? static_cast<std::size_t>(slots * wanted * group_size) : 0);
    }
    mean_over_group(weights, group_size, mean_.data() + first * slots);
    if (query_heads)
      Eigen::Map<Eigen::MatrixXf>(per_query_head_.data() + first * slots * group_size, slots, weights.cols()) = weights;
    left_ -= queries;
  }
  /// All that was kept.
  AttentionRows kept(std::span<const Index> positions, Index wanted, const StepInfo& step) const {
    const Index slots = static_cast<Index>(positions.size());
    const Index columns = slots == 0 ? 0 : static_cast<Index>(per_query_head_.size()) / slots;
    return {{mean_.data(), slots, wanted, Eigen::OuterStride<>(slots)},
            {per_query_head_.data(), slots, columns, Eigen::OuterStride<>(slots)},
            step.last_position() - wanted + 1, step, positions};
  }
  void keep_queries(const QueryRows::Columns& queries) {
    queries_.assign(queries.data(), queries.data() + queries.size());
    queries_left_ = false;
  }
  QueryRows::Columns kept_queries(Index head_dim) const {
    return QueryRows::Columns(queries_.data(), head_dim, static_cast<Index>(queries_.size()) / head_dim);
  }
  Index bytes() const { return heap_bytes(mean_) + heap_bytes(per_query_head_) + heap_bytes(queries_); }

 private:
  std::vector<float> mean_;            // (slots, wanted)
  std::vector<float> per_query_head_;  // (slots, wanted * group_size) or empty
  std::vector<float> queries_;         // (head_dim, wanted * group_size)
  Index left_ = 0;
  bool sums_left_ = false, queries_left_ = false;
};

}  // namespace kvsnip::detail
