// The one integer of the library.
#pragma once

#include <Eigen/Core>

namespace kvsnip {

/// All sizes, counts, slots and positions; 64-bit.
using Index = Eigen::Index;
static_assert(sizeof(Index) == 8, "kvsnip needs 64-bit sizes: do not set EIGEN_DEFAULT_DENSE_INDEX_TYPE to less");

/// The largest budget and the end of the positions: 2^61.
inline constexpr Index unlimited_budget = Index{1} << 61;

}  // namespace kvsnip
