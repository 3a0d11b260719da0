// RKV, literally, for one kv_head.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <vector>

namespace reference {

struct RKVOptions {
  Eigen::Index observation_window = 8, kernel_size = 7;
  double importance = 0.1, similarity = 0.5;
};

/// @param rows  (positions, queries) the last queries' weights, mean over the group
/// @param keys  (head_dim, positions)
/// @return scores of the positions before the window
inline std::vector<double> r_kv(const Eigen::MatrixXd& rows, const Eigen::MatrixXd& keys, const RKVOptions& o) {
  const Eigen::Index n = keys.cols(), prefix = std::max<Eigen::Index>(n - o.observation_window, 0);
  Eigen::MatrixXd cosine(n, n);
  for (Eigen::Index i = 0; i < n; ++i)
    for (Eigen::Index j = 0; j < n; ++j) cosine(i, j) = i == j ? 0 : keys.col(i).dot(keys.col(j)) / (keys.col(i).norm() * keys.col(j).norm());
  std::vector<double> redundancy;
  for (Eigen::Index token = 0; token < n; ++token) {
    double blamed = 0;
    for (Eigen::Index other = 0; other < n; ++other) {  // does `other` hold it against `token` that they are alike?
      bool newest_that_other_resembles = cosine(other, token) > o.similarity;
      for (Eigen::Index later = token + 1; later < n; ++later) newest_that_other_resembles = newest_that_other_resembles && !(cosine(other, later) > o.similarity && later != other);
      if (!newest_that_other_resembles || other == token) blamed += cosine(other, token);
    }
    redundancy.push_back(std::exp(blamed / static_cast<double>(n)));
  }
  double total = 0;
  for (const double r : redundancy) total += r;
  std::vector<double> scores;
  for (Eigen::Index position = 0; position < prefix; ++position) {
    double most = 0;
    for (Eigen::Index near = position - o.kernel_size / 2; near <= position + o.kernel_size / 2; ++near)
      if (near >= 0 && near < prefix) most = std::max(most, rows.row(near).mean());
    scores.push_back(o.importance * most - (1 - o.importance) * redundancy.begin()[position] / total);
  }
  return scores;
}

}  // namespace reference
