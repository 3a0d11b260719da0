// What a cache refuses at construction: impossible shapes, and a budget that cannot hold what the policy protects.
#pragma once

#include <cmath>
#include <iterator>
#include <string>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

inline void check_shape(const Shape& shape) {
  require(shape.kv_heads >= 1 && shape.kv_heads <= 65536, "Shape: kv_heads must be in [1, 65536], got ", shape.kv_heads);
  require(shape.head_dim >= 1 && shape.head_dim <= 65536, "Shape: head_dim must be in [1, 65536], got ", shape.head_dim);
  require(shape.query_heads >= 1 && shape.query_heads <= 65536 && shape.query_heads % shape.kv_heads == 0,
          "Shape: query_heads must be a multiple of kv_heads = ", shape.kv_heads, " in [1, 65536], got ", shape.query_heads);
}

/// @throws std::invalid_argument  a Rope that does not fit the heads, or that is needed and missing
inline void check_rope(const Rope& rope, const Shape& shape, bool needed) {
  require(!needed || rope.is_known(), "KVCache: the policy needs the model's Rope, and it is empty");
  require(2 * std::ssize(rope.inv_freq) <= shape.head_dim, "KVCache: rope.inv_freq must have at most head_dim / 2 = ", shape.head_dim / 2, " numbers, got ",
          rope.inv_freq.size());
  for (const double frequency : rope.inv_freq) require(std::isfinite(frequency), "KVCache: rope.inv_freq must be finite, got ", frequency);
}

/// What the policy protects must fit. @param whose  "" or " of kv_head 3"
template <Policy P>
void check_room(const P& policy, Index budget, const std::string& whose) {
  for (const Phase phase : {Phase::decode, Phase::long_prompt}) {
    if (!hooks::evicts(policy, phase)) continue;
    const Protection p = hooks::protection(policy, phase);
    require(p.recent_window <= budget && p.num_sinks <= budget - p.recent_window,
            "KVCache: budget", whose, " must be >= num_sinks + recent_window = ", p.num_sinks, " + ", p.recent_window, ", got ", budget);
    require(p.observation_window == 0 || p.observation_window < budget,
            "KVCache: budget", whose, " must be > observation_window = ", p.observation_window, ", got ", budget);
    require(p.num_sinks <= budget - p.observation_window,
            "KVCache: budget", whose, " must be >= num_sinks + observation_window = ", p.num_sinks, " + ", p.observation_window, ", got ", budget);
  }
}
template <Policy P>
void check_budget(const P& policy, Index budget) {
  require(budget >= 1 && budget <= unlimited_budget, "KVCache: budget must be in [1, 2^61], got ", budget);
  require(hooks::evicts(policy, Phase::long_prompt) || !hooks::evicts(policy, Phase::decode),
          "KVCache: a policy that evicts while decoding must compress prompts too: Chain it behind one that does");
  check_room(policy, budget, "");
}
/// A budget that the policy set itself.
template <Policy P>
void check_head_budget(const P& policy, Index kv_head, Index budget) {
  if constexpr (!FixesHeadBudgets<P>) return;
  const std::string whose = " of kv_head " + std::to_string(kv_head);
  require(budget >= 1 && budget <= unlimited_budget, "KVCache: budget", whose, " must be in [1, 2^61], got ", budget);
  check_room(policy, budget, whose);
}

}  // namespace kvsnip::detail
