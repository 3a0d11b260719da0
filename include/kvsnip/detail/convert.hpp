// Float32 of what is stored, and the check that values are fit to be stored.
#pragma once

#include <algorithm>
#include <bit>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// The largest key, value or query element accepted. Float and bfloat16 end at 1e18, so that a dot product of two stored
/// vectors cannot overflow float32; half ends where half does.
template <class T>
constexpr float max_magnitude() {
  return std::same_as<T, Eigen::half> ? 65504.0f : 1e18f;
}

/// Branch-free, so that compilers vectorise it whatever Eigen made of its own conversion.
inline float to_float(float x) { return x; }
inline float to_float(Eigen::bfloat16 x) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(std::bit_cast<std::uint16_t>(x)) << 16);
}
inline float to_float(Eigen::half x) {
  const std::uint32_t bits = std::bit_cast<std::uint16_t>(x);
  const float magnitude = std::bit_cast<float>((bits & 0x7fffu) << 13) * 0x1p112f;  // rebias the exponent, subnormals too
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(magnitude) | ((bits & 0x8000u) << 16));
}

// Checks look at the bits: as integers, magnitudes are in order, infinity and NaN above all numbers, and builds with
// -ffast-math cannot argue them away.
inline std::uint32_t magnitude_bits(float x) { return std::bit_cast<std::uint32_t>(x) & 0x7fffffffu; }
inline bool is_nan(float x) { return magnitude_bits(x) > 0x7f800000u; }
/// The first NaN, or -1.
inline Index first_nan(const float* x, Index n) {
  std::uint32_t largest = 0;
  for (Index i = 0; i < n; ++i) largest = std::max(largest, magnitude_bits(x[i]));
  return largest <= 0x7f800000u ? -1 : std::find_if(x, x + n, is_nan) - x;
}

/// Whether all of x is finite and at most `limit` in magnitude.
template <class S>
bool all_within(const S* x, Index n, float limit) {
  std::uint32_t largest = 0;
  for (Index i = 0; i < n; ++i) largest = std::max(largest, magnitude_bits(to_float(x[i])));
  return largest <= magnitude_bits(limit);
}
/// Whether all of x is finite and not negative.
inline bool all_weights(const float* x, Index n) {
  std::uint32_t largest = 0;
  for (Index i = 0; i < n; ++i) largest = std::max(largest, std::bit_cast<std::uint32_t>(x[i] + 0.0f));  // -0 becomes 0
  return largest < 0x7f800000u;
}

/// The same for what is stored in 16 bits: magnitudes are in order there too.
template <class S>
  requires(sizeof(S) == 2)
bool all_within(const S* x, Index n, float limit) {
  constexpr Index block = 256;
  std::uint16_t bits[block], largest = 0;  // copied: GCC vectorises loops over integers, not over a class around one
  for (Index first = 0; first < n; first += block) {
    const Index count = std::min(block, n - first);
    std::memcpy(bits, x + first, static_cast<std::size_t>(count) * sizeof(S));
    for (Index i = 0; i < count; ++i) {
      const auto magnitude = static_cast<std::uint16_t>(bits[i] & 0x7fffu);
      largest = magnitude > largest ? magnitude : largest;
    }
  }
  const bool finite = largest < (std::same_as<S, Eigen::half> ? 0x7c00u : 0x7f80u);
  return finite && to_float(std::bit_cast<S>(largest)) <= limit;
}

}  // namespace kvsnip::detail
