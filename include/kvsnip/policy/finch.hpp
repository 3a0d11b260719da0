// Finch: what the question at the prompt's end attends to stays.
//
// Corallo & Papotti, "FINCH: Prompt-guided Key-Value Cache Compression", arXiv:2408.00167. The window is the question, so
// its length is the user's to say. Prompt only: alone it lets the cache grow while decoding; Chain<Finch, ...> bounds it.
// Needs the last observation_window rows of a prompt that may exceed the budget; nothing while decoding.
// With `normalize` a row counts in proportion to what it had to share: times the number of visible slots less one, as in
// kvpress, so that later queries, whose weights are spread over more slots, vote as strongly as earlier ones.
// Differs from the paper, which feeds a long document in chunks, the question after each, and gives the kept keys new
// positions: here a prompt is compressed once, at its end, and keys keep the RoPE phase of their position.
#pragma once

#include <string_view>

#include "kvsnip/detail/observation_window.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct FinchOptions {
  Index observation_window = 32;  ///< tokens of the question: they vote, and are kept whole [tokens], >= 1
  bool normalize = true;          ///< weigh rows by what they can see; as in the paper
  Index num_sinks = 0;            ///< first positions kept whatever their votes [tokens], >= 0

  static void each(auto& options, auto visit) {
    visit("observation_window", options.observation_window);
    visit("normalize", options.normalize);
    visit("num_sinks", options.num_sinks);
  }
};

class Finch : public detail::ObservationWindow<FinchOptions> {
 public:
  static constexpr std::string_view name = "finch";
  static constexpr std::string_view paper = "arXiv:2408.00167";
  static constexpr std::string_view needs = "a prompt's last attention rows";

  explicit Finch(const FinchOptions& options = {}) : ObservationWindow("Finch", options) {}

  void observe(Index kv_head, const AttentionRows& rows) {
    record(kv_head, rows, false, [&](Index j) { return options_.normalize ? static_cast<float>(rows.num_visible(j) - 1) : 1.0f; });
  }
  /// Mean of the window's rows, each the mean over the query group; the window itself is protected.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    const auto count = static_cast<float>(std::max<Index>(num_rows(kv_head), 1));
    Eigen::Map<Eigen::ArrayXf>(out.data(), slots.size()) = sum_of_rows(kv_head, slots.size(), false).col(0) / count;
  }
};
static_assert(Policy<Finch> && ScoresSlots<Finch> && ObservesAttention<Finch> && ChoosesRows<Finch> && ChoosesPhases<Finch> && ProtectsSlots<Finch>);

}  // namespace kvsnip
