// SnapKV: the last queries of the prompt vote for the prefix positions worth keeping.
//
// Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469, section 4 and listing 1.
// Prompt only: alone it lets the cache grow while decoding; Chain<SnapKV, Scissorhands> bounds it.
// Differs from the paper's code: one choice per kv_head, not per query head, so that grouped-query memory is really saved;
// kept slots are in ascending position; ties (max pooling makes plateaus) keep the newer position.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

enum class SnapKVPooling { average, max };
enum class SnapKVPoolOver { prefix, row };
enum class SnapKVGroup { mean, max };
constexpr std::array<std::string_view, 2> enum_names(SnapKVPooling) { return {"average", "max"}; }
constexpr std::array<std::string_view, 2> enum_names(SnapKVPoolOver) { return {"prefix", "row"}; }
constexpr std::array<std::string_view, 2> enum_names(SnapKVGroup) { return {"mean", "max"}; }

struct SnapKVOptions {
  Index observation_window = 32;                       ///< last queries that vote, and positions kept whole [tokens], >= 1
  Index kernel_size = 5;                               ///< of the 1-D pooling over positions [slots], odd, >= 1
  SnapKVPooling pooling = SnapKVPooling::average;
  SnapKVPoolOver pool_over = SnapKVPoolOver::prefix;   ///< prefix: the official code; row: the window's votes pool in too
  bool count_padding = true;                           ///< average: divide by kernel_size at the ends as well
  SnapKVGroup group = SnapKVGroup::mean;               ///< how the query heads of a group agree, after the sum over the window
  Index num_sinks = 0;                                 ///< first positions kept whatever their votes [tokens], >= 0

  static void each(auto& options, auto visit) {
    visit("observation_window", options.observation_window);
    visit("kernel_size", options.kernel_size);
    visit("pooling", options.pooling);
    visit("pool_over", options.pool_over);
    visit("count_padding", options.count_padding);
    visit("group", options.group);
    visit("num_sinks", options.num_sinks);
  }
};

/// Needs the last observation_window rows of a prompt that may exceed the budget; nothing while decoding.
class SnapKV {
 public:
  static constexpr std::string_view name = "snapkv";
  using Options = SnapKVOptions;
  using Pooling = SnapKVPooling;
  using PoolOver = SnapKVPoolOver;
  using Group = SnapKVGroup;

  explicit SnapKV(const SnapKVOptions& options = {}) : options_(options) {
    detail::require(options.observation_window >= 1, "SnapKV: observation_window must be >= 1, got ", options.observation_window);
    detail::require(options.kernel_size >= 1 && options.kernel_size % 2 == 1, "SnapKV: kernel_size must be odd and >= 1, got ", options.kernel_size);
    detail::require(options.num_sinks >= 0, "SnapKV: num_sinks must be >= 0, got ", options.num_sinks);
  }

  const SnapKVOptions& options() const { return options_; }
  bool evicts(Phase phase) const { return phase != Phase::decode; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .observation_window = options_.observation_window}; }
  Index wanted_rows(const StepInfo& step) const {
    return step.phase == Phase::long_prompt ? std::min(options_.observation_window, step.num_queries) : 0;
  }
  bool wants_query_heads() const { return options_.group == Group::max; }

  void observe(Index kv_head, const AttentionRows& rows) {
    Votes& votes = votes_[static_cast<std::size_t>(kv_head)];
    const AttentionRows::Weights& weights = wants_query_heads() ? rows.per_query_head : rows.mean;
    const Index columns = weights.cols() / rows.num_queries();
    for (Index j = 0; j < rows.num_queries(); ++j) {
      votes.emplace_back(static_cast<std::size_t>(weights.rows() * columns));
      Eigen::Map<Eigen::MatrixXf>(votes.back().data(), weights.rows(), columns) = weights.middleCols(j * columns, columns);
    }
    const Index excess = static_cast<Index>(votes.size()) - options_.observation_window;
    if (excess > 0) votes.erase(votes.begin(), votes.begin() + excess);
  }

  /// Pooled votes of the window's queries; the window itself is protected. Neighbours are by position, whatever the slots.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    std::vector<Index> by_position(slots.positions.size());
    std::iota(by_position.begin(), by_position.end(), Index{0});
    std::sort(by_position.begin(), by_position.end(), [&](Index a, Index b) { return position(slots, a) < position(slots, b); });
    const Eigen::ArrayXf sum = sum_of_votes(kv_head, slots.size());
    const Index prefix = std::max<Index>(slots.size() - options_.observation_window, 0);
    const Index pooled = options_.pool_over == PoolOver::row ? slots.size() : prefix;
    for (Index i = 0; i < slots.size(); ++i)
      out[static_cast<std::size_t>(by_position[static_cast<std::size_t>(i)])] = i < prefix ? pool(sum, by_position, i, pooled) : 0.0f;
  }

  void on_prompt_end(Index kv_head) { votes_[static_cast<std::size_t>(kv_head)] = {}; }
  void reset(const Shape& shape) {
    votes_.assign(static_cast<std::size_t>(shape.kv_heads), {});
    group_size_ = shape.group_size();
  }
  Index bytes() const {
    Index bytes = detail::heap_bytes(votes_);
    for (const Votes& votes : votes_) {
      bytes += detail::heap_bytes(votes);
      for (const std::vector<float>& row : votes) bytes += detail::heap_bytes(row);
    }
    return bytes;
  }

 private:
  using Votes = std::vector<std::vector<float>>;  // of the prompt's last queries so far, (slots, 1 or group_size) each

  static Index position(const SlotsView& slots, Index slot) { return slots.positions[static_cast<std::size_t>(slot)]; }
  /// (slots) Sum over the window's rows, then over the group. Rows of earlier chunks are shorter: later slots got nothing.
  Eigen::ArrayXf sum_of_votes(Index kv_head, Index num_slots) const {
    const Index columns = wants_query_heads() ? group_size_ : 1;
    Eigen::ArrayXXf sum = Eigen::ArrayXXf::Zero(num_slots, columns);
    for (const std::vector<float>& row : votes_[static_cast<std::size_t>(kv_head)]) {
      const Index slots = static_cast<Index>(row.size()) / columns;
      sum.topRows(slots) += Eigen::Map<const Eigen::ArrayXXf>(row.data(), slots, columns);
    }
    return sum.rowwise().maxCoeff();
  }
  float pool(const Eigen::ArrayXf& sum, const std::vector<Index>& by_position, Index i, Index pooled) const {
    const Index first = std::max<Index>(i - options_.kernel_size / 2, 0), last = std::min(i + options_.kernel_size / 2, pooled - 1);
    float total = 0.0f, most = 0.0f;
    for (Index n = first; n <= last; ++n) {
      const float votes = sum[by_position[static_cast<std::size_t>(n)]];
      total += votes, most = std::max(most, votes);
    }
    if (options_.pooling == Pooling::max) return most;
    return total / static_cast<float>(options_.count_padding ? options_.kernel_size : last - first + 1);
  }

  SnapKVOptions options_;
  Index group_size_ = 1;
  std::vector<Votes> votes_;  // (kv_heads)
};
static_assert(Policy<SnapKV> && ScoresSlots<SnapKV> && ObservesAttention<SnapKV> && ChoosesRows<SnapKV> && ChoosesPhases<SnapKV> &&
              ProtectsSlots<SnapKV> && WantsQueryHeads<SnapKV>);

}  // namespace kvsnip
