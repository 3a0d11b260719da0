// What policies that let a prompt's last queries vote for the rest of it have in common.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// A base for policies whose options O have observation_window and num_sinks: compresses prompts, keeps the window whole,
/// holds the rows of its queries until the prompt is over, however many updates they come in.
template <class O>
class ObservationWindow {
 public:
  using Options = O;

  const O& options() const { return options_; }
  bool evicts(Phase phase) const { return phase != Phase::decode; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .observation_window = options_.observation_window}; }
  Index wanted_rows(const StepInfo& step) const {
    return step.phase == Phase::long_prompt ? std::min(options_.observation_window, step.num_queries) : 0;
  }
  void on_prompt_end(Index kv_head) { rows_[static_cast<std::size_t>(kv_head)] = Rows(); }
  void reset(const Shape& shape) {
    rows_.assign(static_cast<std::size_t>(shape.kv_heads), {});
    group_size_ = shape.group_size();
  }
  Index bytes() const {
    Index bytes = heap_bytes(rows_);
    for (const Rows& rows : rows_) {
      bytes += heap_bytes(rows);
      for (const std::vector<float>& row : rows) bytes += heap_bytes(row);
    }
    return bytes;
  }

 protected:
  /// @param policy  the class that errors name
  ObservationWindow(std::string_view policy, const O& options) : options_(options) {
    require(options.observation_window >= 1, policy, ": observation_window must be >= 1, got ", options.observation_window);
    require(options.num_sinks >= 0, policy, ": num_sinks must be >= 0, got ", options.num_sinks);
  }

  /// @param factor  Index -> float: what row j is multiplied by
  template <class Factor>
  void record(Index kv_head, const AttentionRows& rows, bool by_query_head, const Factor& factor) {
    Rows& held = rows_[static_cast<std::size_t>(kv_head)];
    const AttentionRows::Weights& weights = by_query_head ? rows.per_query_head : rows.mean;
    const Index columns = weights.cols() / rows.num_queries();
    for (Index j = 0; j < rows.num_queries(); ++j) {
      std::vector<float>& row = held.emplace_back();
      row.reserve(static_cast<std::size_t>(weights.rows() * columns));
      for (Index c = j * columns; c < (j + 1) * columns; ++c) row.insert(row.end(), weights.col(c).data(), weights.col(c).data() + weights.rows());
      if (const float f = factor(j); f != 1.0f) Eigen::Map<Eigen::ArrayXf>(row.data(), std::ssize(row)) *= f;
    }
    const Index excess = static_cast<Index>(held.size()) - options_.observation_window;
    if (excess > 0) held.erase(held.begin(), held.begin() + excess);
  }
  /// (slots, 1 or group_size) Sum over the window's rows. Those of earlier updates are shorter: later slots got nothing.
  Eigen::ArrayXXf sum_of_rows(Index kv_head, Index num_slots, bool by_query_head) const {
    const Index columns = by_query_head ? group_size_ : 1;
    Eigen::ArrayXXf sum = Eigen::ArrayXXf::Zero(num_slots, columns);
    for (const std::vector<float>& row : rows_[static_cast<std::size_t>(kv_head)]) {
      const Index slots = static_cast<Index>(row.size()) / columns;
      sum.topRows(slots) += Eigen::Map<const Eigen::ArrayXXf>(row.data(), slots, columns);
    }
    return sum;
  }
  Index num_rows(Index kv_head) const { return static_cast<Index>(rows_[static_cast<std::size_t>(kv_head)].size()); }

  O options_;

 private:
  using Rows = std::vector<std::vector<float>>;  // of the prompt's last queries so far, (slots, 1 or group_size) each

  Index group_size_ = 1;
  std::vector<Rows> rows_;  // (kv_heads)
};

}  // namespace kvsnip::detail
