// Random numbers that are a function of where they are used, not of when.
#pragma once

#include <cstdint>

namespace kvsnip::detail {

/// Every bit of x changes every bit of the result with probability 1/2 (a finaliser of Stafford's: "Mix13").
inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;  // so that 0 is not its own image
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace kvsnip::detail
