// CUR against its literal version, by hand, and the paper's claim in small.

#include "reference/cur.hpp"

#include "support/beside_literal.hpp"
#include "support/thrown.hpp"

#include <kvsnip/policy/cur.hpp>

#include <string>

namespace {

using kvsnip::CUR;
using kvsnip::Index;
using kvsnip::KVCache;
using test::Random;
using test::sorted;
using Leverage = CUR::Leverage;

using Recorded = KVCache<float, test::RecordScores<CUR>>;

/// Keys and values of length one number each.
Recorded one_prompt(const std::vector<float>& keys, const std::vector<float>& values, Index budget, const kvsnip::CUROptions& options) {
  Recorded cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, budget, test::RecordScores<CUR>(CUR{options}));
  const auto tokens = static_cast<Index>(keys.size());
  cache.update(Eigen::Map<const Eigen::MatrixXf>(keys.data(), 1, tokens), Eigen::Map<const Eigen::MatrixXf>(values.data(), 1, tokens)).done(0);
  return cache;
}

}  // namespace

TEST_CASE("CUR scores and keeps what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const kvsnip::CUROptions o{.leverage = static_cast<Leverage>(random.below(4)), .local_window = random.pick({0, 1, 2, 5, 16}), .num_sinks = random.pick({0, 1, 3}),
                             .recent_window = random.pick({0, 1, 2, 5}), .refill_interval = 1};
  const std::string leverage(enum_names(o.leverage)[static_cast<std::size_t>(o.leverage)]);
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11});
  CAPTURE(seed, budget, leverage, o.local_window, o.num_sinks, o.recent_window);
  test::BesideLiteral<CUR> both({.query_heads = 4, .kv_heads = 2, .head_dim = random.pick({1, 3, 8})}, budget, CUR{o},
                                {.num_sinks = o.num_sinks, .recent_window = o.recent_window},
                                [&](const test::Candidates& c) { return reference::cur(c.keys, c.values, leverage, o.local_window); });
  both.feed_at_random(random, 120);
}

// Neighbourhoods of two. Squared norms and what they come to, times the sum of the products 1/9 + 4/9 + 16/25 + 1/25:
//   position        0    1  |   2     3
//   key^2           1    1  |  16     4         share 1/2  1/2 | 4/5 1/5
//   value^2         1    4  |  16     4         share 1/5  4/5 | 4/5 1/5
//   product        1/10 4/10| 16/25  1/25       sum 59/50
TEST_CASE("CUR by hand: shares of a neighbourhood, multiplied") {
  const std::vector<float> keys{1, 1, -4, 2}, values{1, -2, 4, 2};
  const Recorded cache = one_prompt(keys, values, 2, {.local_window = 2, .num_sinks = 0, .recent_window = 0});
  const std::vector<float>& scores = cache.policy().last_scores(0);
  for (const auto& [slot, product] : {std::pair{0, 0.1}, {1, 0.4}, {2, 0.64}, {3, 0.04}}) CHECK(test::close(scores.begin()[slot], product / 1.18, 1e-6, 0));
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 2});
  // By keys alone 0 and 1 share theirs; of equals the newer stays.
  CHECK(sorted(one_prompt(keys, values, 2, {.leverage = Leverage::key, .local_window = 2, .num_sinks = 0, .recent_window = 0}).positions(0)) == std::vector<Index>{1, 2});
  CHECK(sorted(one_prompt(keys, values, 1, {.leverage = Leverage::value, .local_window = 0, .num_sinks = 0, .recent_window = 0}).positions(0)) == std::vector<Index>{2});
}

TEST_CASE("CUR keeps the tokens whose values matter although their keys are like all others, as the paper claims") {
  Random random(8);
  const Index dim = 8, count = 320;
  Eigen::MatrixXf k(dim, count), v(dim, count);
  std::vector<Index> heavy;
  for (Index t = 0; t < count; ++t) {
    const bool matters = t % 20 == 13;
    if (matters) heavy.push_back(t);
    k.col(t) = random.matrix(dim, 1).normalized();
    v.col(t) = (matters ? 5.0f : 1.0f) * random.matrix(dim, 1).normalized();
  }
  KVCache<float, CUR> at_once({.query_heads = 1, .kv_heads = 1, .head_dim = dim}, 40, CUR{}), by_token = at_once;
  at_once.update(k, v).done(0);
  for (Index t = 0; t < count; ++t) by_token.update(k.col(t), v.col(t)).done(0);
  for (const auto* cache : {&at_once, &by_token}) {
    const std::vector<Index> held = sorted(cache->positions(0));
    Index kept = 0;
    for (const Index position : heavy) kept += std::binary_search(held.begin(), held.end(), position);
    CHECK(kept >= std::ssize(heavy) - 1);
  }
}

TEST_CASE("CUR's scores are finite for keys and values of any accepted size, zeros too") {
  for (const Leverage leverage : {Leverage::product, Leverage::mean, Leverage::key, Leverage::value})
    for (const Index local_window : {0, 2}) {
      const Recorded cache = one_prompt({1e18f, -1e18f, 0, 0, 1e-30f, 0}, {1e18f, 1e-30f, 0, 0, 0, 1}, 2,
                                        {.leverage = leverage, .local_window = local_window, .num_sinks = 0, .recent_window = 0});
      for (const float score : cache.policy().last_scores(0)) CHECK((score >= 0 && score <= 1));
      CHECK(sorted(cache.positions(0)).front() <= 1);
    }
  const Recorded zeros = one_prompt({0, 0, 0}, {0, 0, 0}, 2, {.num_sinks = 0, .recent_window = 0});
  CHECK(zeros.policy().last_scores(0) == std::vector<float>{0, 0, 0});
}

TEST_CASE("CUR refuses bad options, naming them, and a planner without keys") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { CUR{{.local_window = -1}}; }), {"CUR", "local_window", ">= 0", "-1"}));
  CHECK(says(message_of([] { CUR{{.num_sinks = -1}}; }), {"CUR", "num_sinks", ">= 0", "-1"}));
  kvsnip::SlotPlanner<CUR> planner({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 20);
  planner.plan(20), planner.done(0), planner.finish();
  CHECK(says(message_of([&] { planner.plan(1); }), {"CUR", "set_vectors"}));
}
