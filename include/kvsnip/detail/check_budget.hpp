// What a cache refuses at construction: impossible shapes, and a budget that cannot hold what the policy protects.
#pragma once

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

inline void check_shape(const Shape& shape) {
  require(shape.kv_heads >= 1 && shape.kv_heads <= 65536, "Shape: kv_heads must be in [1, 65536], got ", shape.kv_heads);
  require(shape.head_dim >= 1 && shape.head_dim <= 65536, "Shape: head_dim must be in [1, 65536], got ", shape.head_dim);
  require(shape.query_heads >= 1 && shape.query_heads <= 65536 && shape.query_heads % shape.kv_heads == 0,
          "Shape: query_heads must be a multiple of kv_heads = ", shape.kv_heads, " in [1, 65536], got ", shape.query_heads);
}

template <Policy P>
void check_budget(const P& policy, Index budget, Index largest) {
  require(budget >= 1 && budget <= largest, "KVCache: budget must be in [1, 2^61], got ", budget);
  require(hooks::evicts(policy, Phase::long_prompt) || !hooks::evicts(policy, Phase::decode),
          "KVCache: a policy that evicts while decoding must compress prompts too: Chain it behind one that does");
  for (const Phase phase : {Phase::decode, Phase::long_prompt}) {
    if (!hooks::evicts(policy, phase)) continue;
    const Protection p = hooks::protection(policy, phase);
    require(p.recent_window <= budget && p.num_sinks <= budget - p.recent_window,
            "KVCache: budget must be >= num_sinks + recent_window = ", p.num_sinks, " + ", p.recent_window, ", got ", budget);
    require(p.observation_window == 0 || p.observation_window < budget,
            "KVCache: budget must be > observation_window = ", p.observation_window, ", got ", budget);
    require(p.num_sinks <= budget - p.observation_window,
            "KVCache: budget must be >= num_sinks + observation_window = ", p.num_sinks, " + ", p.observation_window, ", got ", budget);
  }
}

}  // namespace kvsnip::detail
