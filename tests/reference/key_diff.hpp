// KeyDiff, literally: minus the cosine of a key and the mean of all unit keys.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <vector>

namespace reference {

/// @param keys  (head_dim, tokens)
inline std::vector<double> key_diff(const Eigen::MatrixXd& keys) {
  const auto dot = [](const Eigen::VectorXd& a, const Eigen::VectorXd& b) {
    double sum = 0;
    for (Eigen::Index d = 0; d < a.size(); ++d) sum += a(d) * b(d);
    return sum;
  };
  Eigen::VectorXd anchor = Eigen::VectorXd::Zero(keys.rows());
  for (Eigen::Index t = 0; t < keys.cols(); ++t)
    if (const double norm = std::sqrt(dot(keys.col(t), keys.col(t))); norm > 0) anchor += keys.col(t) / norm / static_cast<double>(keys.cols());
  std::vector<double> scores;
  for (Eigen::Index t = 0; t < keys.cols(); ++t) {
    const double norms = std::sqrt(dot(keys.col(t), keys.col(t)) * dot(anchor, anchor));
    scores.push_back(norms > 0 ? -dot(keys.col(t), anchor) / norms : 0);
  }
  return scores;
}

}  // namespace reference
