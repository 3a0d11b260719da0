// SnapKV against its literal version, by hand, and the paper's claim in small.

#include "reference/snapkv.hpp"

#include <algorithm>
#include <cstdlib>
#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/snapkv.hpp>
#include <vector>

#include "reference/attention.hpp"
#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/prompt_rows.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/tolerance.hpp"

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Shape;
using kvsnip::SnapKV;
using test::causal_weights;
using test::consecutive;
using test::feed;
using test::Random;
using test::RecordScores;
using test::rows_per_query_head;
using test::sorted;

template <class T>
using Cache = KVCache<T, RecordScores<SnapKV>>;

RecordScores<SnapKV> policy_of(const reference::SnapKVOptions& o) {
  return RecordScores<SnapKV>(SnapKV{{.observation_window = o.observation_window,
                                      .kernel_size = o.kernel_size,
                                      .pooling = o.max_pooling ? SnapKV::Pooling::max : SnapKV::Pooling::average,
                                      .pool_over = o.pool_over_row ? SnapKV::PoolOver::row : SnapKV::PoolOver::prefix,
                                      .count_padding = o.count_padding,
                                      .group = o.max_over_group ? SnapKV::Group::max : SnapKV::Group::mean,
                                      .num_sinks = o.num_sinks}});
}

reference::SnapKVOptions random_options(Random& random) {
  reference::SnapKVOptions o;
  o.observation_window = random.pick({1, 2, 7, 16});
  o.num_sinks = random.pick({0, 0, 1, 4});
  o.budget = o.observation_window + o.num_sinks + random.pick({1, 2, 3, 17});
  o.kernel_size = random.pick({1, 3, 5, 7});
  o.max_pooling = random.one_in(2);
  o.pool_over_row = random.one_in(2);
  o.count_padding = random.one_in(2);
  o.max_over_group = random.one_in(2);
  return o;
}

void check_scores(const std::vector<float>& got, const reference::SnapKVResult& expected, double relative) {
  REQUIRE(got.size() >= expected.scores.size());
  for (std::size_t i = 0; i < expected.scores.size(); ++i) {
    CAPTURE(i, got[i], expected.scores[i]);
    REQUIRE(test::close(got[i], expected.scores[i], relative, relative));
  }
}

}  // namespace

TEST_CASE("SnapKV scores and keeps what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 150));
  Random random(seed);
  const reference::SnapKVOptions o = random_options(random);
  const Index group = random.pick({1, 2, 4, 8});
  const Index prompt = random.pick(
      {1, o.observation_window, o.observation_window + 1, o.budget, o.budget + 1, o.budget + 2, o.budget + 13, 97});
  CAPTURE(seed, o.budget, o.observation_window, o.kernel_size, o.max_pooling, o.pool_over_row, o.count_padding,
          o.max_over_group, o.num_sinks, group, prompt);
  const std::vector<Eigen::MatrixXf> weights{causal_weights(random, prompt, group),
                                             causal_weights(random, prompt, group)};
  Cache<float> cache({.query_heads = 2 * group, .kv_heads = 2, .head_dim = 1}, o.budget, policy_of(o));
  feed(cache, weights, prompt, false);

  Index h = 0;
  for (const Eigen::MatrixXf& w : weights) {
    CAPTURE(h);
    const reference::SnapKVResult expected =
        reference::snapkv(rows_per_query_head(w, std::min(o.observation_window, prompt), group), o);
    const std::vector<Index> kept(cache.positions(h).begin(), cache.positions(h).end());
    CHECK(kept == expected.kept);
    if (prompt > o.budget) check_scores(cache.policy().last_scores(h), expected, 1e-6);
    ++h;
  }
}

TEST_CASE("SnapKV keeps the same positions when the prompt comes in pieces") {
  const auto seed = GENERATE(range<std::uint64_t>(1000, 1060));
  Random random(seed);
  const reference::SnapKVOptions o = random_options(random);
  const Index prompt = o.budget + random.between(1, 40);
  CAPTURE(seed, o.budget, o.observation_window, o.num_sinks, prompt);
  const std::vector<Eigen::MatrixXf> weights{causal_weights(random, prompt, 2)};
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 1};
  Cache<float> whole(shape, o.budget, policy_of(o)), pieces(shape, o.budget, policy_of(o));
  feed(whole, weights, prompt, false);
  const bool close_without_tokens = random.one_in(4);
  for (Index left = prompt; left > 0;) {
    const Index piece = random.between(1, std::min<Index>(left, 20));
    left -= piece;
    feed(pieces, weights, piece, left > 0 || close_without_tokens);
  }
  if (close_without_tokens) feed(pieces, weights, 0, false);
  CHECK(sorted(pieces.positions(0)) == sorted(whole.positions(0)));
}

TEST_CASE("SnapKV gets the same rows from queries, from our kernel, and from the definition of attention") {
  const auto seed = GENERATE(range<std::uint64_t>(2000, 2010));
  const Index group = GENERATE(1, 3);
  Random random(seed);
  const reference::SnapKVOptions o{.budget = 24, .observation_window = 8, .max_over_group = random.one_in(2)};
  const Index prompt = 61, kv_heads = 2, dim = 5, window = o.observation_window;
  CAPTURE(seed, group);
  const Shape shape{.query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = dim};
  const Eigen::MatrixXf q = random.matrix(shape.query_heads * dim, prompt), k = random.matrix(kv_heads * dim, prompt);

  Cache<float> by_kernel(shape, o.budget, policy_of(o)), by_queries(shape, o.budget, policy_of(o));
  auto step = by_kernel.update(k, k);
  Eigen::MatrixXf out(q.rows(), q.cols());
  kvsnip::attend(step, q, out);

  auto other = by_queries.update(k, k);
  REQUIRE(other.wanted_rows() == window);
  for (Index h = 0; h < kv_heads; ++h) {
    Eigen::MatrixXf last(dim, window * group);
    for (Index column = 0; column < last.cols(); ++column)
      last.col(column) = q.block((h * group + column % group) * dim, prompt - window + column / group, dim, 1);
    other.on_queries(h, last);
  }

  for (Index h = 0; h < kv_heads; ++h) {
    const Eigen::MatrixXd keys = k.middleRows(h * dim, dim).cast<double>();
    std::vector<Eigen::MatrixXd> rows;
    for (Index g = 0; g < group; ++g) {
      const Eigen::MatrixXd queries = q.block((h * group + g) * dim, prompt - window, dim, window).cast<double>();
      rows.push_back(reference::attend(queries, prompt - window, keys, keys, consecutive(0, prompt)).weights);
    }
    const reference::SnapKVResult expected = reference::snapkv(rows, o);
    check_scores(by_kernel.policy().last_scores(h), expected, 1e-5);
    check_scores(by_queries.policy().last_scores(h), expected, 1e-5);
    CHECK(sorted(by_kernel.positions(h)) == expected.kept);
    CHECK(sorted(by_queries.positions(h)) == expected.kept);
  }
}

TEST_CASE("SnapKV keeps every position when the prompt fits the budget, the window or neither full") {
  const reference::SnapKVOptions o{.budget = 12, .observation_window = 8};
  for (const Index prompt : {1, 7, 8, 9, 12}) {
    CAPTURE(prompt);
    Random random(3);
    Cache<float> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, o.budget, policy_of(o));
    feed(cache, {causal_weights(random, prompt, 1)}, prompt, false);
    CHECK(sorted(cache.positions(0)) == consecutive(0, prompt));
  }
}

TEST_CASE("SnapKV alone lets the cache grow while decoding") {
  Random random(4);
  const reference::SnapKVOptions o{.budget = 12, .observation_window = 8};
  Cache<float> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, o.budget, policy_of(o));
  feed(cache, {causal_weights(random, 30, 1)}, 30, false);
  const std::vector<Index> kept = sorted(cache.positions(0));
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(1, 1);
  for (int token = 0; token < 20; ++token) {
    auto step = cache.update(zero, zero);
    CHECK(!step.wants_attention());
    step.done(0);
  }
  std::vector<Index> expected = kept;
  for (const Index position : consecutive(30, 50)) expected.push_back(position);
  CHECK(sorted(cache.positions(0)) == expected);
}

// Window 2, kernel 3, budget 4 of 8 positions; weights in eighths, the window's rows are the last two:
//
//   position        0  1  2  3  4  5 | 6  7
//   query 6         1  0  4  0  0  1 | 2
//   query 7         0  0  2  0  1  1 | 2  2
//   vote (sum)      1  0  6  0  1  2 |          only the prefix is pooled
//   pooled * 3      1  7  6  7  3  3            the edge is divided by 3, too
//   kept               1     3                  and the window 6, 7
TEST_CASE("SnapKV by hand: the vote for position 2 spreads to its neighbours") {
  Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(8, 8);
  weights.col(6) << 1, 0, 4, 0, 0, 1, 2, 0;
  weights.col(7) << 0, 0, 2, 0, 1, 1, 2, 2;
  const reference::SnapKVOptions o{.budget = 4, .observation_window = 2, .kernel_size = 3};
  Cache<float> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, o.budget, policy_of(o));
  feed(cache, {weights / 8}, 8, false);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 3, 6, 7});
  check_scores(cache.policy().last_scores(0),
               {.scores = {1 / 24.0, 7 / 24.0, 6 / 24.0, 7 / 24.0, 3 / 24.0, 3 / 24.0}, .kept = {}}, 1e-6);
}

TEST_CASE("SnapKV keeps the needle that the prompt's last queries look at, as the paper claims") {
  const Index prompt = 500, needle = 137, window = 16;
  Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(prompt, prompt);
  for (Index query = 0; query < prompt; ++query) {
    weights.col(query).head(query + 1).setConstant(0.7f / static_cast<float>(query + 1));
    weights(query < prompt - window ? 0 : needle, query) += 0.3f;  // before the window all look at the sink instead
  }
  const reference::SnapKVOptions o{.budget = 24, .observation_window = window};
  Cache<float> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, o.budget, policy_of(o));
  feed(cache, {weights}, prompt, false);
  const std::vector<Index> kept = sorted(cache.positions(0));
  CHECK(std::find(kept.begin(), kept.end(), needle) != kept.end());
}

TEST_CASE("SnapKV refuses a budget that leaves the prefix nothing, or the sinks no place") {
  const Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 1};
  CHECK_THROWS_AS(Cache<float>(shape, 8, policy_of({.observation_window = 8})), std::invalid_argument);
  CHECK_THROWS_AS(Cache<float>(shape, 11, policy_of({.observation_window = 8, .num_sinks = 4})), std::invalid_argument);
  CHECK(Cache<float>(shape, 9, policy_of({.observation_window = 8})).budget() == 9);
  CHECK(Cache<float>(shape, 12, policy_of({.observation_window = 8, .num_sinks = 4})).budget() == 12);
}

TEST_CASE("SnapKV forgets the votes of an earlier prompt that fitted, however it came") {
  for (int seed = 0; seed < 20; ++seed) {
    CAPTURE(seed);
    std::srand(static_cast<unsigned>(seed));
    const auto make = [] {
      return kvsnip::KVCache<float, kvsnip::SnapKV>({.query_heads = 1, .kv_heads = 1, .head_dim = 4}, /*budget=*/24,
                                                    kvsnip::SnapKV{{.observation_window = 8, .kernel_size = 1}});
    };
    auto in_chunks = make(), at_once = make();  // only the first is asked for its rows: more might have followed
    const auto feed = [](auto& cache, const Eigen::MatrixXf& k, bool more) {
      Eigen::MatrixXf out(4, k.cols());
      kvsnip::attend(cache.update(k, k, {.more = more}), k, out);
    };
    const Eigen::MatrixXf first = 3.0f * Eigen::MatrixXf::Random(4, 22), second = 3.0f * Eigen::MatrixXf::Random(4, 5);
    feed(in_chunks, first, true);
    feed(in_chunks, Eigen::MatrixXf(4, 0), false);
    feed(at_once, first, false);
    for (auto* cache : {&in_chunks, &at_once}) {  // five tokens: fewer rows than the window has room for
      feed(*cache, second.leftCols(3), true);
      feed(*cache, second.rightCols(2), false);
      REQUIRE(cache->size(0) == 24);
    }
    CHECK(std::equal(in_chunks.positions(0).begin(), in_chunks.positions(0).end(), at_once.positions(0).begin()));
  }
}
