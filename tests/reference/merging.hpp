// Merging, literally: every victim goes to the survivor whose key is most like its own.
#pragma once

#include <Eigen/Core>
#include <cstddef>
#include <vector>

namespace reference {

struct Merged {
  Eigen::MatrixXd keys, values;  ///< (head_dim, survivors)
};

/// @param keys, values  (head_dim, victims), (head_dim, survivors)
inline Merged merge(const Eigen::MatrixXd& victim_keys, const Eigen::MatrixXd& victim_values, const Merged& survivors, bool pivot) {
  Merged sums = survivors;
  Eigen::VectorXd total = Eigen::VectorXd::Ones(survivors.keys.cols());
  for (Eigen::Index v = 0; v < victim_keys.cols(); ++v) {
    Eigen::Index target = -1;
    double best = -2;
    for (Eigen::Index s = 0; s < survivors.keys.cols(); ++s) {
      const double cosine = victim_keys.col(v).dot(survivors.keys.col(s)) / (victim_keys.col(v).norm() * survivors.keys.col(s).norm());
      if (cosine > best) best = cosine, target = s;
    }
    const double weight = pivot ? 1 : std::max((best + 1) / 2, 1e-6);
    const auto part = [&](const Eigen::VectorXd& victim, const Eigen::VectorXd& survivor) -> Eigen::VectorXd {
      return pivot ? Eigen::VectorXd((victim + survivor) / 2) : Eigen::VectorXd(weight * victim);
    };
    sums.keys.col(target) += part(victim_keys.col(v), survivors.keys.col(target));
    sums.values.col(target) += part(victim_values.col(v), survivors.values.col(target));
    total(target) += weight;
  }
  for (Eigen::Index s = 0; s < total.size(); ++s) sums.keys.col(s) /= total(s), sums.values.col(s) /= total(s);
  return sums;
}

}  // namespace reference
