// TOVA's scores, literally.
#pragma once

#include <Eigen/Core>
#include <vector>

namespace reference {

/// @param last_rows  of each kv_head: (positions, group_size), the last query's weights
/// @return (positions) the mean over all query heads
inline Eigen::VectorXd tova(const std::vector<Eigen::MatrixXd>& last_rows) {
  Eigen::VectorXd sum = Eigen::VectorXd::Zero(last_rows.front().rows());
  Eigen::Index query_heads = 0;
  for (const Eigen::MatrixXd& head : last_rows)
    for (Eigen::Index g = 0; g < head.cols(); ++g, ++query_heads) sum += head.col(g);
  return sum / static_cast<double>(query_heads);
}

}  // namespace reference
