// LagKV against its literal version, by hand, and the paper's claim in small.

#include "reference/lag_kv.hpp"

#include "support/beside_literal.hpp"
#include "support/thrown.hpp"

#include <kvsnip/policy/lag_kv.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <cmath>
#include <map>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::LagKV;
using test::consecutive;
using test::Random;
using test::sorted;

using Recorded = KVCache<float, test::RecordScores<LagKV>>;

}  // namespace

TEST_CASE("LagKV scores and keeps what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const kvsnip::LagKVOptions o{.lag_size = random.pick({1, 4, 5, 8}), .cross_scoring = random.one_in(2), .num_sinks = random.pick({0, 1, 3}),
                               .recent_window = random.pick({0, 1, 4}), .refill_interval = 1};
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 3, 11, 2 * o.lag_size, 3 * o.lag_size});
  CAPTURE(seed, budget, o.lag_size, o.cross_scoring, o.num_sinks, o.recent_window);
  std::map<Index, reference::LagKV> heads;
  test::BesideLiteral<LagKV> both({.query_heads = 4, .kv_heads = 2, .head_dim = random.pick({1, 3, 8})}, budget, LagKV{o},
                                  {.num_sinks = o.num_sinks, .recent_window = o.recent_window}, [&](const test::Candidates& c) {
                                    auto& head = heads.try_emplace(c.kv_head, o.lag_size, o.cross_scoring, o.num_sinks).first->second;
                                    return head.scores(c.positions, c.keys, c.values);
                                  }, 1e-4);
  both.feed_at_random(random, 200);
}

// Partitions of two, two channels; values are all alike, so that the keys decide. In the next partition the channels
// range over 0..1 and 0..2:
//   position        0      1    |   2     3    |  4
//   key           (1,2)  (3,0)  | (0,0) (1,2)  |
//   scaled        (1,1)  (3,0)                     its spread: 0 and 3 / sqrt(2)
//   softmax       1/(1+e^2.1213), and the rest
TEST_CASE("LagKV by hand: of the first partition the token that spreads stays, the second waits for its judge") {
  Eigen::MatrixXf k(2, 5), v = Eigen::MatrixXf::Ones(2, 5);
  k << 1, 3, 0, 1, 7,
       2, 0, 0, 2, 7;
  const auto compress = [&](bool cross_scoring, Index budget) {
    Recorded cache({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, budget, test::RecordScores<LagKV>(LagKV{{.lag_size = 2, .cross_scoring = cross_scoring, .num_sinks = 0}}));
    cache.update(k, v).done(0);
    return cache;
  };
  const Recorded cache = compress(true, 4);
  const double least = 1 / (1 + std::exp(3 / std::sqrt(2.0)));
  for (const auto& [slot, score] : {std::pair{0, (least + 0.5) / 2}, {1, (1.5 - least) / 2}, {2, 1.0}, {3, 1.0}, {4, 1.0}})
    CHECK(test::close(cache.policy().last_scores(0).begin()[slot], score, 1e-6, 0));
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 2, 3, 4});
  CHECK(sorted(compress(false, 4).positions(0)) == std::vector<Index>{1, 2, 3, 4});
  CHECK(compress(false, 4).policy().last_scores(0) == std::vector<float>{0, 0.5f, 1, 1, 1});
  CHECK(sorted(compress(false, 2).positions(0)) == std::vector<Index>{3, 4});
}

TEST_CASE("LagKV is StreamingLLM until two partitions fit beside the sinks") {
  const auto hold = [](auto policy) {
    Random random(2);
    KVCache<float, decltype(policy)> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 3}, 19, policy);
    for (const Index count : {15, 1, 1, 1, 30, 1, 1, 1, 1, 3, 1}) {
      const Eigen::MatrixXf k = random.matrix(3, count);
      cache.update(k, k).done(0);
    }
    return sorted(cache.positions(0));
  };
  // A prompt of 49 is judged as far as it goes: not here, where 45 are less than two partitions.
  CHECK(hold(LagKV{{.lag_size = 23}}) == hold(kvsnip::StreamingLLM{}));
}

TEST_CASE("LagKV keeps a passkey in a text that repeats itself, as the paper claims") {
  Random random(9);
  const Index dim = 16, count = 640, needle = 200, length = 4, lag = 32;
  const Eigen::MatrixXf words = random.matrix(dim, 20);
  Eigen::MatrixXf k(dim, count);
  for (Index t = 0; t < count; ++t) k.col(t) = words.col(random.below(20)) + 0.1f * random.matrix(dim, 1);
  for (Index t = needle; t < needle + length; ++t) k.col(t) = 2.5f * random.matrix(dim, 1);  // as nothing around it
  const bool cross_scoring = GENERATE(false, true);
  KVCache<float, LagKV> at_once({.query_heads = 1, .kv_heads = 1, .head_dim = dim}, 160, LagKV{{.lag_size = lag, .cross_scoring = cross_scoring}}), by_token = at_once;
  at_once.update(k, k).done(0);
  for (Index t = 0; t < count; ++t) by_token.update(k.col(t), k.col(t)).done(0);
  for (const auto* cache : {&at_once, &by_token}) {
    const std::vector<Index> held = sorted(cache->positions(0)), passkey = consecutive(needle, needle + length);
    CHECK(std::includes(held.begin(), held.end(), passkey.begin(), passkey.end()));
  }
}

TEST_CASE("LagKV's scores are finite for keys and values of any accepted size, and for channels that do not change") {
  const bool cross_scoring = GENERATE(false, true);
  Eigen::MatrixXf k(3, 8);
  k << 1e18f, -1e18f, 1e18f, 0, 0, 1e-45f, 0, 1e18f,
       1, 1, 1, 1, 1, 1, 1, 1,
       0, 1e18f, 1e-40f, 2e-40f, 0, 1e-45f, -1e18f, 1e18f;
  Recorded cache({.query_heads = 1, .kv_heads = 1, .head_dim = 3}, 5, test::RecordScores<LagKV>(LagKV{{.lag_size = 2, .cross_scoring = cross_scoring, .num_sinks = 0}}));
  cache.update(k, k).done(0);
  for (const float score : cache.policy().last_scores(0)) CHECK((score >= 0 && score <= 1));
}

TEST_CASE("LagKV refuses bad options, naming them, and a planner without keys") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { LagKV{{.lag_size = 0}}; }), {"LagKV", "lag_size", ">= 1", "0"}));
  CHECK(says(message_of([] { LagKV{{.num_sinks = -1}}; }), {"LagKV", "num_sinks", ">= 0", "-1"}));
  kvsnip::SlotPlanner<LagKV> planner({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 20);
  planner.plan(20), planner.done(0), planner.finish();
  CHECK(says(message_of([&] { planner.plan(1); }), {"LagKV", "set_vectors"}));
}
