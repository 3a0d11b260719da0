// Scissorhands, literally, for one kv_head: every recorded row is kept for ever, every choice is made by sorting.
//
// A slot is low in a row when its weight is below 1 / (positions the row's query sees). `fraction` drops the largest
// share of low rows among those that saw the slot, `count` the largest number of them, both within the last
// history_window rows.
#pragma once

#include <Eigen/Core>
#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

struct ScissorhandsOptions {
  Index budget = 0;
  Index history_window = 400;
  Index recent_window = 10;
  Index num_sinks = 4;
  bool keep_prompt = false;
  Index drop = 0;  ///< 0: 8 for fraction, half the budget for count
  Index record_interval = 1;
  bool count = false;
};

class Scissorhands {
 public:
  explicit Scissorhands(const ScissorhandsOptions& options) : o_(options) {
    if (o_.drop == 0) o_.drop = o_.count ? std::max<Index>(o_.budget / 2, 1) : 8;
  }

  /// The next tokens come. @return the positions their queries attend to, ascending (each sees those up to its own)
  const std::vector<Index>& begin_update(Index num_tokens, bool more) {
    const bool empty = next_position_ == 0;
    const bool fits = num_tokens <= room() + static_cast<Index>(evictable(num_tokens).size());
    const bool prompt = empty || in_series_ || more || !fits;
    compress_ = prompt && !more;
    if (prompt && in_first_prompt_) prompt_end_ = next_position_ + num_tokens;
    in_first_prompt_ = in_first_prompt_ && prompt && more;
    in_series_ = more;
    if (!prompt) make_room(num_tokens);
    first_query_ = next_position_;
    for (Index i = 0; i < num_tokens; ++i) held_.push_back(next_position_++);
    return held_;
  }

  /// Their attention: weights of all queries over the positions of begin_update, (positions, queries), mean over the
  /// group.
  void end_update(const Eigen::MatrixXf& weights) {
    for (Index j = 0; j < weights.cols(); ++j) {
      const Index query = first_query_ + j;
      if (query % o_.record_interval != 0) continue;
      Index visible = 0;
      for (const Index position : held_) visible += position <= query;
      Row row;
      for (Index i = 0; i < static_cast<Index>(held_.size()); ++i)
        if (position(i) <= query) row[position(i)] = weights(i, j) < 1.0f / static_cast<float>(visible);
      rows_.push_back(row);
    }
    if (compress_ && room() < 0) compress();
  }

  /// What is held now, ascending.
  const std::vector<Index>& held() const { return held_; }

 private:
  using Row = std::map<Index, bool>;  // position the query saw -> low

  Index position(Index i) const { return held_.begin()[i]; }
  Index room() const { return o_.budget - static_cast<Index>(held_.size()); }

  /// The position's rank for leaving: a larger badness goes first; -1, last, when no row within the window saw it.
  double badness(Index position) const {
    double low = 0, seen = 0;
    const Index num_rows = static_cast<Index>(rows_.size());
    for (Index r = std::max<Index>(num_rows - o_.history_window, 0); r < num_rows; ++r) {
      const auto found = rows_.begin()[r].find(position);
      if (found == rows_.begin()[r].end()) continue;
      seen += 1;
      low += found->second;
    }
    if (seen == 0) return -1;
    return o_.count ? low : low / seen;
  }
  /// Worst first; of equals the older goes first.
  void sort_by_badness(std::vector<Index>& positions) const {
    std::map<Index, double> bad;
    for (const Index position : positions) bad[position] = badness(position);
    std::sort(positions.begin(), positions.end(),
              [&](Index a, Index b) { return bad[a] != bad[b] ? bad[a] > bad[b] : a < b; });
  }

  /// What may go when num_tokens come: no sink, and not among the newest recent_window, of which num_tokens are still
  /// to come.
  std::vector<Index> evictable(Index num_tokens) const {
    const Index recents = std::max<Index>(o_.recent_window - num_tokens, 0);
    const Index end = std::max<Index>(static_cast<Index>(held_.size()) - recents, 0);
    std::vector<Index> result;
    for (Index i = 0; i < end; ++i)
      if (position(i) >= o_.num_sinks && !(o_.keep_prompt && position(i) < prompt_end_)) result.push_back(position(i));
    return result;
  }

  void remove(Index position) { held_.erase(std::find(held_.begin(), held_.end(), position)); }

  /// The queue goes first; then `drop` more are chosen, or as many as are missing if that is more.
  void make_room(Index num_tokens) {
    while (room() < num_tokens && !queue_.empty()) leave_from_queue();
    const Index missing = num_tokens - room();
    if (missing <= 0) return;
    queue_ = evictable(num_tokens);
    sort_by_badness(queue_);
    queue_.resize(static_cast<std::size_t>(std::min(std::max(o_.drop, missing), static_cast<Index>(queue_.size()))));
    while (!queue_.empty() && (o_.count || room() < num_tokens)) leave_from_queue();  // `count` drops them all at once
  }
  void leave_from_queue() {
    remove(queue_.front());
    queue_.erase(queue_.begin());
  }

  /// A prompt is cut to the budget; the next token counts as one of the newest.
  void compress() {
    std::vector<Index> victims = evictable(1);
    sort_by_badness(victims);
    victims.resize(static_cast<std::size_t>(-room()));
    for (const Index position : victims) remove(position);
    queue_.clear();
  }

  ScissorhandsOptions o_;
  std::vector<Index> held_;  // ascending
  std::vector<Row> rows_;
  std::vector<Index> queue_;
  Index next_position_ = 0, first_query_ = 0, prompt_end_ = 0;
  bool in_first_prompt_ = true, in_series_ = false, compress_ = false;
};

}  // namespace reference
