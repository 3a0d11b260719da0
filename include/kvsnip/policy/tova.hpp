// TOVA: what the last query attends to least goes, the same token in every kv_head.
//
// Oren et al., "Transformers are Multi-State RNNs", arXiv:2401.06104, section 3.2 ("token omission via attention").
// While decoding the last query is the previous step's: a full cache evicts before the new token attends.
// Differs from the paper: victims wait in the queue, and the last prompt token is protected, as in kvpress.
#pragma once

#include <algorithm>
#include <string_view>

#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct TOVAOptions {
  Index num_sinks = 0;        ///< first positions, never evicted [tokens], >= 0; the paper has none
  Index recent_window = 2;    ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget; the paper: 1

  static void each(auto& options, auto visit) { detail::each_usual(options, visit); }
};

/// Needs the last row of every update. State: that row, 4 bytes per slot and kv_head.
class TOVA : public detail::UsualOptions<TOVAOptions>, public detail::SlotNumbers<1> {
 public:
  static constexpr std::string_view name = "tova";
  static constexpr std::string_view paper = "arXiv:2401.06104";
  static constexpr std::string_view needs = "the last attention row";

  explicit TOVA(const TOVAOptions& options = {}) : UsualOptions("TOVA", options) {}

  Index wanted_rows(const StepInfo& step) const { return std::min<Index>(step.num_queries, 1); }
  void observe(Index kv_head, const AttentionRows& rows) {
    if (rows.first_position + rows.num_queries() <= rows.step.last_position()) return;
    const auto last = rows.mean.col(rows.num_queries() - 1);
    std::copy_n(last.data(), last.size(), numbers(kv_head));
  }
  void on_insert(Index kv_head, Index slot, const SlotsView&) { *enter(kv_head, slot) = 0.0f; }
  /// The last row, mean over all query heads. Where kv_heads hold different positions (another policy chose them), each
  /// goes by its own query group.
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) const {
    const auto alike = [&](const SlotsView& slots) { return std::equal(slots.positions.begin(), slots.positions.end(), heads[0].positions.begin(), heads[0].positions.end()); };
    const bool all_alike = std::all_of(heads.begin(), heads.end(), alike);
    for (Index h = 0; h < std::ssize(heads); ++h) row(out[static_cast<std::size_t>(h)]) = Row(numbers(h), heads[static_cast<std::size_t>(h)].size());
    if (!all_alike) return;
    for (std::size_t h = 1; h < heads.size(); ++h) row(out[0]) += row(out[h]);
    row(out[0]) /= static_cast<float>(heads.size());
    for (std::size_t h = 1; h < heads.size(); ++h) row(out[h]) = row(out[0]);
  }

 private:
  using Row = Eigen::Map<const Eigen::ArrayXf>;
  static Eigen::Map<Eigen::ArrayXf> row(std::span<float> out) { return {out.data(), std::ssize(out)}; }
};
static_assert(Policy<TOVA> && ScoresLayers<TOVA> && ObservesAttention<TOVA> && ChoosesRows<TOVA> && TracksInserts<TOVA> && TracksGathers<TOVA> &&
              ReservesState<TOVA> && ChoosesEviction<TOVA> && ProtectsSlots<TOVA>);

}  // namespace kvsnip
