// Layer budgets: what holds for any input, and small cases by hand. Golden vectors pin the formulas.

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/layer_budgets.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <algorithm>
#include <numeric>
#include <vector>

using kvsnip::Index;
using Budgets = std::vector<Index>;
namespace layer_budgets = kvsnip::layer_budgets;

TEST_CASE("Layer budgets by hand") {
  CHECK(layer_budgets::uniform(3, 7) == Budgets{7, 7, 7});
  CHECK(layer_budgets::tile({1, 2}, 6) == Budgets{1, 1, 1, 2, 2, 2});
  CHECK(layer_budgets::repeat({1, 2}, 5) == Budgets{1, 2, 1, 2, 1});
  CHECK(layer_budgets::from_share(0.5, 100) == 56);  // 50, up to a multiple of 8
  CHECK(layer_budgets::from_share(300, 100) == 100);
  CHECK(layer_budgets::after_removing(0.9, 100) == 9);  // 0.09999... in double
  // A mean of 20 beside a window of 2: from 20 x 2 - 2 = 38 down to 2 in two steps of 18, windows on top.
  CHECK(layer_budgets::pyramid(3, 22, {.observation_window = 2, .beta = 10}) == Budgets{40, 22, 4});
  CHECK(layer_budgets::pyramid(3, 22, {.prompt = 30, .observation_window = 2, .beta = 10}) == Budgets{22, 22, 22});  // short
}

TEST_CASE("A pyramid falls, stays within the prompt, and shares out about the mean") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 200));
  test::Random random(seed);
  const Index layers = random.between(2, 40), window = random.pick({0, 8, 32}), budget = window + random.between(1, 500), prompt = budget + random.below(3000);
  const layer_budgets::PyramidOptions o{.prompt = prompt, .observation_window = window, .beta = static_cast<double>(random.between(2, 30)), .window_apart = random.one_in(2),
                                        .even_if_short = random.one_in(2)};
  CAPTURE(seed, layers, window, budget, prompt, o.beta, o.window_apart, o.even_if_short);
  const Budgets got = layer_budgets::pyramid(layers, static_cast<double>(budget), o);
  CHECK(std::is_sorted(got.rbegin(), got.rend()));
  CHECK(*std::max_element(got.begin(), got.end()) <= prompt);
  CHECK(*std::min_element(got.begin(), got.end()) >= std::min(window, prompt));
  if (prompt >= 2 * budget) CHECK(std::abs(std::accumulate(got.begin(), got.end(), Index{0}) - layers * budget) <= layers * layers / 2 + layers);
}

TEST_CASE("A funnel rises, in multiples of 8 but for what was paid, and nobody starves") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 100));
  test::Random random(seed);
  const Index layers = random.between(2, 40), longest = random.between(64, 9000), budget = layer_budgets::from_share(0.01 * static_cast<double>(random.between(1, 100)), longest);
  CAPTURE(seed, layers, longest, budget);
  const Budgets got = layer_budgets::funnel(layers, budget, longest);
  CHECK(std::is_sorted(got.begin(), got.end()));
  CHECK(got.front() >= std::min<Index>(256, budget));
  CHECK(got.back() <= longest);
}

TEST_CASE("A schedule scaled to bytes takes them all but for less than a slot, and caches of these budgets take as much") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 100));
  test::Random random(seed);
  const kvsnip::Shape shape{.query_heads = 4, .kv_heads = random.pick({1, 2}), .head_dim = random.pick({3, 8})};
  Budgets schedule;
  for (Index layer = random.between(1, 9); layer > 0; --layer) schedule.push_back(random.between(1, 2000));
  const Index slot = 2 * shape.kv_heads * shape.head_dim * 2, bytes = slot * std::ssize(schedule) + random.below(40000);
  CAPTURE(seed, schedule.size(), slot, bytes);
  const Budgets budgets = layer_budgets::fit_bytes(bytes, schedule, shape, 2);
  const Index slots = std::accumulate(budgets.begin(), budgets.end(), Index{0});
  CHECK(slots == bytes / slot);
  CHECK(*std::min_element(budgets.begin(), budgets.end()) >= 1);
  Index held = 0;
  for (const Index budget : budgets) {
    kvsnip::KVCache<Eigen::half, kvsnip::StreamingLLM> cache(shape, budget, kvsnip::StreamingLLM{{.num_sinks = 0}});
    const Eigen::MatrixXf k = Eigen::MatrixXf::Zero(shape.kv_heads * shape.head_dim, budget + 5);
    auto step = cache.update(k, k);
    for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
    held += cache.bytes().keys + cache.bytes().values;
  }
  CHECK(held == slots * slot);
}

TEST_CASE("Layer budgets refuse what makes no sense, naming it") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { layer_budgets::uniform(0, 1); }), {"uniform", "num_layers", ">= 1", "0"}));
  CHECK(says(message_of([] { layer_budgets::uniform(1, 0); }), {"uniform", "budget", ">= 1", "0"}));
  CHECK(says(message_of([] { layer_budgets::pyramid(1, 64); }), {"pyramid", "num_layers", ">= 2", "1"}));
  CHECK(says(message_of([] { layer_budgets::pyramid(4, 8); }), {"pyramid", "budget", ">= 9", "8"}));
  CHECK(says(message_of([] { layer_budgets::pyramid(4, 64, {.beta = 1}); }), {"pyramid", "beta", "> 1", "1"}));
  CHECK(says(message_of([] { layer_budgets::funnel(4, 100, 64); }), {"funnel", "budget", "64", "100"}));
  CHECK(says(message_of([] { layer_budgets::tile({1, 2}, 5); }), {"tile", "multiple", "2", "5"}));
  CHECK(says(message_of([] { layer_budgets::repeat({}, 5); }), {"repeat", ">= 1", "0"}));
  CHECK(says(message_of([] { layer_budgets::from_share(0, 5); }), {"from_share", "share", "> 0"}));
  CHECK(says(message_of([] { layer_budgets::after_removing(1, 5); }), {"after_removing", "[0, 1)", "1"}));
  CHECK(says(message_of([] { layer_budgets::fit_bytes(10, {1, 1}, {.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 4); }), {"fit_bytes", "bytes", "16", "10"}));
}
