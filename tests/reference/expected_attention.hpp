// ExpectedAttention, literally, for one kv_head.
#pragma once

#include <Eigen/Dense>
#include <cmath>
#include <vector>

namespace reference {

struct ExpectedAttentionOptions {
  Eigen::Index num_future_positions = 512, num_sinks = 4;
  bool use_covariance = true, use_value_norm = true;
  double epsilon = 0;
};

/// The rotation matrix of one position.
inline Eigen::MatrixXd rotation(Eigen::Index position, const std::vector<double>& inv_freq, bool interleaved, Eigen::Index dim) {
  Eigen::MatrixXd r = Eigen::MatrixXd::Identity(dim, dim);
  const Eigen::Index pairs = std::ssize(inv_freq);
  for (Eigen::Index i = 0; i < pairs; ++i) {
    const Eigen::Index a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + pairs;
    const double angle = static_cast<double>(position) * inv_freq.begin()[i];
    r(a, a) = r(b, b) = std::cos(angle);
    r(b, a) = std::sin(angle), r(a, b) = -r(b, a);
  }
  return r;
}

/// @param queries  of each query head of the group, before RoPE: (dim, positions)
/// @param keys     after RoPE
/// @return (positions - num_sinks) scores of what follows the sinks
inline Eigen::VectorXd expected_attention(const std::vector<Eigen::MatrixXd>& queries, const Eigen::MatrixXd& keys, const Eigen::MatrixXd& values, const std::vector<double>& inv_freq,
                                          bool interleaved, const ExpectedAttentionOptions& o) {
  const Eigen::Index dim = keys.rows(), n = keys.cols() - o.num_sinks;
  Eigen::MatrixXd turn = Eigen::MatrixXd::Zero(dim, dim);
  for (Eigen::Index j = 0; j < o.num_future_positions; ++j) turn += rotation(keys.cols() + j, inv_freq, interleaved, dim) / static_cast<double>(o.num_future_positions);
  Eigen::VectorXd weights = Eigen::VectorXd::Zero(n);
  for (const Eigen::MatrixXd& of_head : queries) {
    const Eigen::MatrixXd samples = of_head.rightCols(n);
    const Eigen::VectorXd mean = samples.rowwise().mean();
    const Eigen::MatrixXd centred = samples.colwise() - mean, covariance = turn * (centred * centred.transpose() / static_cast<double>(n)) * turn.transpose();
    Eigen::VectorXd logits(n);
    for (Eigen::Index i = 0; i < n; ++i) {
      const Eigen::VectorXd key = keys.col(o.num_sinks + i);
      logits(i) = key.dot(turn * mean) / std::sqrt(static_cast<double>(dim));
      if (o.use_covariance) logits(i) += key.dot(covariance * key) / (2.0 * static_cast<double>(dim));
    }
    logits = (logits.array() - logits.maxCoeff()).exp();
    weights += logits / logits.sum() / static_cast<double>(queries.size());
  }
  for (Eigen::Index i = 0; i < n; ++i) weights(i) = (weights(i) + o.epsilon) * (o.use_value_norm ? values.col(o.num_sinks + i).norm() : 1.0);
  return weights;
}

}  // namespace reference
