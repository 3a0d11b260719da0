// Scissorhands against its literal version, which keeps every row and sorts at every choice.

#include "reference/scissorhands.hpp"

#include <algorithm>
#include <kvsnip/attention.hpp>
#include <kvsnip/detail/bit_history.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/scissorhands.hpp>
#include <map>
#include <vector>

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Scissorhands;
using test::Random;
using test::sorted;

using Cache = KVCache<float, Scissorhands>;

Scissorhands policy_of(const reference::ScissorhandsOptions& o) {
  return Scissorhands{{.history_window = o.history_window,
                       .recent_window = o.recent_window,
                       .num_sinks = o.num_sinks,
                       .keep_prompt = o.keep_prompt,
                       .drop = o.drop,
                       .record_interval = o.record_interval,
                       .mode = o.count ? Scissorhands::Mode::count : Scissorhands::Mode::fraction}};
}

/// Weights of every query head over the positions `held` (ascending), (positions, queries * group_size).
Eigen::MatrixXf random_weights(Random& random, const std::vector<Index>& held, Index first_query, Index num_queries,
                               Index group) {
  Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(std::ssize(held), num_queries * group);
  for (Index column = 0; column < weights.cols(); ++column) {
    const Index query = first_query + column / group;
    const Index visible = std::upper_bound(held.begin(), held.end(), query) - held.begin();
    weights.col(column).head(visible) = random.weights(visible);
  }
  return weights;
}

Eigen::MatrixXf mean_over_group(const Eigen::MatrixXf& weights, Index group) {
  Eigen::MatrixXf mean = Eigen::MatrixXf::Zero(weights.rows(), weights.cols() / group);
  for (Index column = 0; column < weights.cols(); ++column)
    mean.col(column / group) += weights.col(column) / static_cast<float>(group);
  return mean;
}

/// Rows by position -> rows by slot.
Eigen::MatrixXf by_slot(const Eigen::MatrixXf& weights, const std::vector<Index>& held,
                        std::span<const Index> positions) {
  Eigen::MatrixXf result(weights.rows(), weights.cols());
  Index slot = 0;
  for (const Index position : positions)
    result.row(slot++) = weights.row(std::lower_bound(held.begin(), held.end(), position) - held.begin());
  return result;
}

/// One layer run side by side by the cache and by one reference per kv_head.
class SideBySide {
 public:
  SideBySide(const reference::ScissorhandsOptions& options, Index kv_heads, Index group, std::uint64_t seed)
      : group_(group),
        cache_({.query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = 2}, options.budget,
               policy_of(options)),
        references_(static_cast<std::size_t>(kv_heads), reference::Scissorhands(options)),
        random_(seed) {}

  void update(Index num_tokens, bool more = false) {
    const Index first = cache_.tokens_seen(), rows = cache_.shape().kv_heads * cache_.shape().head_dim;
    CAPTURE(first, num_tokens, more);
    const Eigen::MatrixXf vectors = random_.matrix(rows, num_tokens);
    auto step = cache_.update(vectors, vectors, {.more = more});
    const Index wanted = step.wanted_rows();
    Index h = 0;
    for (reference::Scissorhands& expected : references_) {
      CAPTURE(h);
      const std::vector<Index> held = expected.begin_update(num_tokens, more);
      REQUIRE(sorted(step.positions(h)) == held);
      const Eigen::MatrixXf weights = random_weights(random_, held, first, num_tokens, group_);
      expected.end_update(mean_over_group(weights, group_));
      if (wanted == 0)
        step.done(h);
      else
        deliver(step, h, by_slot(weights, held, step.positions(h)).rightCols(wanted * group_));
      ++h;
    }
    h = 0;
    for (const reference::Scissorhands& expected : references_) {
      CAPTURE(h);
      REQUIRE(sorted(cache_.positions(h)) == expected.held());
      ++h;
    }
  }

  Random& random() { return random_; }
  const Cache& cache() const { return cache_; }

 private:
  /// Whole, or in two pieces that do not part a query's heads.
  void deliver(Cache::Step& step, Index h, const Eigen::MatrixXf& weights) {
    const Index queries = weights.cols() / group_;
    const Index first_piece = random_.one_in(3) ? random_.below(queries) : 0;
    if (first_piece > 0) step.on_attention(h, weights.leftCols(first_piece * group_));
    step.on_attention(h, weights.rightCols((queries - first_piece) * group_));
  }

  Index group_;
  Cache cache_;
  std::vector<reference::Scissorhands> references_;
  Random random_;
};

reference::ScissorhandsOptions random_options(Random& random) {
  reference::ScissorhandsOptions o;
  o.num_sinks = random.between(0, 4);
  o.recent_window = random.pick({1, 2, 5, 7});
  o.budget = o.num_sinks + o.recent_window + random.pick({0, 1, 2, 3, 11, 16, 29});
  o.history_window = random.pick({1, 2, 7, 16, 400});
  o.record_interval = random.pick({1, 1, 2, 3});
  o.drop = random.pick({0, 1, 3, 8});
  o.count = random.one_in(2);
  o.keep_prompt = o.budget > o.recent_window && random.one_in(4);
  return o;
}

/// A prompt, often in pieces, that a kept prompt's rule allows; now and then an update without tokens closes it.
void random_prompt(SideBySide& run, const reference::ScissorhandsOptions& o) {
  const Index longest = o.keep_prompt ? o.budget - o.recent_window : 2 * o.budget + 5;
  Index left = run.random().between(1, longest);
  while (left > 1 && run.random().one_in(3)) {
    const Index piece = run.random().between(1, left - 1);
    run.update(piece, true);
    left -= piece;
  }
  if (run.random().one_in(5)) {
    run.update(left, true);
    left = 0;
  }
  run.update(left);
}

}  // namespace

TEST_CASE("Scissorhands holds what its literal version holds, token by token") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const reference::ScissorhandsOptions o = random_options(random);
  CAPTURE(seed, o.budget, o.history_window, o.recent_window, o.num_sinks, o.keep_prompt, o.drop, o.record_interval,
          o.count);
  SideBySide run(o, 2, random.pick({1, 2, 4}), seed);
  random_prompt(run, o);
  for (int step = 0; step < 70; ++step) run.update(1);
}

TEST_CASE("Scissorhands holds what its literal version holds when updates bring several tokens") {
  const auto seed = GENERATE(range<std::uint64_t>(100, 160));
  Random random(seed);
  reference::ScissorhandsOptions o = random_options(random);
  o.keep_prompt = false;
  CAPTURE(seed, o.budget, o.history_window, o.recent_window, o.num_sinks, o.drop, o.record_interval, o.count);
  const Index kv_heads = random.pick({1, 3}), group = random.pick({1, 2, 8});
  SideBySide run(o, kv_heads, group, seed);
  random_prompt(run, o);
  for (int step = 0; step < 30; ++step) run.update(run.random().pick({1, 1, 2, 3, 5, 13}));
}

TEST_CASE("Scissorhands compacts a long second turn as its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(200, 230));
  Random random(seed);
  const reference::ScissorhandsOptions o = random_options(random);
  CAPTURE(seed, o.budget, o.history_window, o.recent_window, o.num_sinks, o.keep_prompt, o.drop, o.record_interval,
          o.count);
  SideBySide run(o, 1, 2, seed);
  random_prompt(run, o);
  for (int turn = 0; turn < 3; ++turn) {
    for (int step = 0; step < 12; ++step) run.update(1);
    run.update(o.budget + run.random().below(20));
  }
}

TEST_CASE("Scissorhands with every `drop` agrees with its literal version") {
  const Index budget = 24;
  const Index drop = GENERATE(1, 3, 8, 12);  // 12: half the budget
  const bool count = GENERATE(false, true);
  const Index prompt = GENERATE(1, 23, 24, 25, 50);
  CAPTURE(drop, count, prompt);
  SideBySide run(
      {.budget = budget, .history_window = 9, .recent_window = 5, .num_sinks = 2, .drop = drop, .count = count}, 2, 2,
      7);
  run.update(prompt);
  for (int step = 0; step < 40; ++step) run.update(1);
}

namespace {

/// One token comes and attends with these weights, by position. @return the slots' positions afterwards
std::vector<Index> step_with(Cache& cache, const std::map<Index, float>& weights) {
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(1, 1);
  auto step = cache.update(zero, zero);
  Eigen::VectorXf by_slot(step.size(0));
  Index slot = 0;
  for (const Index position : step.positions(0)) by_slot[slot++] = weights.at(position);
  step.on_attention(0, by_slot);
  return {cache.positions(0).begin(), cache.positions(0).end()};
}

Cache cache_by_hand(Index budget, Scissorhands::Mode mode, Index recent_window, Index drop) {
  return Cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, budget,
               Scissorhands{{.recent_window = recent_window, .num_sinks = 0, .drop = drop, .mode = mode}});
}

}  // namespace

// Budget 4, nothing protected but the incoming token. In brackets: below uniform, 1 / (slots).
//
//   token |   0      1      2      3      4    | low rows / rows seen before the next token
//     0   |  1.0                               |  0/1
//     1   |  0.7   (0.3)                       |  0/2  1/1
//     2   | (0.2)   0.5   (0.3)                |  1/3  1/2  1/1
//     3   | (0.1)   0.4    0.4   (0.1)         |  2/4  1/3  1/2  1/1     fraction: 3 goes; count: 0 goes
//     4   | (0.1)   0.4   (0.1)           0.4  |  3/5  1/4  2/3       0/1   fraction: 2 goes
TEST_CASE("Scissorhands by hand: the largest share of low rows goes, or the largest number") {
  Cache fraction = cache_by_hand(4, Scissorhands::Mode::fraction, 1, 1),
        count = cache_by_hand(4, Scissorhands::Mode::count, 1, 1);
  for (Cache* cache : {&fraction, &count}) {
    step_with(*cache, {{0, 1.0f}});
    step_with(*cache, {{0, 0.7f}, {1, 0.3f}});
    step_with(*cache, {{0, 0.2f}, {1, 0.5f}, {2, 0.3f}});
    CHECK(step_with(*cache, {{0, 0.1f}, {1, 0.4f}, {2, 0.4f}, {3, 0.1f}}) == std::vector<Index>{0, 1, 2, 3});
  }
  CHECK(step_with(fraction, {{0, 0.1f}, {1, 0.4f}, {2, 0.1f}, {4, 0.4f}}) == std::vector<Index>{0, 1, 2, 4});
  CHECK(step_with(fraction, {{0, 0.1f}, {1, 0.4f}, {4, 0.1f}, {5, 0.4f}}) == std::vector<Index>{0, 1, 5, 4});
  CHECK(step_with(count, {{1, 0.4f}, {2, 0.1f}, {3, 0.1f}, {4, 0.4f}}) == std::vector<Index>{1, 2, 3, 4});
}

// The paper's hypothesis, made true: every 37th token is pivotal, all queries look at the pivotal ones.
TEST_CASE("Scissorhands never drops a token that every query finds important, as the paper claims") {
  const auto mode = GENERATE(Scissorhands::Mode::fraction, Scissorhands::Mode::count);
  Cache cache = cache_by_hand(48, mode, 10, 0);
  const auto is_pivotal = [](Index position) { return position % 37 == 0; };
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(1, 1);
  for (Index token = 0; token < 300; ++token) {
    auto step = cache.update(zero, zero);
    const auto positions = step.positions(0);
    const auto num_pivotal = std::count_if(positions.begin(), positions.end(), is_pivotal),
               num_others = std::ssize(positions) - num_pivotal;
    Eigen::VectorXf weights(step.size(0));
    Index slot = 0;
    for (const Index position : positions)
      weights[slot++] =
          is_pivotal(position) ? 0.8f / static_cast<float>(num_pivotal) : 0.2f / static_cast<float>(num_others);
    step.on_attention(0, weights);
  }
  const std::vector<Index> held = sorted(cache.positions(0));
  for (Index position = 0; position < 300; position += 37)
    CHECK(std::binary_search(held.begin(), held.end(), position));
}

TEST_CASE("Scissorhands refuses a prompt to be kept that leaves the recent window no room, and is as before") {
  Cache cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 16,
              Scissorhands{{.recent_window = 5, .num_sinks = 0, .keep_prompt = true}});
  const Eigen::MatrixXf too_long = Eigen::MatrixXf::Zero(1, 12), fits = Eigen::MatrixXf::Zero(1, 11);
  CHECK_THROWS_AS(cache.update(too_long, too_long), std::invalid_argument);
  CHECK(cache.tokens_seen() == 0);
  CHECK(cache.update(fits, fits).size(0) == 11);
}

TEST_CASE("A second long prompt leaves the kept slots in ascending position, though decoding had shuffled them") {
  kvsnip::KVCache<float, kvsnip::Scissorhands> cache({.query_heads = 2, .kv_heads = 1, .head_dim = 4}, /*budget=*/24,
                                                     kvsnip::Scissorhands{{.recent_window = 2, .num_sinks = 1, .drop = 3}});
  const auto feed = [&](kvsnip::Index tokens) {
    const Eigen::MatrixXf k = Eigen::MatrixXf::Random(4, tokens), q = Eigen::MatrixXf::Random(8, tokens);
    Eigen::MatrixXf out(8, tokens);
    kvsnip::attend(cache.update(k, k), q, out);
    return std::is_sorted(cache.positions(0).begin(), cache.positions(0).end());
  };
  CHECK(feed(40));
  bool sorted = true;
  for (int token = 0; token < 30; ++token) sorted = feed(1);
  CHECK_FALSE(sorted);
  CHECK(feed(30));
  CHECK(cache.size(0) == 24);
}

// The history alone: a slot is taken again at every moment of a word's turn, also long after its predecessor's last row.
TEST_CASE("A bit history counts what every slot's list of rows counts", "[scissorhands]") {
  const Index window = GENERATE(1, 5, 16, 17, 31, 40), most = GENERATE(1, 3);  // slots that are taken again between two rows
  Random random(static_cast<std::uint64_t>(window));
  kvsnip::detail::BitHistory history(window);
  std::vector<std::vector<bool>> rows;  // by slot: of each row since its token came, whether it was marked
  const auto come = [&](Index slot) {
    history.clear(slot);
    rows.resize(std::max(rows.size(), static_cast<std::size_t>(slot + 1)));
    rows[static_cast<std::size_t>(slot)].clear();
  };
  for (Index slot = 0; slot < 7; ++slot) come(slot);
  for (Index turn = 0; turn < 6 * window + 100; ++turn) {
    CAPTURE(window, most, turn);
    for (Index i = random.below(most + 1); i > 0; --i) come(random.below(std::ssize(rows)));
    if (random.one_in(20) && std::ssize(rows) < 12) come(std::ssize(rows));
    const Index late = random.one_in(5) ? random.below(std::ssize(rows)) : -1;
    std::vector<bool> marked(rows.size());
    for (std::size_t slot = 0; slot < rows.size(); ++slot) marked[slot] = random.one_in(2) && static_cast<Index>(slot) != late;
    if (late >= 0) come(late);
    history.record(std::ssize(rows), [&](Index slot) { return marked[static_cast<std::size_t>(slot)]; });
    for (std::size_t slot = 0; slot < rows.size(); ++slot) rows[slot].push_back(marked[slot]);
    if (late >= 0) history.unsee(late), rows[static_cast<std::size_t>(late)].clear();
    if (random.one_in(25)) {
      std::vector<Index> kept;
      std::vector<std::vector<bool>> kept_rows;
      for (Index slot = 0; slot < std::ssize(rows); ++slot)
        if (slot == 0 || !random.one_in(4)) kept.push_back(slot), kept_rows.push_back(rows[static_cast<std::size_t>(slot)]);
      history.gather(kept), rows.swap(kept_rows);
    }
    history.for_each(std::ssize(rows), [&](Index slot, float low, float seen) {
      const std::vector<bool>& list = rows[static_cast<std::size_t>(slot)];
      const Index length = std::min(std::ssize(list), window);
      CHECK(seen == static_cast<float>(length));
      CHECK(low == static_cast<float>(std::count(list.end() - length, list.end(), true)));
    });
  }
}
