// Positions as tests compare them.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <vector>

namespace test {

using Eigen::Index;

/// Slots may hold positions in any order; two caches that hold the same have the same list here.
template <class Positions>
std::vector<Index> sorted(const Positions& positions) {
  std::vector<Index> result(positions.begin(), positions.end());
  std::sort(result.begin(), result.end());
  return result;
}

/// first, first + 1, ... last - 1.
inline std::vector<Index> consecutive(Index first, Index last) {
  std::vector<Index> result;
  for (Index position = first; position < last; ++position) result.push_back(position);
  return result;
}

}  // namespace test
