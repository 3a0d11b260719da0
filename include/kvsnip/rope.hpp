// The model's rotary position embedding, for what looks at keys or queries as they were before it, or moves them.
//
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, section 3.2.2.
#pragma once

#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "kvsnip/index.hpp"

namespace kvsnip {

/// Pair i of a key or query at position p is turned by p * inv_freq[i]. What lies past the last pair is left alone.
struct Rope {
  enum class Pairing {
    interleaved,  ///< elements 2i and 2i + 1 (the paper; llama2.c)
    half_split    ///< elements i and i + pairs (transformers, kvpress)
  };

  std::vector<double> inv_freq;  ///< (pairs) [radians a position], 2 * pairs <= head_dim; empty: not told
  Pairing pairing = Pairing::interleaved;

  bool is_known() const { return !inv_freq.empty(); }
  /// inv_freq of the paper: theta^(-2i / head_dim).
  static Rope standard(Index head_dim, Pairing pairing, double theta = 10000) {
    Rope rope{{}, pairing};
    for (Index i = 0; i < head_dim / 2; ++i) rope.inv_freq.push_back(std::pow(theta, -2 * static_cast<double>(i) / static_cast<double>(head_dim)));
    return rope;
  }
  /// The elements of pair i.
  std::pair<std::size_t, std::size_t> elements(std::size_t i) const {
    return pairing == Pairing::interleaved ? std::pair(2 * i, 2 * i + 1) : std::pair(i, i + inv_freq.size());
  }
  /// Turns x by `positions` further; a negative number turns it back. @param x  (head_dim)
  void rotate(std::span<float> x, Index positions) const {
    for (std::size_t i = 0; i < inv_freq.size(); ++i) {
      const double angle = static_cast<double>(positions) * inv_freq[i];  // float is too coarse far out
      const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      const auto [a, b] = elements(i);
      const float real = x[a], imaginary = x[b];
      x[a] = real * c - imaginary * s;
      x[b] = real * s + imaginary * c;
    }
  }
};

}  // namespace kvsnip
