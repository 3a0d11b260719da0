// SnapKV, literally: the window's rows vote for the prefix, the votes are pooled, the best of the prefix and the window
// stay.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <limits>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

struct SnapKVOptions {
  Index budget = 0;
  Index observation_window = 32;
  Index kernel_size = 5;
  bool max_pooling = false;     ///< else average
  bool pool_over_row = false;   ///< else over the prefix alone
  bool count_padding = true;    ///< an average at the edge is divided by kernel_size all the same
  bool max_over_group = false;  ///< else mean
  Index num_sinks = 0;
};

struct SnapKVResult {
  std::vector<double> scores;  ///< of the prefix: all positions before the window
  std::vector<Index> kept;     ///< ascending
};

/// @param rows  per query head of the group: (positions, queries), weights of the prompt's last queries, at most
///              observation_window of them
inline SnapKVResult snapkv(const std::vector<Eigen::MatrixXd>& rows, const SnapKVOptions& o) {
  const Index num_positions = rows.front().rows(), num_queries = rows.front().cols();
  const Index prefix = std::max<Index>(num_positions - o.observation_window, 0);

  // Sum over the rows, then the group's mean or maximum.
  std::vector<double> votes;
  for (Index position = 0; position < num_positions; ++position) {
    double mean = 0, largest = 0;
    for (const Eigen::MatrixXd& head : rows) {
      double sum = 0;
      for (Index j = 0; j < num_queries; ++j) sum += head(position, j);
      mean += sum / static_cast<double>(rows.size());
      largest = std::max(largest, sum);
    }
    votes.push_back(o.max_over_group ? largest : mean);
  }

  // One-dimensional pooling, stride 1.
  SnapKVResult result;
  const Index pooled = o.pool_over_row ? num_positions : prefix;
  for (Index position = 0; position < prefix; ++position) {
    double sum = 0, largest = -std::numeric_limits<double>::infinity();
    Index inside = 0;
    for (Index i = position - o.kernel_size / 2; i <= position + o.kernel_size / 2; ++i) {
      if (i < 0 || i >= pooled) continue;
      const double vote = votes.begin()[i];
      sum += vote, largest = std::max(largest, vote), ++inside;
    }
    const double average = sum / static_cast<double>(o.count_padding ? o.kernel_size : inside);
    result.scores.push_back(o.max_pooling ? largest : average);
  }

  // The sinks, the best others, of equals the newer one; then the window.
  if (num_positions <= o.budget) {
    for (Index position = 0; position < num_positions; ++position) result.kept.push_back(position);
    return result;
  }
  std::vector<Index> order;
  for (Index position = 0; position < prefix; ++position) order.push_back(position);
  std::sort(order.begin(), order.end(), [&](Index a, Index b) {
    const bool sink_a = a < o.num_sinks, sink_b = b < o.num_sinks;
    if (sink_a != sink_b) return sink_a;
    const double score_a = result.scores.begin()[a], score_b = result.scores.begin()[b];
    return score_a != score_b ? score_a > score_b : a > b;
  });
  result.kept.assign(order.begin(), order.begin() + (o.budget - (num_positions - prefix)));
  for (Index position = prefix; position < num_positions; ++position) result.kept.push_back(position);
  std::sort(result.kept.begin(), result.kept.end());
  return result;
}

}  // namespace reference
