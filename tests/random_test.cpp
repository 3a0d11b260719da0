// Random against its literal version, and as a sample: uniform, independent of age, another one for every seed and head.

#include "reference/random.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/random.hpp>

#include <cmath>
#include <numeric>
#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using test::sorted;

/// The policy looks at positions alone.
void append(KVCache<float, kvsnip::Random>& cache, Index num_tokens) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(cache.shape().kv_heads * cache.shape().head_dim, num_tokens);
  auto step = cache.update(zeros, zeros);
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
}
/// The number of each of the positions 0, 1, ...
std::vector<float> numbers(const kvsnip::Random& policy, Index kv_head, Index count) {
  std::vector<Index> positions(static_cast<std::size_t>(count));
  std::iota(positions.begin(), positions.end(), Index{0});
  kvsnip::SlotsView slots;
  slots.positions = positions;
  std::vector<float> out(positions.size());
  policy.score(kv_head, slots, out);
  return out;
}
/// Chi-square of counts that should be equal, less its mean, in units of its deviation.
double surprise(const std::vector<Index>& counts) {
  const double freedom = static_cast<double>(counts.size()) - 1;
  const double mean = static_cast<double>(std::accumulate(counts.begin(), counts.end(), Index{0})) / (freedom + 1);
  double sum = 0;
  for (const Index count : counts) sum += std::pow(static_cast<double>(count) - mean, 2) / mean;
  return (sum - freedom) / std::sqrt(2 * freedom);
}

}  // namespace

TEST_CASE("Random holds the sample that its literal version draws, however the tokens come") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 40));
  test::Random random(seed);
  const kvsnip::RandomOptions o{.seed = random.between(-5, 5), .num_sinks = random.pick({0, 1, 3}), .recent_window = random.pick({1, 2, 5}), .refill_interval = 1};
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11});
  const kvsnip::Random policy{o};
  KVCache<float, kvsnip::Random> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, budget, policy);
  // In tokens by themselves: an update of several spares them all, and a compaction one recent less.
  append(cache, random.between(1, budget));
  while (cache.tokens_seen() < 150) {
    append(cache, 1);
    CAPTURE(seed, budget, cache.tokens_seen());
    for (Index h = 0; h < 2; ++h)
      REQUIRE(sorted(cache.positions(h)) == reference::random_sample(numbers(policy, h, cache.tokens_seen()), budget, o.num_sinks, o.recent_window));
  }
  KVCache<float, kvsnip::Random> prompt(cache.shape(), budget, policy);
  append(prompt, 150);
  for (Index h = 0; h < 2; ++h)
    CHECK(sorted(prompt.positions(h)) == reference::random_sample(numbers(policy, h, 150), budget, o.num_sinks, o.recent_window - 1));
}

// Numbers of seed 1, kv_head 0, as 24-bit integers, computed apart from this library by the finaliser's published formula.
TEST_CASE("Random by hand: the numbers are the same on every machine") {
  const std::vector<float> got = numbers(kvsnip::Random{{.seed = 1}}, 0, 4);
  const std::vector<float> want{11635202.0f, 7100309.0f, 1394336.0f, 709940.0f};
  for (std::size_t i = 0; i < want.size(); ++i) CHECK(got[i] * 0x1p24f == want[i]);
}

TEST_CASE("Random holds old tokens as often as new ones") {
  const Index seen = 400, seeds = 600, bins = 20;
  std::vector<Index> held_by_age(static_cast<std::size_t>(bins));
  for (Index seed = 0; seed < seeds; ++seed) {
    KVCache<float, kvsnip::Random> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 40, kvsnip::Random{{.seed = seed, .refill_interval = 1}});
    append(cache, 30);
    while (cache.tokens_seen() <= seen) append(cache, 1);
    for (const Index position : cache.positions(0))
      if (position < seen) ++held_by_age.begin()[position * bins / seen];  // the newest is always held
  }
  CHECK(std::abs(surprise(held_by_age)) < 4);
}

TEST_CASE("Random's numbers are uniform, and independent between seeds and kv_heads") {
  const Index count = 100000;
  const std::vector<float> a = numbers(kvsnip::Random{}, 0, count);
  for (const auto& b : {numbers(kvsnip::Random{}, 1, count), numbers(kvsnip::Random{{.seed = 1}}, 0, count), numbers(kvsnip::Random{{.seed = -1}}, 7, count)}) {
    std::vector<Index> counts(100);  // of pairs (a, b) in a 10 x 10 grid
    for (std::size_t i = 0; i < a.size(); ++i) ++counts[static_cast<std::size_t>(a[i] * 10) * 10 + static_cast<std::size_t>(b[i] * 10)];
    CHECK(std::abs(surprise(counts)) < 4);
  }
  std::vector<Index> counts(100);  // of neighbours
  for (std::size_t i = 1; i < a.size(); ++i) ++counts[static_cast<std::size_t>(a[i - 1] * 10) * 10 + static_cast<std::size_t>(a[i] * 10)];
  CHECK(std::abs(surprise(counts)) < 4);
}

TEST_CASE("Random refuses bad options, naming them") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { kvsnip::Random{{.num_sinks = -1}}; }), {"Random", "num_sinks", ">= 0", "-1"}));
  CHECK(says(message_of([] { kvsnip::Random{{.recent_window = -2}}; }), {"Random", "recent_window", ">= 0", "-2"}));
}
