// KeyNorm: keys of small norm stay. The smaller a key, the more attention it tends to get.
//
// Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv:2406.11430.
// Needs keys alone, each once: a decode step reads the new token's. State: the norm, 4 bytes per slot and kv_head.
// Differs from the paper and its code, which protect nothing and leave the first two layers whole: sinks and recents are
// protected by default; which layers to leave whole is a matter of their budgets.
#pragma once

#include <string_view>

#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct KeyNormOptions {
  Index num_sinks = 4;        ///< first positions, never evicted [tokens], >= 0; as in cold-compress
  Index recent_window = 10;   ///< newest positions never evicted, the incoming one included [tokens], >= 0; as in cold-compress
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) { detail::each_usual(options, visit); }
};

class KeyNorm : public detail::UsualOptions<KeyNormOptions>, public detail::SlotNumbers<1> {
 public:
  static constexpr std::string_view name = "key_norm";
  static constexpr std::string_view paper = "arXiv:2406.11430";
  static constexpr std::string_view needs = "keys";

  explicit KeyNorm(const KeyNormOptions& options = {}) : UsualOptions("KeyNorm", options) {}

  /// In double: the squares of the largest keys overflow float32.
  void on_insert(Index kv_head, Index slot, const SlotsView& slots) {
    *enter(kv_head, slot) = static_cast<float>(key(kv_head, slots, slot).cast<double>().norm());
  }
  /// Minus the L2 norm of the slot's key (after RoPE, which leaves it as it was).
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    detail::require_vectors("KeyNorm", slots);
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = -numbers(kv_head)[slot];
  }
};
static_assert(Policy<KeyNorm> && ScoresSlots<KeyNorm> && TracksInserts<KeyNorm> && TracksGathers<KeyNorm> && ReservesState<KeyNorm> &&
              ChoosesEviction<KeyNorm> && ProtectsSlots<KeyNorm>);

}  // namespace kvsnip
