// SimLayerKV's test, literally.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <vector>

namespace reference {

/// @param rows  of each query head: (positions, queries), the weights of a prompt's last queries
inline bool is_lazy(const std::vector<Eigen::MatrixXd>& rows, Eigen::Index num_initial, Eigen::Index num_recent, double threshold) {
  const Eigen::Index before = rows.front().rows() - rows.front().cols();  // positions that are no query's own
  double mass = 0;
  for (const Eigen::MatrixXd& head : rows)
    for (Eigen::Index position = 0; position < before; ++position)
      if (position < num_initial || position >= before - num_recent) mass += head.row(position).mean() / static_cast<double>(rows.size());
  return mass > threshold;
}

}  // namespace reference
