// H2O, literally, for one kv_head: every observation is kept for ever, every score is added up anew.
//
// A row of attention weights is an observation of the positions its query sees; where a prompt is to be one row, that is
// the mean of each position's weights over the prompt's queries that see it. With a threshold an observation is 1 where the
// weight is at least 1 / (positions that the row sees), else 0.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <cstddef>
#include <map>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

struct H2OOptions {
  bool mean = false;         ///< else the sum
  Index history_window = 0;  ///< 0: all rows
  double decay = 1;
  bool threshold = false, prompt_as_one_row = false;
};

class H2O {
 public:
  explicit H2O(const H2OOptions& options) : o_(options) {}

  /// The attention of an update. @param held  positions, ascending. @param weights  (held, queries), mean over the group
  void observe(const std::vector<Index>& held, Index first_query, const Eigen::MatrixXd& weights, bool is_prompt) {
    for (Index j = 0; j < weights.cols(); ++j) {
      Row row;
      for (Index i = 0; i < std::ssize(held); ++i)
        if (held.begin()[i] <= first_query + j) row[held.begin()[i]] = weights(i, j);
      if (is_prompt && o_.prompt_as_one_row) prompt_.push_back(row);
      else record(row);
    }
  }
  /// The prompt is over.
  void end_prompt() {
    std::map<Index, std::vector<double>> by_position;
    for (const Row& row : prompt_)
      for (const auto& [position, weight] : row) by_position[position].push_back(weight);
    Row means;
    for (const auto& [position, weights] : by_position) means[position] = Eigen::Map<const Eigen::VectorXd>(weights.data(), std::ssize(weights)).mean();
    if (!means.empty()) record(means);
    prompt_.clear();
  }
  double score(Index position) const {
    double sum = 0, rows = 0, factor = 1;
    Index age = 0;
    for (auto row = rows_.rbegin(); row != rows_.rend() && (o_.history_window == 0 || age < o_.history_window); ++row, ++age, factor *= o_.decay)
      if (const auto found = row->find(position); found != row->end()) sum += factor * found->second, rows += factor;
    return !o_.mean ? sum : rows == 0 ? 0 : sum / rows;
  }

 private:
  using Row = std::map<Index, double>;  // position -> observation

  void record(Row row) {
    const double uniform = 1 / static_cast<double>(row.size());
    if (o_.threshold)
      for (auto& [position, weight] : row) weight = weight >= uniform ? 1 : 0;
    rows_.push_back(row);
  }

  H2OOptions o_;
  std::vector<Row> rows_, prompt_;
};

}  // namespace reference
