// CUR, literally: squared norms, divided by their sums in each neighbourhood, made one score and divided by its sum.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <string>
#include <vector>

namespace reference {

/// @param keys, values  (head_dim, tokens), by position
/// @param leverage      "product", "mean", "key" or "value"
/// @param local_window  tokens of a neighbourhood; 0: all
inline std::vector<double> cur(const Eigen::MatrixXd& keys, const Eigen::MatrixXd& values, const std::string& leverage, Eigen::Index local_window) {
  const Eigen::Index tokens = keys.cols(), window = local_window > 0 ? local_window : tokens;
  const auto shares = [&](const Eigen::MatrixXd& x) {
    std::vector<double> result;
    for (Eigen::Index t = 0; t < tokens; ++t) {
      double block = 0, own = 0;
      for (Eigen::Index u = t / window * window; u < std::min(tokens, t / window * window + window); ++u)
        for (Eigen::Index d = 0; d < x.rows(); ++d) block += x(d, u) * x(d, u);
      for (Eigen::Index d = 0; d < x.rows(); ++d) own += x(d, t) * x(d, t);
      result.push_back(block > 0 ? own / block : 0);
    }
    return result;
  };
  const std::vector<double> k = shares(keys), v = shares(values);
  std::vector<double> scores;
  double sum = 0;
  for (std::size_t t = 0; t < k.size(); ++t) {
    scores.push_back(leverage == "product" ? k[t] * v[t] : leverage == "mean" ? (k[t] + v[t]) / 2 : leverage == "key" ? k[t] : v[t]);
    sum += scores.back();
  }
  for (double& score : scores) score = sum > 0 ? score / sum : 0;
  return scores;
}

}  // namespace reference
