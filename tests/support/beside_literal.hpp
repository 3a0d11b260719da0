// A cache beside the literal version of its policy: at every choice the scores must be the literal ones, and what stays
// must be the best by those scores. For policies that look at positions, keys and values alone.
#pragma once

#include "../reference/eviction.hpp"
#include "catch.hpp"
#include "positions.hpp"
#include "random.hpp"
#include "record_scores.hpp"
#include "tolerance.hpp"

#include <kvsnip/kv_cache.hpp>

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

namespace test {

using kvsnip::Phase;
using kvsnip::Protection;
using kvsnip::Shape;

/// The tokens of one kv_head that a choice is made among, by ascending position.
struct Candidates {
  Index kv_head = 0;
  std::vector<Index> positions;
  Eigen::MatrixXd keys, values;  ///< (head_dim, positions)
};
/// The literal scores of all candidates.
using LiteralScores = std::function<std::vector<double>(const Candidates&)>;

template <class P>
class BesideLiteral {
 public:
  /// @param policy    chooses one victim at a time
  /// @param promised  what it protects, said once more
  /// @param relative  how far a score may be off
  BesideLiteral(const Shape& shape, Index budget, const P& policy, const Protection& promised, LiteralScores literal, double relative = 1e-5)
      : cache_(shape, budget, RecordScores<P>(policy)), promised_(promised), literal_(std::move(literal)), relative_(relative) {}

  /// The next tokens, a column each, in one update.
  void feed(const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, bool more = false) {
    const Index first = keys_.cols(), count = k.cols(), heads = cache_.shape().kv_heads;
    append(keys_, k), append(values_, v);
    std::vector<std::vector<Index>> slots;  // the positions that are chosen among, by slot
    for (Index h = 0; h < heads; ++h) slots.emplace_back(cache_.positions(h).begin(), cache_.positions(h).end());
    const std::vector<std::vector<Index>> before = slots;
    auto step = cache_.update(k, v, {.more = more});
    const bool decode = step.phase() == Phase::decode;
    for (Index h = 0; h < heads && !decode; ++h) slots.begin()[h].assign(step.positions(h).begin(), step.positions(h).end());
    for (Index h = 0; h < heads; ++h) step.done(h);

    for (Index h = 0; h < heads; ++h) {
      CAPTURE(h, first, count, decode);
      const std::vector<Index>& candidates = slots.begin()[h];
      const Index room = cache_.budget() - (decode ? count : 0);
      std::vector<Index> expected = sorted(candidates);
      if (std::ssize(candidates) > room && !more) {
        const Index recents = decode ? promised_.recent_window - count : promised_.recent_window - 1;
        expected = reference::keep_best(expected, checked_scores(h, candidates), room, promised_.num_sinks, recents);
      }
      for (Index position = first; decode && position < first + count; ++position) expected.push_back(position);
      REQUIRE(sorted(cache_.positions(h)) == expected);
    }
  }
  void feed(Random& random, Index count, bool more = false) {
    const Index rows = cache_.shape().kv_heads * cache_.shape().head_dim;
    const Eigen::MatrixXf k = random.matrix(rows, count);
    feed(k, random.matrix(rows, count), more);
  }
  /// Prompts, decode steps, long second turns.
  void feed_at_random(Random& random, Index num_tokens) {
    while (cache_.tokens_seen() < num_tokens) feed(random, random.pick({1, 1, 1, 1, 1, 1, 2, 3, 40}));
  }
  const kvsnip::KVCache<float, RecordScores<P>>& cache() const { return cache_; }

 private:
  static void append(Eigen::MatrixXf& all, const Eigen::MatrixXf& columns) {
    all.conservativeResize(columns.rows(), all.cols() + columns.cols());
    all.rightCols(columns.cols()) = columns;
  }
  /// The recorded scores by ascending position, once they are the literal ones.
  std::vector<double> checked_scores(Index h, const std::vector<Index>& slots) {
    const std::vector<float>& recorded = cache_.policy().last_scores(h);
    REQUIRE(recorded.size() == slots.size());
    const Index dim = cache_.shape().head_dim;
    Candidates candidates{h, sorted(slots), Eigen::MatrixXd(dim, std::ssize(slots)), Eigen::MatrixXd(dim, std::ssize(slots))};
    std::vector<double> got;
    for (const Index position : candidates.positions) {
      const Index i = std::ssize(got);
      candidates.keys.col(i) = keys_.block(h * dim, position, dim, 1).template cast<double>();
      candidates.values.col(i) = values_.block(h * dim, position, dim, 1).template cast<double>();
      got.push_back(static_cast<double>(recorded.begin()[std::find(slots.begin(), slots.end(), position) - slots.begin()]));
    }
    const std::vector<double> want = literal_(candidates);
    REQUIRE(want.size() == got.size());
    for (std::size_t i = 0; i < got.size(); ++i) {
      CAPTURE(candidates.positions[i], got[i], want[i]);
      REQUIRE(close(got[i], want[i], relative_, relative_));
    }
    return got;
  }

  kvsnip::KVCache<float, RecordScores<P>> cache_;
  Protection promised_;
  LiteralScores literal_;
  double relative_;
  Eigen::MatrixXf keys_, values_;  // (kv_heads * head_dim, tokens seen)
};

}  // namespace test
