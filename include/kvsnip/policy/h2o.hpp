// H2O: the tokens that attention has given most stay, the heavy hitters.
//
// Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", arXiv:2306.14048,
// algorithm 1. A row of attention weights is an observation of every slot it sees; the defaults add up all of them.
//   score = mean       sums favour old tokens, which more queries have seen: divide by the rows seen
//   history_window     only the last so many rows count
//   decay              every row makes the earlier ones count less
//   threshold          an observation is 1 where the weight is at least uniform, 1 / (visible slots), else 0
//   prompt_as_one_row  a prompt is one observation: a slot's mean over the prompt's queries that see it
// cold-compress's heavy hitter is score = mean, prompt_as_one_row and perhaps threshold; its history_window_size is
// history_window here but that its 1 is our 0, all rows; its recent_window leaves the incoming token out.
// Differs from the paper: half of its budget is recent_window, here that is the user's to say; weights are averaged over
// the query group; sinks can be protected; victims wait in the queue.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "kvsnip/detail/row_sums.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

enum class H2OScore { sum, mean };
constexpr std::array<std::string_view, 2> enum_names(H2OScore) { return {"sum", "mean"}; }

struct H2OOptions {
  H2OScore score = H2OScore::sum;  ///< sum: the paper; mean: over the rows that a slot has seen
  Index history_window = 0;        ///< last rows that count [rows], at most 65535; 0: all, as in the paper
  double decay = 1;                ///< what every row multiplies the earlier ones by, in (0, 1]; the paper: 1
  bool threshold = false;          ///< count the rows where a slot's weight is at least uniform
  bool prompt_as_one_row = false;  ///< a prompt weighs as much as one decode step; false: as its rows
  Index num_sinks = 0;             ///< first positions, never evicted [tokens], >= 0
  Index recent_window = 32;        ///< newest positions never evicted, the incoming one included [tokens], >= 0; the paper: half the budget
  Index refill_interval = 0;       ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget; the paper: 1

  static void each(auto& options, auto visit) {
    visit("score", options.score);
    visit("history_window", options.history_window);
    visit("decay", options.decay);
    visit("threshold", options.threshold);
    visit("prompt_as_one_row", options.prompt_as_one_row);
    detail::each_usual(options, visit);
  }
};

/// Needs every row while decoding; of a prompt the column sums, or, if they do not say enough (history_window, decay or
/// threshold without prompt_as_one_row), its rows, the last history_window of them.
/// State per slot and kv_head: 4 bytes for the sum, 4 for the rows seen (mean), 4 (history_window + 2) with a window, for a
/// prompt's slots too until it is compacted.
class H2O : public detail::UsualOptions<H2OOptions> {
 public:
  static constexpr std::string_view name = "h2o";
  static constexpr std::string_view paper = "arXiv:2306.14048";
  static constexpr std::string_view needs = "attention rows; of a prompt column sums";
  using Score = H2OScore;

  explicit H2O(const H2OOptions& options = {}) : UsualOptions("H2O", options) {
    detail::require(options.history_window >= 0 && options.history_window <= 65535, "H2O: history_window must be in [0, 65535], got ",
                    options.history_window);
    detail::require(options.decay > 0 && options.decay <= 1, "H2O: decay must be in (0, 1], got ", options.decay);
  }

  bool wants_column_sums(const StepInfo&) const {
    return options_.prompt_as_one_row || (options_.history_window == 0 && options_.decay == 1 && !options_.threshold);
  }
  Index wanted_rows(const StepInfo& step) const {
    if (step.phase != Phase::decode && wants_column_sums(step)) return 0;
    return options_.history_window > 0 ? std::min(options_.history_window, step.num_queries) : step.num_queries;
  }
  void observe(Index kv_head, const AttentionRows& rows) {
    detail::RowSums& sums = head(kv_head).rows;
    for (Index j = 0; j < rows.num_queries(); ++j) {
      const float* weights = rows.mean.col(j).data();
      record(sums, rows.mean.rows(), rows.num_visible(j), [=](Index slot) { return weights[slot]; });
      if (const Index position = rows.first_position + j; position < rows.step.last_position())
        for (Index slot = 0; slot < rows.mean.rows(); ++slot)
          if (rows.positions[static_cast<std::size_t>(slot)] > position) sums.clear(slot);  // its token comes later
    }
  }
  void observe_column_sums(Index kv_head, const ColumnSums& sums) {
    detail::RowSums& target = options_.prompt_as_one_row ? head(kv_head).prompt : head(kv_head).rows;
    target.reserve(std::ssize(sums.sums));
    for (Index slot = 0; slot < std::ssize(sums.sums); ++slot) {
      const auto i = static_cast<std::size_t>(slot);
      if (slot >= target.num_slots()) target.clear(slot);
      target.add(slot, sums.sums[i], std::min(sums.step.num_queries, sums.step.last_position() + 1 - sums.positions[i]));
    }
  }
  /// What a slot was given: the sum, or the mean.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    detail::RowSums& rows = record_prompt(kv_head);
    rows.sums(out.first(slots.positions.size()));
    if (options_.score == Score::mean) rows.divide(out.first(slots.positions.size()));
  }

  void reserve(Index kv_head, Index num_slots) { head(kv_head).rows.reserve(num_slots); }
  void on_insert(Index kv_head, Index slot, const SlotsView&) { head(kv_head).rows.clear(slot); }
  void on_gather(Index kv_head, std::span<const Index> kept) {
    head(kv_head).rows.gather(kept);
    if (head(kv_head).prompt.num_slots() > 0) head(kv_head).prompt.gather(kept);
  }
  void on_prompt_end(Index kv_head) { record_prompt(kv_head).shrink(); }
  void reset(const Shape& shape) {
    const detail::RowSums none(options_.history_window, options_.decay, options_.score == Score::mean);
    heads_.assign(static_cast<std::size_t>(shape.kv_heads), Head{none, detail::RowSums()});
  }
  Index bytes() const {
    Index bytes = detail::heap_bytes(heads_);
    for (const Head& head : heads_) bytes += head.rows.bytes() + head.prompt.bytes();
    return bytes;
  }

 private:
  struct Head {
    detail::RowSums rows;
    detail::RowSums prompt;  // that is to be one row: so far
  };

  Head& head(Index kv_head) { return heads_[static_cast<std::size_t>(kv_head)]; }
  template <class Weight>
  void record(detail::RowSums& rows, Index num_slots, Index num_visible, Weight weight) const {
    const float uniform = 1.0f / static_cast<float>(num_visible);
    if (options_.threshold) rows.record(num_slots, [=](Index slot) { return weight(slot) >= uniform ? 1.0f : 0.0f; });
    else rows.record(num_slots, weight);
  }
  /// A prompt that is one row is over once its slots are scored, or at its end.
  detail::RowSums& record_prompt(Index kv_head) {
    Head& found = head(kv_head);
    if (const Index num_slots = found.prompt.num_slots(); num_slots > 0) {
      record(found.rows, num_slots, num_slots, [&](Index slot) { return found.prompt.mean(slot); });
      found.prompt = detail::RowSums();
    }
    return found.rows;
  }

  std::vector<Head> heads_;  // (kv_heads)
};
static_assert(Policy<H2O> && ScoresSlots<H2O> && ObservesAttention<H2O> && ObservesColumnSums<H2O> && TracksInserts<H2O> && TracksGathers<H2O>);

}  // namespace kvsnip
