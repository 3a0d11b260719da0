// CriticalKV's second look, literally.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <vector>

namespace reference {

/// @param scores  of the candidates, in ascending slot
/// @param values  (head_dim, candidates)
/// @param wo      per query head of the group: (hidden, head_dim)
inline std::vector<double> critical_kv(const std::vector<double>& scores, const Eigen::MatrixXd& values, const std::vector<Eigen::MatrixXd>& wo,
                                       std::ptrdiff_t num_kept, double first_stage, double epsilon) {
  std::vector<std::size_t> order(scores.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] != scores[b] ? scores[a] > scores[b] : a > b; });
  const auto num_first = static_cast<std::size_t>(static_cast<double>(num_kept) * first_stage);
  std::vector<double> result(scores.size());
  for (std::size_t rank = 0; rank < order.size(); ++rank) {
    const std::size_t i = order[rank];
    double norm = 0;
    for (const Eigen::MatrixXd& w : wo) norm += (w * values.col(static_cast<Eigen::Index>(i))).lpNorm<1>() / static_cast<double>(wo.size());
    result[i] = rank < num_first ? static_cast<double>(std::numeric_limits<float>::max()) : (scores[i] + epsilon) * norm;
  }
  return result;
}

}  // namespace reference
