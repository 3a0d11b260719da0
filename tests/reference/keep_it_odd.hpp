// KeepItOdd, literally: even positions go first, the oldest first; then odd ones likewise.
#pragma once

#include <cstddef>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

/// One token more. @param held  ascending; what is held of the tokens so far
inline void keep_it_odd(std::vector<Index>& held, Index position, Index budget, Index num_sinks, Index recent_window) {
  held.push_back(position);
  if (static_cast<Index>(held.size()) <= budget) return;
  for (const Index parity : {0, 1})
    for (auto i = held.begin() + num_sinks; i < held.end() - recent_window; ++i)
      if (*i % 2 == parity) {
        held.erase(i);
        return;
      }
}

}  // namespace reference
