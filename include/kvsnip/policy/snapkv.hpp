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
#include <string_view>
#include <vector>

#include "kvsnip/detail/observation_window.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/select.hpp"
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
class SnapKV : public detail::ObservationWindow<SnapKVOptions> {
 public:
  static constexpr std::string_view name = "snapkv";
  static constexpr std::string_view paper = "arXiv:2404.14469";
  static constexpr std::string_view needs = "a prompt's last attention rows";
  using Pooling = SnapKVPooling;
  using PoolOver = SnapKVPoolOver;
  using Group = SnapKVGroup;

  explicit SnapKV(const SnapKVOptions& options = {}) : ObservationWindow("SnapKV", options) {
    detail::require(options.kernel_size >= 1 && options.kernel_size % 2 == 1, "SnapKV: kernel_size must be odd and >= 1, got ", options.kernel_size);
  }

  bool wants_query_heads() const { return options_.group == Group::max; }
  void observe(Index kv_head, const AttentionRows& rows) {
    record(kv_head, rows, wants_query_heads(), [](Index) { return 1.0f; });
  }

  /// Pooled votes of the window's queries; the window itself is protected. Neighbours are by position, whatever the slots.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    const std::vector<Index> by_position = detail::middle(slots.positions, 0, 0);
    const Eigen::ArrayXf sum = sum_of_rows(kv_head, slots.size(), wants_query_heads()).rowwise().maxCoeff();
    const Index prefix = std::max<Index>(slots.size() - options_.observation_window, 0);
    const Index pooled = options_.pool_over == PoolOver::row ? slots.size() : prefix;
    for (Index i = 0; i < slots.size(); ++i)
      out[static_cast<std::size_t>(by_position[static_cast<std::size_t>(i)])] = i < prefix ? pool(sum, by_position, i, pooled) : 0.0f;
  }

 private:
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
};
static_assert(Policy<SnapKV> && ScoresSlots<SnapKV> && ObservesAttention<SnapKV> && ChoosesRows<SnapKV> && ChoosesPhases<SnapKV> &&
              ProtectsSlots<SnapKV> && WantsQueryHeads<SnapKV>);

}  // namespace kvsnip
