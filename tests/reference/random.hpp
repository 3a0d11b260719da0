// Random, literally: of all positions that ever could go, however they came, those with the largest numbers are held.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

/// @param numbers      of all positions seen, 0, 1, ...
/// @param num_recents  newest positions that were never among those that could go
/// @return the positions held, ascending
inline std::vector<Index> random_sample(const std::vector<float>& numbers, Index budget, Index num_sinks, Index num_recents) {
  const Index seen = std::ssize(numbers);
  std::vector<Index> held, drawn;
  for (Index position = 0; position < seen; ++position)
    (position < num_sinks || position >= seen - num_recents ? held : drawn).push_back(position);
  std::sort(drawn.begin(), drawn.end(), [&](Index a, Index b) {
    const float x = numbers.begin()[a], y = numbers.begin()[b];
    return x != y ? x > y : a > b;
  });
  for (const Index position : drawn)
    if (std::ssize(held) < budget) held.push_back(position);
  std::sort(held.begin(), held.end());
  return held;
}

}  // namespace reference
