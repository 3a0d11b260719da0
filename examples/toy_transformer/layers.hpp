// What a Llama-style layer does besides attention and matrix products.
#pragma once

#include <Eigen/Core>
#include <cmath>

#include "weights.hpp"

namespace toy {

/// Every column of x divided by its root mean square, times `weight`. @param x, out  (dim, tokens)
inline void rms_norm(const Eigen::MatrixXf& x, const Eigen::VectorXf& weight, Eigen::MatrixXf& out) {
  out.resize(x.rows(), x.cols());
  for (Index t = 0; t < x.cols(); ++t) {
    const float mean_square = x.col(t).squaredNorm() / static_cast<float>(x.rows());
    out.col(t) = x.col(t).cwiseProduct(weight) / std::sqrt(mean_square + rms_epsilon);
  }
}

/// The angles of RoPE for consecutive positions, shared by all heads and layers.
class Rope {
 public:
  Rope(Index head_dim, Index first_position, Index tokens) : cos_(head_dim / 2, tokens), sin_(head_dim / 2, tokens) {
    for (Index i = 0; i < head_dim / 2; ++i) {
      const double frequency = std::pow(rope_theta, -2 * static_cast<double>(i) / static_cast<double>(head_dim));
      for (Index t = 0; t < tokens; ++t) {
        const double angle = static_cast<double>(first_position + t) * frequency;  // float is too coarse far out
        cos_(i, t) = static_cast<float>(std::cos(angle));
        sin_(i, t) = static_cast<float>(std::sin(angle));
      }
    }
  }

  /// Turns the pairs (2i, 2i + 1) of every head. @param x  (heads * head_dim, tokens)
  void rotate(Eigen::MatrixXf& x) const {
    const Index pairs = cos_.rows();
    for (Index t = 0; t < x.cols(); ++t) {
      for (Index row = 0; row < x.rows(); row += 2) {
        const float c = cos_(row / 2 % pairs, t), s = sin_(row / 2 % pairs, t);
        const float a = x(row, t), b = x(row + 1, t);
        x(row, t) = a * c - b * s;
        x(row + 1, t) = a * s + b * c;
      }
    }
  }

 private:
  Eigen::MatrixXf cos_, sin_;  ///< (head_dim / 2, tokens)
};

}  // namespace toy
