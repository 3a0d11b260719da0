// Full: keep everything. The baseline that every policy is measured against, and the cache of a model without a policy.
#pragma once

#include <string_view>

#include "kvsnip/policy.hpp"

namespace kvsnip {

/// Scores nothing, so nothing is evicted; the cache's budget is ignored.
class Full {
 public:
  static constexpr std::string_view name = "full";
  static constexpr std::string_view needs = "nothing";
};
static_assert(Policy<Full> && !ScoresSlots<Full>);

}  // namespace kvsnip
