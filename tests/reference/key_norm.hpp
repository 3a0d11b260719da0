// KeyNorm, literally: the larger the key, the lower the score.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <vector>

namespace reference {

/// @param keys  (head_dim, tokens)
inline std::vector<double> key_norm(const Eigen::MatrixXd& keys) {
  std::vector<double> scores;
  for (Eigen::Index t = 0; t < keys.cols(); ++t) {
    double sum = 0;
    for (Eigen::Index d = 0; d < keys.rows(); ++d) sum += keys(d, t) * keys(d, t);
    scores.push_back(-std::sqrt(sum));
  }
  return scores;
}

}  // namespace reference
