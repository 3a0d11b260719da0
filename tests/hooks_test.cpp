// The hooks that few policies need, through a cache: queries, scores of a layer at once, heads with budgets of their own,
// RoPE. Policies here are spies: they note what they are told.

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/detail/decorator.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/streaming_llm.hpp>
#include <kvsnip/registry.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

namespace {

using kvsnip::AnyPolicy;
using kvsnip::Chain;
using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Phase;
using kvsnip::QueryRows;
using kvsnip::Rope;
using kvsnip::Shape;
using kvsnip::SlotsView;
using kvsnip::StepInfo;
using kvsnip::StreamingLLM;
using test::Random;

constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 3};

/// Keeps the newest; wants the last `wanted` queries, and perhaps rows, of every update.
struct WantsQueries {
  explicit WantsQueries(Index wanted_queries_ = 2, Index rows_ = 0) : wanted(wanted_queries_), rows(rows_) {}

  Index wanted, rows;
  std::map<Index, Eigen::MatrixXf> queries;         // by kv_head, all that came
  std::map<Index, std::vector<Index>> first_positions;
  Index rows_seen = 0;

  void score(Index, const SlotsView& slots, std::span<float> out) const {
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<float>(slots.positions[i]);
  }
  Index wanted_queries(const StepInfo&) const { return wanted; }
  void observe_queries(Index kv_head, const QueryRows& q) {
    Eigen::MatrixXf& all = queries[kv_head];
    all.conservativeResize(q.queries.rows(), all.cols() + q.queries.cols());
    all.rightCols(q.queries.cols()) = q.queries;
    first_positions[kv_head].push_back(q.first_position);
  }
  Index wanted_rows(const StepInfo&) const { return rows; }
  void observe(Index, const kvsnip::AttentionRows& r) { rows_seen += r.num_queries(); }
  void reset(const Shape&) { queries.clear(), first_positions.clear(), rows_seen = 0; }
};

/// q of tokens [first, first + count) of a kv_head, a query's heads side by side.
Eigen::MatrixXf side_by_side(const Eigen::MatrixXf& q, Index kv_head, Index first, Index count) {
  Eigen::MatrixXf out(3, 2 * count);
  for (Index j = 0; j < count; ++j)
    for (Index g = 0; g < 2; ++g) out.col(2 * j + g) = q.block((2 * kv_head + g) * 3, first + j, 3, 1);
  return out;
}

}  // namespace

TEST_CASE("attend and on_queries bring a policy the queries it wants, in prompts and decode, with rows or without") {
  const Index rows = GENERATE(0, 1, 3);
  const bool by_attend = GENERATE(true, false), type_erased = GENERATE(true, false);
  CAPTURE(rows, by_attend, type_erased);
  Random random(1);
  const WantsQueries spy(2, rows);
  const auto run = [&](auto policy, const auto& seen) {
    KVCache<float, decltype(policy)> cache(shape, 8, policy);
    std::map<Index, Eigen::MatrixXf> expected;
    std::vector<Index> firsts;
    Index tokens_seen = 0;
    for (const Index tokens : {11, 1, 1, 2, 3, 1}) {
      const Eigen::MatrixXf k = random.matrix(6, tokens), q = random.matrix(12, tokens);
      Eigen::MatrixXf out(12, tokens);
      auto step = cache.update(k, k);
      const Index wanted = std::min<Index>(2, tokens), given = std::max(wanted, std::min(rows, tokens));
      CHECK(step.wanted_queries() == wanted);
      for (Index h = 0; h < 2; ++h) {
        const Eigen::MatrixXf wanted_queries = side_by_side(q, h, tokens - wanted, wanted);
        expected[h].conservativeResize(3, expected[h].cols() + wanted_queries.cols());
        expected[h].rightCols(wanted_queries.cols()) = wanted_queries;
        if (!by_attend) step.on_queries(h, side_by_side(q, h, tokens - given, given));
      }
      if (by_attend) kvsnip::attend(step, q, out);
      tokens_seen += tokens;
      firsts.push_back(tokens_seen - wanted);
    }
    (void)cache.update(random.matrix(6, 1), random.matrix(6, 1));  // decode steps are told with the step's end, this one is not
    const WantsQueries& told = seen(cache);
    CHECK(told.queries.at(0) == expected.at(0));
    CHECK(told.queries.at(1) == expected.at(1));
    CHECK(told.first_positions.at(1) == firsts);
    CHECK(told.rows_seen == 2 * (std::min<Index>(rows, 11) + 3 * std::min<Index>(rows, 1) + std::min<Index>(rows, 2) + rows));
  };
  if (type_erased) run(AnyPolicy(spy), [](const auto& cache) -> const WantsQueries& { return *cache.policy().template as<WantsQueries>(); });
  else run(spy, [](const auto& cache) -> const WantsQueries& { return cache.policy(); });
}

TEST_CASE("A kv_head whose queries are wanted cannot be ended without them, and a step taken back tells nothing") {
  KVCache<float, WantsQueries> cache(shape, 8, WantsQueries(1, 1));
  Random random(2);
  const Eigen::MatrixXf k = random.matrix(6, 1), weights = Eigen::MatrixXf::Ones(1, 2);
  auto step = cache.update(k, k);
  CHECK_THROWS_AS(step.on_attention(0, weights), std::logic_error);
  CHECK_THROWS_AS(step.done(0), std::logic_error);
  CHECK(test::says(test::message_of([&] { step.on_queries(0, Eigen::MatrixXf::Ones(3, 4)); }), {"on_queries", "3 x 2", "3 x 4"}));
  step.on_queries(0, Eigen::MatrixXf::Ones(3, 2));
  CHECK_THROWS_AS(step.on_queries(0, Eigen::MatrixXf::Ones(3, 2)), std::logic_error);
  step.abandon();
  CHECK(cache.policy().queries.empty());
  auto prompt = cache.update(random.matrix(6, 20), random.matrix(6, 20));
  prompt.on_queries(1, Eigen::MatrixXf::Ones(3, 2));
  prompt.abandon();
  CHECK(cache.policy().queries.empty());
  CHECK(cache.tokens_seen() == 0);
}

TEST_CASE("A chain gives each of its policies the queries that it wants") {
  KVCache<float, Chain<WantsQueries, WantsQueries>> cache(shape, 8, Chain{WantsQueries(1), WantsQueries(3)});
  Random random(3);
  for (const Index tokens : {10, 1, 2}) {
    const Eigen::MatrixXf k = random.matrix(6, tokens), q = random.matrix(12, tokens);
    Eigen::MatrixXf out(12, tokens);
    kvsnip::attend(cache.update(k, k), q, out);
  }
  CHECK(cache.policy().prompt().first_positions.at(0) == std::vector<Index>{9});
  CHECK(cache.policy().decode().first_positions.at(0) == std::vector<Index>{7, 10, 11});
}

namespace {

/// All kv_heads of a layer at once: what every head holds is scored by head 0's keys, and calls are counted.
struct ScoresByFirstHead {
  Index calls = 0;
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    ++calls;
    for (std::size_t h = 0; h < heads.size(); ++h)
      for (std::size_t i = 0; i < out[h].size(); ++i) {
        std::vector<float> key(3);
        heads[0].read_key(static_cast<Index>(i), key);
        out[h][i] = key[0];
      }
  }
  kvsnip::Eviction eviction(Index) const { return {.count = 2}; }
};

/// Keeps the newest; kv_head 0 may grow, the other one has three slots.
struct FirstHeadGrows : StreamingLLM {
  FirstHeadGrows() : StreamingLLM({.num_sinks = 1}) {}
  Index head_budget(Index kv_head, Index) const { return kv_head == 0 ? kvsnip::unlimited_budget : 3; }
};

void feed(auto& cache, const Eigen::MatrixXf& k) {
  auto step = cache.update(k, k);
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
}

}  // namespace

TEST_CASE("A policy that scores all kv_heads together is asked once a choice, and its choice is every head's") {
  Random random(4);
  KVCache<float, ScoresByFirstHead> cache(shape, 8);
  Eigen::MatrixXf k = random.matrix(6, 30);
  feed(cache, k.leftCols(20));
  CHECK(cache.policy().calls == 1);
  CHECK(test::sorted(cache.positions(0)) == test::sorted(cache.positions(1)));
  std::vector<std::pair<float, Index>> by_key;
  for (Index t = 0; t < 20; ++t) by_key.emplace_back(k(0, t), t);
  std::sort(by_key.rbegin(), by_key.rend());
  std::vector<Index> best;
  for (const auto& [key, t] : std::vector(by_key.begin(), by_key.begin() + 8)) best.push_back(t);
  CHECK(test::sorted(cache.positions(0)) == test::sorted(best));
  for (Index t = 20; t < 24; ++t) feed(cache, k.col(t));
  CHECK(cache.policy().calls == 3);  // two victims a choice
  CHECK(test::sorted(cache.positions(0)) == test::sorted(cache.positions(1)));
  CHECK(cache.size(0) == 8);
}

TEST_CASE("A kv_head may have a budget of its own, or none") {
  KVCache<float, FirstHeadGrows> cache(shape, 8);
  CHECK(cache.budget(0) == kvsnip::unlimited_budget);
  CHECK(cache.budget(1) == 3);
  Random random(5);
  feed(cache, random.matrix(6, 5));
  for (int token = 0; token < 7; ++token) feed(cache, random.matrix(6, 1));
  CHECK(cache.size(0) == 12);
  CHECK(test::sorted(cache.positions(1)) == std::vector<Index>{0, 10, 11});
  CHECK(cache.capacity(1) == 3);
  feed(cache, random.matrix(6, 20));
  CHECK(cache.size(0) == 32);
  CHECK(test::sorted(cache.positions(1)) == std::vector<Index>{0, 30, 31});
}

namespace {
struct NeedsRope : StreamingLLM {
  NeedsRope() = default;
  bool needs_rope() const { return true; }
  const Rope* seen = nullptr;
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    seen = slots.rope;
    StreamingLLM::score(kv_head, slots, out);
  }
};
}  // namespace

TEST_CASE("A policy that needs the model's RoPE is refused a cache without, and is shown it") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { KVCache<float, NeedsRope>(shape, 8); }), {"KVCache", "Rope"}));
  CHECK(says(message_of([] { KVCache<float, AnyPolicy>(shape, 8, AnyPolicy(NeedsRope{})); }), {"KVCache", "Rope"}));
  CHECK(says(message_of([] { KVCache<float, NeedsRope>(shape, 8, NeedsRope(), Rope{{1, 2}}); }), {"rope.inv_freq", "1", "2"}));
  CHECK(says(message_of([] { KVCache<float, NeedsRope>(shape, 8, NeedsRope(), Rope{{std::numeric_limits<double>::infinity()}}); }), {"rope.inv_freq", "finite"}));
  KVCache<float, NeedsRope> cache(shape, 8, NeedsRope(), Rope::standard(3, Rope::Pairing::interleaved));
  feed(cache, Random(6).matrix(6, 9));
  REQUIRE(cache.policy().seen != nullptr);
  CHECK(cache.policy().seen->inv_freq == std::vector<double>{1});
}

TEST_CASE("RoPE turns each pair by its own angle, keeps the dot product of equal distances, and can be undone") {
  const auto pairing = GENERATE(Rope::Pairing::interleaved, Rope::Pairing::half_split);
  Random random(7);
  const Rope rope = Rope::standard(8, pairing);
  std::vector<float> a(9), b(9);
  for (std::size_t i = 0; i < 9; ++i) a[i] = random.normal(), b[i] = random.normal();
  const std::vector<float> before = a;
  const auto dot = [&](std::vector<float> x, Index p, std::vector<float> y, Index q) {
    rope.rotate(x, p), rope.rotate(y, q);
    return std::inner_product(x.begin(), x.end() - 1, y.begin(), 0.0f);  // the ninth is not part of a pair
  };
  CHECK(test::close(dot(a, 3, b, 10), dot(a, 103, b, 110), 0, 1e-4));
  CHECK(std::abs(dot(a, 3, b, 10) - dot(a, 3, b, 11)) > 1e-3f);
  rope.rotate(a, 5);
  const std::size_t partner = pairing == Rope::Pairing::interleaved ? 1 : 4;
  CHECK(test::close(a[0], before[0] * std::cos(5.0f) - before[partner] * std::sin(5.0f), 0, 1e-5));
  CHECK(a[8] == before[8]);
  rope.rotate(a, -5);
  for (std::size_t i = 0; i < 9; ++i) CHECK(test::close(a[i], before[i], 0, 1e-5));
}
