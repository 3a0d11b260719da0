// Random numbers that are the same on every platform: the standard fixes std::mt19937_64's bits, but not what its
// distributions make of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>

namespace toy {

/// Uniform in [0, 1): the top 53 bits, all of which a double holds.
inline double uniform(std::mt19937_64& bits) { return static_cast<double>(bits() >> 11) * 0x1p-53; }

/// Uniform in [0, n). @param n  >= 1
inline std::int64_t below(std::int64_t n, std::mt19937_64& bits) { return static_cast<std::int64_t>(uniform(bits) * static_cast<double>(n)); }

/// Normal, mean 0, variance 1 (Box and Muller 1958).
inline double normal(std::mt19937_64& bits) {
  const double radius = std::sqrt(-2 * std::log(1 - uniform(bits)));
  return radius * std::cos(2 * std::numbers::pi * uniform(bits));
}

/// The `number`-th of a family of independent sequences.
inline std::mt19937_64 random_bits(std::uint64_t seed, std::uint64_t number) {
  std::seed_seq both{seed & 0xFFFFFFFF, seed >> 32, number & 0xFFFFFFFF, number >> 32};
  return std::mt19937_64(both);
}

}  // namespace toy
