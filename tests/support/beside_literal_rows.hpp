// A cache beside the literal version of a policy that looks at attention weights: at every choice the scores must be the
// literal ones, and what stays must be the best by those scores.
#pragma once

#include "../reference/eviction.hpp"
#include "catch.hpp"
#include "positions.hpp"
#include "random.hpp"
#include "record_scores.hpp"
#include "tolerance.hpp"

#include <kvsnip/kv_cache.hpp>

#include <utility>
#include <vector>

namespace test {

using kvsnip::Phase;
using kvsnip::Protection;
using kvsnip::Shape;

/// Literal: observe(held, first_query, weights, is_prompt), end_prompt(), score(position); of one kv_head.
template <class P, class Literal>
class BesideLiteralRows {
 public:
  /// @param policy    chooses one victim at a time
  /// @param promised  what it protects, said once more
  BesideLiteralRows(const Shape& shape, Index budget, const P& policy, const Protection& promised, const Literal& literal)
      : cache_(shape, budget, RecordScores<P>(policy)), promised_(promised), literals_(static_cast<std::size_t>(shape.kv_heads), literal) {}

  /// The next tokens in one update, with random weights.
  /// @param more  the prompt goes on. @param skip  positions between the last token and these
  void feed(Random& random, Index count, bool more = false, Index skip = 0) {
    const Shape& shape = cache_.shape();
    const Index first = cache_.next_position() + skip;
    CAPTURE(first, count, more);
    std::vector<std::vector<Index>> before;  // positions by slot
    for (Index h = 0; h < shape.kv_heads; ++h) before.emplace_back(cache_.positions(h).begin(), cache_.positions(h).end());
    const Eigen::MatrixXf vectors = random.matrix(shape.kv_heads * shape.head_dim, count);
    auto step = cache_.update(vectors, vectors, {.more = more, .first_position = first});
    const bool decode = step.phase() == Phase::decode;
    std::vector<std::vector<Index>> expected;
    for (Index h = 0; h < shape.kv_heads; ++h) {
      CAPTURE(h, decode);
      const std::vector<Index> slots(step.positions(h).begin(), step.positions(h).end()), held = sorted(slots);
      if (decode) {
        expected.push_back(best(h, before.begin()[h], cache_.budget() - count, promised_.recent_window - count));
        for (Index position = first; position < first + count; ++position) expected.back().push_back(position);
        REQUIRE(held == expected.back());
      }
      const Eigen::MatrixXf weights = weights_of(random, held, first, count);
      literals_.begin()[h].observe(held, first, mean_over_group(weights), !decode);
      deliver(random, step, h, by_slot(weights, held, slots));
      if (!decode) before.begin()[h] = slots;
    }
    for (Index h = 0; h < shape.kv_heads && !decode; ++h) {
      CAPTURE(h);
      if (!more) literals_.begin()[h].end_prompt();
      expected.push_back(more ? sorted(before.begin()[h]) : best(h, before.begin()[h], cache_.budget(), promised_.recent_window - 1));
      REQUIRE(sorted(cache_.positions(h)) == expected.back());
    }
  }
  /// A prompt of so many tokens, often in pieces; now and then an update without tokens closes it.
  void feed_prompt(Random& random, Index count) {
    while (count > 1 && random.one_in(3)) {
      const Index piece = random.between(1, count - 1);
      feed(random, piece, true);
      count -= piece;
    }
    if (random.one_in(5)) feed(random, std::exchange(count, 0), true);
    feed(random, count);
  }
  const kvsnip::KVCache<float, RecordScores<P>>& cache() const { return cache_; }

 private:
  /// The best `room` of the positions, by the recorded scores, once they are the literal ones.
  std::vector<Index> best(Index h, const std::vector<Index>& slots, Index room, Index num_recents) const {
    std::vector<Index> positions = sorted(slots);
    if (std::ssize(slots) <= room) return positions;
    const std::vector<float>& recorded = cache_.policy().last_scores(h);
    REQUIRE(recorded.size() == slots.size());
    std::vector<double> scores;
    for (const Index position : positions) {
      const auto slot = std::find(slots.begin(), slots.end(), position) - slots.begin();
      scores.push_back(static_cast<double>(recorded.begin()[slot]));
      const double want = literals_.begin()[h].score(position);
      CAPTURE(position, scores.back(), want);
      REQUIRE(close(scores.back(), want, 1e-5, 1e-6));
    }
    return reference::keep_best(positions, scores, room, promised_.num_sinks, num_recents);
  }
  /// Of every query head over the positions `held`, (positions, queries * group_size).
  Eigen::MatrixXf weights_of(Random& random, const std::vector<Index>& held, Index first_query, Index num_queries) const {
    const Index group = cache_.shape().group_size();
    Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(std::ssize(held), num_queries * group);
    for (Index column = 0; column < weights.cols(); ++column) {
      const Index visible = std::upper_bound(held.begin(), held.end(), first_query + column / group) - held.begin();
      weights.col(column).head(visible) = random.weights(visible);
    }
    return weights;
  }
  Eigen::MatrixXd mean_over_group(const Eigen::MatrixXf& weights) const {
    const Index group = cache_.shape().group_size();
    Eigen::MatrixXd mean = Eigen::MatrixXd::Zero(weights.rows(), weights.cols() / group);
    for (Index column = 0; column < weights.cols(); ++column) mean.col(column / group) += weights.col(column).template cast<double>() / static_cast<double>(group);
    return mean;
  }
  static Eigen::MatrixXf by_slot(const Eigen::MatrixXf& weights, const std::vector<Index>& held, const std::vector<Index>& slots) {
    Eigen::MatrixXf result(weights.rows(), weights.cols());
    if (weights.size() == 0) return result;  // an update of no token
    Index slot = 0;
    for (const Index position : slots) result.row(slot++) = weights.row(std::lower_bound(held.begin(), held.end(), position) - held.begin());
    return result;
  }
  /// What the step wants: column sums, rows (whole, or in two pieces that do not part a query's heads), nothing.
  template <class Step>
  void deliver(Random& random, Step& step, Index h, const Eigen::MatrixXf& weights) const {
    const Index group = cache_.shape().group_size(), wanted = step.wanted_rows();
    if (wanted == 0 && !step.wants_column_sums()) return step.done(h);
    if (step.wants_column_sums()) {
      Eigen::MatrixXf sums = Eigen::MatrixXf::Zero(weights.rows(), group);
      for (Index column = 0; column < weights.cols(); ++column) sums.col(column % group) += weights.col(column);
      step.on_column_sums(h, sums);
    }
    if (wanted == 0) return;
    const Index first_piece = random.one_in(3) ? random.below(wanted) : 0;
    if (first_piece > 0) step.on_attention(h, weights.middleCols(weights.cols() - wanted * group, first_piece * group));
    step.on_attention(h, weights.rightCols((wanted - first_piece) * group));
  }

  kvsnip::KVCache<float, RecordScores<P>> cache_;
  Protection promised_;
  std::vector<Literal> literals_;  // (kv_heads)
};

}  // namespace test
