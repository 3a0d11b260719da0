// A policy's scores when slots are chosen: of one kv_head, or of all at once where the policy looks at them together.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/convert.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// Scratch: its memory is kept from one choice to the next, and nothing is allocated once it is large enough.
class LayerScores {
 public:
  /// What was scored before is out of date.
  void begin() { all_are_scored_ = false; }
  /// (slots) One kv_head's scores; where the policy looks at all together they are made when the first is asked for.
  /// @param view  kv_head -> SlotsView
  template <class P, class View>
  std::span<float> of(P& policy, Index kv_head, Index num_heads, Phase phase, const View& view) {
    const bool by_layer = hooks::scores_layer(policy, phase), together = by_layer || (phase != Phase::decode && hooks::shares_budget(policy));
    const Index first = together ? 0 : kv_head, end = together ? num_heads : kv_head + 1;
    if (together && std::exchange(all_are_scored_, true)) return scores_[static_cast<std::size_t>(kv_head)];
    scores_.resize(std::max(scores_.size(), static_cast<std::size_t>(end - first)));
    views_.clear(), outs_.clear();
    for (Index h = first; h < end; ++h) {
      std::vector<float>& scores = scores_[static_cast<std::size_t>(h - first)];
      views_.push_back(view(h));
      scores.resize(views_.back().positions.size());
      outs_.emplace_back(scores);
      if (!by_layer) hooks::score(policy, h, views_.back(), outs_.back());
    }
    if (by_layer) hooks::score_layer(policy, std::span<const SlotsView>(views_), std::span<const std::span<float>>(outs_));
    for (Index h = first; h < end; ++h) require_no_nan(h, views_[static_cast<std::size_t>(h - first)], outs_[static_cast<std::size_t>(h - first)]);
    return outs_[static_cast<std::size_t>(kv_head - first)];
  }
  /// Scores once more, where the policy looks at the choice itself. @param num_gone  of the candidates
  template <class P, class Candidate>
  void refine(P& policy, Index kv_head, const SlotsView& slots, Index num_gone, const Candidate& is_candidate, std::span<float> scores) {
    if (!hooks::refines(policy, slots.phase)) return;
    candidates_.clear();
    for (Index slot = 0; slot < slots.size(); ++slot)
      if (is_candidate(slot)) candidates_.push_back(slot);
    hooks::refine(policy, kv_head, slots, Choice{candidates_, std::max<Index>(static_cast<Index>(candidates_.size()) - num_gone, 0)}, scores);
    require_no_nan(kv_head, slots, scores);
  }
  Index bytes() const {
    Index bytes = heap_bytes(scores_) + heap_bytes(views_) + heap_bytes(outs_) + heap_bytes(candidates_);
    for (const std::vector<float>& scores : scores_) bytes += heap_bytes(scores);
    return bytes;
  }

 private:
  static void require_no_nan(Index kv_head, const SlotsView& slots, std::span<const float> scores) {
    const Index nan = first_nan(scores.data(), static_cast<Index>(scores.size()));
    require_state(nan < 0, "score: the policy returned NaN for kv_head ", kv_head, ", position ", nan < 0 ? 0 : slots.positions[static_cast<std::size_t>(nan)]);
  }

  std::vector<std::vector<float>> scores_;  // (slots) of one kv_head, or of each
  std::vector<SlotsView> views_;            // (kv_heads)
  std::vector<std::span<float>> outs_;      // (kv_heads)
  std::vector<Index> candidates_;           // (slots)
  bool all_are_scored_ = false;
};

}  // namespace kvsnip::detail
