// KeepItOdd: odd positions stay. Not a method: the tutorial's policy, as small as one can be, and as easy to check by eye.
//
// After cold-compress' strategy of that name. Needs nothing but positions.
// Differs from it: of equals the newer position stays, there the higher slot.
#pragma once

#include <algorithm>
#include <string_view>

#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct KeepItOddOptions {
  Index num_sinks = 0;        ///< first positions, never evicted, odd or not [tokens], >= 0
  Index recent_window = 1;    ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) { detail::each_usual(options, visit); }
};

class KeepItOdd : public detail::UsualOptions<KeepItOddOptions> {
 public:
  static constexpr std::string_view name = "keep_it_odd";
  static constexpr std::string_view needs = "positions";

  explicit KeepItOdd(const KeepItOddOptions& options = {}) : UsualOptions("KeepItOdd", options) {}

  /// 1 for odd positions, 0 for even ones.
  void score(Index /*kv_head*/, const SlotsView& slots, std::span<float> out) const {
    std::transform(slots.positions.begin(), slots.positions.end(), out.begin(), [](Index position) { return static_cast<float>(position % 2); });
  }
};
static_assert(Policy<KeepItOdd> && ScoresSlots<KeepItOdd>);

}  // namespace kvsnip
