// The model's rotary position embedding, for what looks at keys or queries as they were before it, or moves them.
//
// Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, section 3.2.2.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "kvsnip/detail/require.hpp"
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
  /// Turns every column of x by `positions` further; a negative number turns it back. @param x  (head_dim, any)
  void rotate(Eigen::Ref<Eigen::MatrixXf> x, Index positions) const {
    for (std::size_t i = 0; i < inv_freq.size(); ++i) {
      const double angle = static_cast<double>(positions) * inv_freq[i];  // float is too coarse far out
      const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      const auto [first, second] = elements(i);
      const auto a = static_cast<Index>(first), b = static_cast<Index>(second);
      for (Index column = 0; column < x.cols(); ++column) {
        const float real = x(a, column), imaginary = x(b, column);
        x(a, column) = real * c - imaginary * s;
        x(b, column) = real * s + imaginary * c;
      }
    }
  }
  /// (head_dim, head_dim) The matrix that rotate() multiplies by, mean over `count` positions from `first` on.
  Eigen::MatrixXd mean_rotation(Index first, Index count, Index head_dim) const {
    Eigen::MatrixXd mean = Eigen::MatrixXd::Identity(head_dim, head_dim);
    for (std::size_t i = 0; i < inv_freq.size(); ++i) {
      double c = 0, s = 0;
      for (Index p = first; p < first + count; ++p) c += std::cos(static_cast<double>(p) * inv_freq[i]), s += std::sin(static_cast<double>(p) * inv_freq[i]);
      const auto [one, other] = elements(i);
      const auto a = static_cast<Index>(one), b = static_cast<Index>(other);
      mean(a, a) = mean(b, b) = c / static_cast<double>(count);
      mean(b, a) = s / static_cast<double>(count), mean(a, b) = -mean(b, a);
    }
    return mean;
  }
  void rotate(std::span<float> x, Index positions) const { rotate(Eigen::Map<Eigen::VectorXf>(x.data(), static_cast<Index>(x.size())), positions); }
};

/// Cache-relative positions: turns every key from the position it has to its slot's number, so that what is left of a
/// sequence lies without gaps. The queries that attend to it must count from there on. @param keys  (head_dim, slots)
inline void rerotate(Eigen::Ref<Eigen::MatrixXf> keys, std::span<const Index> positions, const Rope& rope) {
  detail::require(keys.cols() == static_cast<Index>(positions.size()), "rerotate: keys must have one column a position = ", positions.size(), ", got ", keys.cols());
  detail::require(2 * static_cast<Index>(rope.inv_freq.size()) <= keys.rows(), "rerotate: rope.inv_freq must have at most head_dim / 2 = ", keys.rows() / 2,
                  " numbers, got ", rope.inv_freq.size());
  for (Index slot = 0; slot < keys.cols(); ++slot) rope.rotate(keys.col(slot), slot - positions[static_cast<std::size_t>(slot)]);
}

}  // namespace kvsnip
