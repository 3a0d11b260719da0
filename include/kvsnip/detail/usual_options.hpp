// The three options that most policies have in common: what they never evict, and how many victims they choose at once.
#pragma once

#include <algorithm>
#include <string_view>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// Visits num_sinks, recent_window and refill_interval.
void each_usual(auto& options, auto& visit) {
  visit("num_sinks", options.num_sinks);
  visit("recent_window", options.recent_window);
  visit("refill_interval", options.refill_interval);
}

/// A base for policies: keeps the options O and answers for those three, in prompts and decode alike.
template <class O>
class UsualOptions {
 public:
  using Options = O;

  const O& options() const { return options_; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .recent_window = options_.recent_window}; }
  /// As many as refill_interval; 0: a 32nd of the budget, 1 to 128.
  Eviction eviction(Index budget) const {
    return {.count = options_.refill_interval > 0 ? options_.refill_interval : std::clamp<Index>(budget / 32, 1, 128)};
  }

 protected:
  /// @param policy  the class that errors name
  UsualOptions(std::string_view policy, const O& options) : options_(options) {
    require(options.num_sinks >= 0, policy, ": num_sinks must be >= 0, got ", options.num_sinks);
    require(options.recent_window >= 0, policy, ": recent_window must be >= 0, got ", options.recent_window);
    require(options.refill_interval >= 0, policy, ": refill_interval must be >= 0, got ", options.refill_interval);
  }

  O options_;
};

}  // namespace kvsnip::detail
