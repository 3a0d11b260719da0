// Random numbers that are the same on every platform: the standard fixes std::mt19937_64's bits, but not what its
// distributions make of them.
#pragma once

#include <random>

namespace toy {

/// Uniform in [0, 1): the top 53 bits, all of which a double holds.
inline double uniform(std::mt19937_64& bits) { return static_cast<double>(bits() >> 11) * 0x1p-53; }

}  // namespace toy
