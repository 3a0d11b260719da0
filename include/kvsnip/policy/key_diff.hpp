// KeyDiff: distinctive keys stay. What points where most keys of the cache point is redundant, and goes.
//
// Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
// Environments", arXiv:2504.15364: the form that compares each key with one anchor, the mean of the unit keys.
// Needs keys alone. The anchor moves with every token, so a choice reads all keys, twice: it is made refill_interval
// victims at a time. State: the inverse norm, 4 bytes per slot and kv_head.
// Differs from the paper: recents are protected by default (its sliding window), and victims that wait in the queue were
// chosen by the anchor of that time.
#pragma once

#include <algorithm>
#include <string_view>

#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct KeyDiffOptions {
  Index num_sinks = 0;        ///< first positions, never evicted [tokens], >= 0; the paper: none, their keys are distinctive
  Index recent_window = 10;   ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget; the paper: 1

  static void each(auto& options, auto visit) { detail::each_usual(options, visit); }
};

class KeyDiff : public detail::UsualOptions<KeyDiffOptions>, public detail::SlotNumbers<1, 1> {
 public:
  static constexpr std::string_view name = "key_diff";
  static constexpr std::string_view paper = "arXiv:2504.15364";
  static constexpr std::string_view needs = "keys";

  explicit KeyDiff(const KeyDiffOptions& options = {}) : UsualOptions("KeyDiff", options) {}

  void on_insert(Index kv_head, Index slot, const SlotsView& slots) {
    const double norm = key(kv_head, slots, slot).cast<double>().norm();
    *enter(kv_head, slot) = static_cast<float>(1 / std::max(norm, 1e-12));  // a key shorter than that has no direction
  }
  /// Minus the cosine of the slot's key and the anchor, which is the mean of all slots' keys divided by their norms.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    detail::require_vectors("KeyDiff", slots);
    const float* inverse_norms = numbers(kv_head);
    Vector anchor = vector<0>(kv_head);
    anchor.setZero();
    for (Index slot = 0; slot < slots.size(); ++slot) anchor += inverse_norms[slot] * key(kv_head, slots, slot);
    anchor.normalize();  // zero stays zero
    for (Index slot = 0; slot < slots.size(); ++slot)
      out[static_cast<std::size_t>(slot)] = -inverse_norms[slot] * anchor.dot(key(kv_head, slots, slot));
  }
};
static_assert(Policy<KeyDiff> && ScoresSlots<KeyDiff> && TracksInserts<KeyDiff> && TracksGathers<KeyDiff> && ReservesState<KeyDiff>);

}  // namespace kvsnip
