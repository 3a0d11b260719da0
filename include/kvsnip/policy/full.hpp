// Full: keep everything. The baseline that every policy is measured against, and the cache of a model without a policy.
#pragma once

#include "kvsnip/policy.hpp"

namespace kvsnip {

/// Scores nothing, so nothing is evicted; the cache's budget is ignored.
class Full {};
static_assert(Policy<Full> && !ScoresSlots<Full>);

}  // namespace kvsnip
