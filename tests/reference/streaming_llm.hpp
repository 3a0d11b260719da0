// StreamingLLM, literally: whatever came, the first num_sinks positions and the newest others, budget in all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

/// The positions held after `num_tokens` tokens, ascending; how they came makes no difference.
inline std::vector<Index> streaming_llm(Index num_tokens, Index num_sinks, Index budget) {
  std::vector<Index> held;
  for (Index position = 0; position < num_tokens; ++position) {
    held.push_back(position);
    if (static_cast<Index>(held.size()) > budget)
      held.erase(held.begin() + num_sinks);  // the oldest that is not a sink
  }
  return held;
}

}  // namespace reference
