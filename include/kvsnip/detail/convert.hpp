// Between float32 and what is stored, and the check that values are fit to be stored.
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

template <class From, class To>
void convert(const From* from, Index n, To* to) {
  if constexpr (std::same_as<From, To>) std::memcpy(static_cast<void*>(to), from, static_cast<std::size_t>(n) * sizeof(To));
  else if constexpr (std::same_as<To, float>)
    for (Index i = 0; i < n; ++i) to[i] = to_float(from[i]);
  else
    for (Index i = 0; i < n; ++i) to[i] = static_cast<To>(from[i]);
}

/// SlotsView::ReadColumn for columns of T.
template <class T>
void read_column(const void* columns, Index head_dim, Index slot, float* out) {
  convert(static_cast<const T*>(columns) + slot * head_dim, head_dim, out);
}

}  // namespace kvsnip::detail
