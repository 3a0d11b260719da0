// Finch, literally: the question's rows, each times what it can see of others, averaged.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <vector>

#include "eviction.hpp"

namespace reference {

struct FinchOptions {
  Index budget = 0;
  Index observation_window = 32;
  bool normalize = true;
  Index num_sinks = 0;
};

struct FinchResult {
  std::vector<double> scores;  ///< of all positions
  std::vector<Index> kept;     ///< ascending
};

/// @param rows  per query head of the group: (positions, queries), weights of the prompt's last queries
inline FinchResult finch(const std::vector<Eigen::MatrixXd>& rows, const FinchOptions& o) {
  const Index num_positions = rows.front().rows(), num_queries = rows.front().cols();
  FinchResult result;
  std::vector<Index> positions;
  for (Index position = 0; position < num_positions; ++position) {
    double sum = 0;
    for (const Eigen::MatrixXd& head : rows)
      for (Index j = 0; j < num_queries; ++j) {
        const Index others = num_positions - num_queries + j;  // positions before the query's own
        sum += head(position, j) * (o.normalize ? static_cast<double>(others) : 1);
      }
    result.scores.push_back(sum / static_cast<double>(num_queries) / static_cast<double>(rows.size()));
    positions.push_back(position);
  }
  result.kept = keep_best(positions, result.scores, o.budget, o.num_sinks, o.observation_window);
  return result;
}

}  // namespace reference
