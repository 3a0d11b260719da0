// SimLayerKV against its literal version; lazy layers stream, others grow. DuoAttention: the same by head.

#include "reference/sim_layer_kv.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/prompt_rows.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/duo_attention.hpp>
#include <kvsnip/policy/sim_layer_kv.hpp>

#include <vector>

namespace {

using kvsnip::DuoAttention;
using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::SimLayerKV;
using test::sorted;

void decode(auto& cache, Index tokens) {
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(cache.shape().kv_heads, 1);
  for (Index t = 0; t < tokens; ++t) {
    auto step = cache.update(zero, zero);
    for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
  }
}

}  // namespace

TEST_CASE("SimLayerKV finds the layers lazy that its literal version does, in whatever pieces the prompt comes") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 100));
  test::Random random(seed);
  const Index heads = 2, group = random.pick({1, 2}), sinks = random.pick({0, 2}), recents = random.between(1, 9), queries = random.pick({1, 3});
  const Index budget = sinks + recents + random.below(3), tokens = budget + random.between(queries + 1, 30);
  const double threshold = static_cast<double>(random.between(1, 9)) / 10;
  CAPTURE(seed, group, sinks, recents, queries, budget, tokens, threshold);
  KVCache<float, SimLayerKV> cache({.query_heads = heads * group, .kv_heads = heads, .head_dim = 1}, budget,
                                   SimLayerKV{{.num_sinks = sinks, .recent_window = recents, .num_queries = queries, .threshold = static_cast<float>(threshold)}});
  std::vector<Eigen::MatrixXf> weights;
  std::vector<Eigen::MatrixXd> rows;
  for (Index h = 0; h < heads; ++h) {
    weights.push_back(test::causal_weights(random, tokens, group));
    for (const Eigen::MatrixXd& head : test::rows_per_query_head(weights.back(), queries, group)) rows.push_back(head);
  }
  if (random.one_in(2)) test::feed(cache, weights, tokens - queries - 1, true), test::feed(cache, weights, queries + 1, false);
  else test::feed(cache, weights, tokens, false);
  const bool lazy = reference::is_lazy(rows, sinks, recents, static_cast<double>(static_cast<float>(threshold)));
  CHECK(cache.policy().is_lazy() == lazy);
  decode(cache, 5);
  for (Index h = 0; h < heads; ++h) {
    CHECK(cache.size(h) == (lazy ? budget : tokens + 5));
    std::vector<Index> expected = test::consecutive(0, lazy ? sinks : tokens + 5);
    for (Index p = tokens + 5 - (budget - sinks); lazy && p < tokens + 5; ++p) expected.push_back(p);
    CHECK(sorted(cache.positions(h)) == expected);
  }
}

TEST_CASE("DuoAttention: a retrieval head keeps everything, a streaming head the first tokens and the newest") {
  KVCache<float, DuoAttention> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 6, DuoAttention({false, true}, {.num_sinks = 2}));
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(2, 30);
  auto step = cache.update(zeros, zeros);
  step.done(0), step.done(1);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 1, 26, 27, 28, 29});
  CHECK(sorted(cache.positions(1)) == test::consecutive(0, 30));
  decode(cache, 20);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 1, 46, 47, 48, 49});
  CHECK(sorted(cache.positions(1)) == test::consecutive(0, 50));
  CHECK(cache.capacity(0) == 6);
  cache.reset();
  decode(cache, 10);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 1, 6, 7, 8, 9});
  CHECK(cache.size(1) == 10);
}

TEST_CASE("SimLayerKV and DuoAttention refuse bad options, naming them") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { SimLayerKV{{.num_sinks = -1}}; }), {"SimLayerKV", "num_sinks", ">= 0", "-1"}));
  CHECK(says(message_of([] { SimLayerKV{{.recent_window = 0}}; }), {"SimLayerKV", "recent_window", ">= 1", "0"}));
  CHECK(says(message_of([] { SimLayerKV{{.num_queries = 0}}; }), {"SimLayerKV", "num_queries", ">= 1", "0"}));
  CHECK(says(message_of([] { SimLayerKV{{.threshold = 2}}; }), {"SimLayerKV", "threshold", "[0, 1]", "2"}));
  CHECK(says(message_of([] { KVCache<float, DuoAttention>({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 80, DuoAttention({true})); }), {"DuoAttention", "kv_heads = 2", "1"}));
  CHECK(says(message_of([] { KVCache<float, DuoAttention>({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 64, DuoAttention({false})); }), {"budget", "64"}));
}
