// Attention of one query head, word for word: softmax(q . k / sqrt(head_dim)) over the keys a query may see, in double.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

struct Attention {
  Eigen::MatrixXd weights;  ///< (keys, queries), a column sums to 1, or is 0 when its query sees no key
  Eigen::MatrixXd out;      ///< (head_dim, queries)
};

/// @param queries    (head_dim, queries), at positions first_position, first_position + 1, ...
/// @param keys       (head_dim, keys), at `positions`; a query sees the positions up to its own
/// @param values     (head_dim, keys)
inline Attention attend(const Eigen::MatrixXd& queries, Index first_position, const Eigen::MatrixXd& keys,
                        const Eigen::MatrixXd& values, const std::vector<Index>& positions) {
  const Index head_dim = queries.rows(), num_queries = queries.cols(), num_keys = keys.cols();
  Attention result{Eigen::MatrixXd::Zero(num_keys, num_queries), Eigen::MatrixXd::Zero(head_dim, num_queries)};
  for (Index j = 0; j < num_queries; ++j) {
    std::vector<Index> visible;
    for (Index i = 0; i < num_keys; ++i)
      if (positions.begin()[i] <= first_position + j) visible.push_back(i);

    double largest = -std::numeric_limits<double>::infinity();
    for (const Index i : visible) {
      double dot = 0;
      for (Index d = 0; d < head_dim; ++d) dot += queries(d, j) * keys(d, i);
      result.weights(i, j) = dot / std::sqrt(static_cast<double>(head_dim));
      largest = std::max(largest, result.weights(i, j));
    }
    double sum = 0;
    for (const Index i : visible) {
      result.weights(i, j) = std::exp(result.weights(i, j) - largest);
      sum += result.weights(i, j);
    }
    for (const Index i : visible) {
      result.weights(i, j) /= sum;
      for (Index d = 0; d < head_dim; ++d) result.out(d, j) += result.weights(i, j) * values(d, i);
    }
  }
  return result;
}

}  // namespace reference
