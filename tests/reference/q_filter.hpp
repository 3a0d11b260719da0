// QFilter, literally: the more a key has of the filter, the lower.
#pragma once

#include <Eigen/Core>
#include <vector>

namespace reference {

/// @param keys    (head_dim, tokens)
/// @param filter  (head_dim)
inline std::vector<double> q_filter(const Eigen::MatrixXd& keys, const Eigen::VectorXd& filter) {
  std::vector<double> scores;
  for (Eigen::Index t = 0; t < keys.cols(); ++t) {
    double product = 0;
    for (Eigen::Index d = 0; d < keys.rows(); ++d) product += filter(d) * keys(d, t);
    scores.push_back(-product);
  }
  return scores;
}

}  // namespace reference
