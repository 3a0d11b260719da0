// LeverageScore, NonCausalAttention and Compactor, literally, of all kv_heads; only what nothing protects is given.
#pragma once

#include <Eigen/Dense>
#include <algorithm>
#include <cmath>
#include <vector>

namespace reference {

using Lists = std::vector<Eigen::VectorXd>;  ///< by kv_head

inline Lists z_scores(const Lists& lists) {
  std::vector<double> all;
  for (const Eigen::VectorXd& list : lists) all.insert(all.end(), list.data(), list.data() + list.size());
  double mean = 0, variance = 0;
  for (const double x : all) mean += x / static_cast<double>(all.size());
  for (const double x : all) variance += (x - mean) * (x - mean) / static_cast<double>(all.size() - 1);
  Lists result;
  for (const Eigen::VectorXd& list : lists) result.emplace_back((list.array() - mean) / std::max(std::sqrt(variance), 1e-6));
  return result;
}

/// @param keys    of each kv_head, before RoPE: (head_dim, positions)
/// @param sketch  of each kv_head: (head_dim, sketch_dimension)
inline Lists leverage(const std::vector<Eigen::MatrixXd>& keys, const std::vector<Eigen::MatrixXd>& sketch) {
  Lists result;
  for (std::size_t h = 0; h < keys.size(); ++h) {
    const Eigen::MatrixXd x = (keys[h].colwise() - keys[h].rowwise().mean()).transpose() * sketch[h];
    const Eigen::MatrixXd gram = x.transpose() * x + 0.01 * Eigen::MatrixXd::Identity(x.cols(), x.cols());
    result.emplace_back((x * gram.inverse() * x.transpose()).diagonal().cwiseMax(0));
  }
  return z_scores(result);
}

/// @param queries  of each kv_head: (head_dim, positions * group_size), a query's heads side by side
inline Lists non_causal(const std::vector<Eigen::MatrixXd>& queries, const std::vector<Eigen::MatrixXd>& keys, const std::vector<Eigen::MatrixXd>& values, Eigen::Index chunk_size) {
  Lists result;
  for (std::size_t h = 0; h < keys.size(); ++h) {
    const Eigen::Index positions = keys[h].cols(), group = queries[h].cols() / positions;
    Eigen::VectorXd drawn = Eigen::VectorXd::Zero(positions + 2);  // a zero at either end
    for (Eigen::Index key = 0; key < positions; ++key) {
      const Eigen::Index first = key / chunk_size * chunk_size;
      for (Eigen::Index query = first; query < first + chunk_size; ++query)
        for (Eigen::Index g = 0; g < group; ++g) {
          const auto logit = [&](Eigen::Index k) { return query < positions && k < positions ? queries[h].col(query * group + g).dot(keys[h].col(k)) : 0.0; };
          double total = 0;
          for (Eigen::Index k = first; k < first + chunk_size; ++k) total += std::exp(logit(k) - logit(key));
          drawn(key + 1) += 1 / total / static_cast<double>(group) * values[h].col(key).norm();
        }
    }
    result.emplace_back((drawn.head(positions) + drawn.segment(1, positions) + drawn.tail(positions)) / 3);
  }
  return z_scores(result);
}

}  // namespace reference
