// Who stays, literally: the sinks, the newest, and of the others the best; of equals the newer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

/// @param positions  held, ascending
/// @param scores     of these, higher is kept
/// @return the `room` positions that stay, ascending; all if there are no more
inline std::vector<Index> keep_best(const std::vector<Index>& positions, const std::vector<double>& scores, Index room, Index num_sinks,
                                    Index num_recents) {
  const Index size = std::ssize(positions);
  std::vector<Index> kept, others;
  for (Index i = 0; i < size; ++i) {
    const bool is_protected = positions.begin()[i] < num_sinks || i >= size - num_recents;
    (is_protected ? kept : others).push_back(i);
  }
  std::sort(others.begin(), others.end(), [&](Index a, Index b) {
    return scores.begin()[a] != scores.begin()[b] ? scores.begin()[a] > scores.begin()[b] : a > b;
  });
  for (const Index i : others)
    if (std::ssize(kept) < room) kept.push_back(i);
  std::sort(kept.begin(), kept.end());
  for (Index& i : kept) i = positions.begin()[i];
  return kept;
}

}  // namespace reference
