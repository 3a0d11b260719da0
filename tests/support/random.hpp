// Random test data: the same numbers from the same seed on every platform (no distributions of the standard library).
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <random>

namespace test {

using Eigen::Index;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}

  /// Uniform in [0, n), n >= 1; the bias of the remainder is far below what a test can see.
  Index below(Index n) { return static_cast<Index>(engine_() % static_cast<std::uint64_t>(n)); }
  /// Uniform in [low, high], both included.
  Index between(Index low, Index high) { return low + below(high - low + 1); }
  /// True once in n times.
  bool one_in(Index n) { return below(n) == 0; }
  /// One of the arguments.
  Index pick(std::initializer_list<Index> choices) {
    return choices.begin()[below(static_cast<Index>(choices.size()))];
  }
  /// Uniform in [0, 1), a multiple of 2^-24.
  float uniform() { return static_cast<float>(engine_() >> 40) * 0x1p-24f; }
  /// Nearly normal, mean 0 and variance 1: the sum of twelve uniforms less six.
  float normal() {
    float sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return sum;
  }
  /// (rows, cols) of normal().
  Eigen::MatrixXf matrix(Index rows, Index cols) {
    Eigen::MatrixXf out(rows, cols);
    for (Index col = 0; col < cols; ++col)
      for (Index row = 0; row < rows; ++row) out(row, col) = normal();
    return out;
  }
  /// One query's attention weights over `size` slots: multiples of 1/64 that sum to 1. Sums and means over 2, 4 or 8
  /// query heads are then exact in float, and scores tie often.
  Eigen::VectorXf weights(Index size) {
    Eigen::VectorXf out = Eigen::VectorXf::Zero(size);
    for (int unit = 0; unit < 64; ++unit) out(below(size)) += 1.0f / 64;
    return out;
  }

 private:
  std::mt19937_64 engine_;  // its sequence is fixed by the standard
};

}  // namespace test
