// Random: a uniform sample of all positions seen stays. The baseline that a policy with a reason must beat.
//
// Every position of every kv_head has its own number, a function of the seed alone, and the largest numbers stay: each
// token that ever could be evicted is held with the same probability, however old it is. Needs nothing but positions.
// Each kv_head samples for itself: one shared sample would lose a token in all of them at once, a far worse baseline.
#pragma once

#include <cstdint>
#include <string_view>

#include "kvsnip/detail/mix.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct RandomOptions {
  Index seed = 0;             ///< any number; layers whose samples should differ need different ones
  Index num_sinks = 0;        ///< first positions, never evicted [tokens], >= 0
  Index recent_window = 1;    ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) {
    visit("seed", options.seed);
    detail::each_usual(options, visit);
  }
};

class Random : public detail::UsualOptions<RandomOptions> {
 public:
  static constexpr std::string_view name = "random";
  static constexpr std::string_view needs = "positions";

  explicit Random(const RandomOptions& options = {}) : UsualOptions("Random", options) {}

  /// Uniform in [0, 1), a multiple of 2^-24.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    const std::uint64_t stream = detail::mix(detail::mix(static_cast<std::uint64_t>(options_.seed)) + static_cast<std::uint64_t>(kv_head));
    for (std::size_t slot = 0; slot < out.size(); ++slot)
      out[slot] = static_cast<float>(detail::mix(stream + static_cast<std::uint64_t>(slots.positions[slot])) >> 40) * 0x1p-24f;
  }
};
static_assert(Policy<Random> && ScoresSlots<Random> && ChoosesEviction<Random> && ProtectsSlots<Random>);

}  // namespace kvsnip
