// LagKV, literally: a partition of tokens, each channel scaled by its range in the next partition; who spreads over the
// channels is important. Scores are given once.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <map>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

/// The softmax over a partition's tokens of their standard deviations over the channels.
/// @param part, next  (head_dim, tokens)
inline std::vector<double> lag_softmax(const Eigen::MatrixXd& part, const Eigen::MatrixXd& next) {
  std::vector<double> deviations;
  for (Index t = 0; t < part.cols(); ++t) {
    std::vector<double> scaled;
    double mean = 0, squares = 0;
    for (Index d = 0; d < part.rows(); ++d) {
      double low = next(d, 0), high = next(d, 0);
      for (Index u = 0; u < next.cols(); ++u) low = std::min(low, next(d, u)), high = std::max(high, next(d, u));
      scaled.push_back(high > low ? (part(d, t) - low) / (high - low) : 0);
      mean += scaled.back() / static_cast<double>(part.rows());
    }
    for (const double x : scaled) squares += (x - mean) * (x - mean);
    deviations.push_back(part.rows() > 1 ? std::sqrt(squares / static_cast<double>(part.rows() - 1)) : 0);
  }
  const double most = *std::max_element(deviations.begin(), deviations.end());
  double sum = 0;
  for (const double x : deviations) sum += std::exp(x - most);
  for (double& x : deviations) x = std::exp(x - most) / sum;
  return deviations;
}

/// One kv_head.
class LagKV {
 public:
  LagKV(Index lag_size, bool cross_scoring, Index num_sinks) : lag_size_(lag_size), cross_scoring_(cross_scoring), num_sinks_(num_sinks) {}

  /// The scores when a choice is made among these tokens.
  /// @param positions     ascending
  /// @param keys, values  (head_dim, tokens)
  std::vector<double> scores(const std::vector<Index>& positions, const Eigen::MatrixXd& keys, const Eigen::MatrixXd& values) {
    if (judged_.empty())
      for (Index i = 0; i < num_sinks_ && i < std::ssize(positions); ++i) judged_[positions.begin()[i]] = 1;
    std::vector<Index> waiting;  // columns
    for (Index i = 0; i < std::ssize(positions); ++i)
      if (!judged_.contains(positions.begin()[i])) waiting.push_back(i);

    for (Index first = 0; first + 2 * lag_size_ <= std::ssize(waiting); first += lag_size_) {
      const auto columns = [&](const Eigen::MatrixXd& x, Index from) {
        Eigen::MatrixXd result(x.rows(), lag_size_);
        for (Index i = 0; i < lag_size_; ++i) result.col(i) = x.col(waiting.begin()[from + i]);
        return result;
      };
      const std::vector<double> k = lag_softmax(columns(keys, first), columns(keys, first + lag_size_));
      const std::vector<double> v = lag_softmax(columns(values, first), columns(values, first + lag_size_));
      for (Index i = 0; i < lag_size_; ++i) {
        const auto mean = [&](Index j) { return (k.begin()[j] + v.begin()[j]) / 2; };
        Index rank = 0;  // those below it; of equals the older ones
        for (Index j = 0; j < lag_size_; ++j) rank += mean(j) < mean(i) || (mean(j) == mean(i) && j < i);
        judged_[positions.begin()[waiting.begin()[first + i]]] = cross_scoring_ ? mean(i) : static_cast<double>(rank) / static_cast<double>(lag_size_);
      }
    }
    std::vector<double> result;
    for (const Index position : positions) result.push_back(judged_.contains(position) ? judged_[position] : 1);
    return result;
  }

 private:
  Index lag_size_;
  bool cross_scoring_;
  Index num_sinks_;
  std::map<Index, double> judged_;  // by position
};

}  // namespace reference
