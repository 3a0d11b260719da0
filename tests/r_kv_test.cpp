// RKV against its literal version, by hand, and while decoding.

#include "reference/r_kv.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/prompt_rows.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/periodic.hpp>
#include <kvsnip/policy/r_kv.hpp>

#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Periodic;
using kvsnip::RKV;
using test::Random;

}  // namespace

TEST_CASE("RKV scores what its literal version does, in whatever pieces the prompt comes") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const Index group = random.pick({1, 2, 4}), dim = random.pick({2, 3, 8});
  const reference::RKVOptions o{.observation_window = random.pick({1, 4, 8}), .kernel_size = random.pick({1, 3, 7}), .importance = static_cast<double>(random.pick({0, 1, 4})) / 4,
                                .similarity = static_cast<double>(random.pick({-4, 2, 4})) / 5};
  const Index budget = o.observation_window + random.between(1, 10), tokens = budget + random.between(1, 100);
  CAPTURE(seed, group, dim, o.observation_window, o.kernel_size, o.importance, o.similarity, budget, tokens);
  KVCache<float, test::RecordScores<RKV>> cache({.query_heads = group, .kv_heads = 1, .head_dim = dim}, budget,
                                                test::RecordScores(RKV{{.observation_window = o.observation_window,
                                                                        .kernel_size = o.kernel_size,
                                                                        .importance = static_cast<float>(o.importance),
                                                                        .similarity = static_cast<float>(o.similarity)}}));
  const Eigen::MatrixXf k = random.matrix(dim, tokens), weights = test::causal_weights(random, tokens, group);
  for (Index first = 0; first < tokens;) {
    const Index count = random.one_in(2) ? tokens - first : random.between(1, tokens - first);
    auto step = cache.update(k.middleCols(first, count), k.middleCols(first, count), {.more = first + count < tokens});
    first += count;
    const Index wanted = step.wanted_rows();
    if (wanted == 0) step.done(0);
    else step.on_attention(0, weights.block(0, (first - wanted) * group, first, wanted * group));
  }
  Eigen::MatrixXd mean = Eigen::MatrixXd::Zero(tokens, o.observation_window);
  for (const Eigen::MatrixXd& head : test::rows_per_query_head(weights, o.observation_window, group)) mean += head / static_cast<double>(group);
  const std::vector<double> want = reference::r_kv(mean, k.cast<double>(), o);
  for (std::size_t i = 0; i < want.size(); ++i) REQUIRE(test::close(cache.policy().last_scores(0)[i], want[i], 1e-4, 1e-5));
  CHECK(cache.size(0) == budget);
}

// Six tokens that nobody attends to: 0, 2 and 4 are one key, 1 and 3 another of their own. The window is the last one, 5.
// 0 and 2 are blamed by each other and by 4; 4 is the newest that 0 and 2 resemble, and not blamed.
TEST_CASE("RKV by hand: of a key that is said three times the last one stays") {
  KVCache<float, RKV> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 4}, 4, RKV{{.observation_window = 1, .kernel_size = 1}});
  Eigen::MatrixXf k(4, 6);
  k << 1, 0, 2, 0, 3, 0,
       0, 1, 0, 0, 0, 0,
       0, 0, 0, 1, 0, 0,
       0, 0, 0, 0, 0, 1;
  auto step = cache.update(k, k);
  step.on_attention(0, Eigen::MatrixXf::Constant(6, 1, 1.0f / 6));
  CHECK(test::sorted(cache.positions(0)) == std::vector<Index>{1, 3, 4, 5});
}

TEST_CASE("While decoding a periodic RKV drops what is said again and again, and keeps what is said once") {
  Random random(2);
  const Index dim = 16;
  KVCache<float, Periodic<RKV>> cache({.query_heads = 2, .kv_heads = 1, .head_dim = dim}, 64, Periodic<RKV>(RKV{}, {.interval = 24}));
  const Eigen::MatrixXf phrase = random.matrix(dim, 3);
  Index unique = 0, held_unique = 0;
  std::vector<bool> is_unique;
  for (Index t = 0; t < 400; ++t) {
    is_unique.push_back(t % 20 == 7);
    const Eigen::MatrixXf k = is_unique.back() ? random.matrix(dim, 1) : Eigen::MatrixXf(phrase.col(t % 3) + 0.2f * random.matrix(dim, 1)), q = 0.1f * random.matrix(2 * dim, 1);
    Eigen::MatrixXf out(2 * dim, 1);
    kvsnip::attend(cache.update(k, k), q, out);
    CHECK(cache.size(0) <= 64);
  }
  for (Index t = 0; t < 380; ++t) unique += is_unique[static_cast<std::size_t>(t)];
  for (const Index position : cache.positions(0)) held_unique += position < 380 && is_unique[static_cast<std::size_t>(position)];
  CHECK(4 * held_unique >= 3 * unique);  // of all tokens it holds a sixth
}

TEST_CASE("RKV refuses bad options, naming them") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { RKV{{.kernel_size = 4}}; }), {"RKV", "kernel_size", "odd", "4"}));
  CHECK(says(message_of([] { RKV{{.importance = 1.5f}}; }), {"RKV", "importance", "[0, 1]", "1.5"}));
  CHECK(says(message_of([] { RKV{{.similarity = -2}}; }), {"RKV", "similarity", "[-1, 1]", "-2"}));
  CHECK(says(message_of([] { RKV{{.observation_window = 0}}; }), {"RKV", "observation_window", ">= 1", "0"}));
}
