// KeepItOdd against its literal version, and by hand.

#include "reference/keep_it_odd.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/keep_it_odd.hpp>

#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::KeepItOdd;
using test::sorted;

using Cache = kvsnip::KVCache<float, KeepItOdd>;

void append(Cache& cache, Index num_tokens) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(1, num_tokens);
  cache.update(zeros, zeros).done(0);
}
Cache make(Index budget, const kvsnip::KeepItOddOptions& options) { return Cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, budget, KeepItOdd{options}); }

}  // namespace

TEST_CASE("KeepItOdd holds what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 40));
  test::Random random(seed);
  const kvsnip::KeepItOddOptions o{.num_sinks = random.pick({0, 1, 3}), .recent_window = random.pick({1, 2, 6}), .refill_interval = 1};
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11});
  Cache cache = make(budget, o);
  std::vector<Index> held;
  for (Index position = 0; position < 80; ++position) {
    append(cache, 1);
    reference::keep_it_odd(held, position, budget, o.num_sinks, o.recent_window);
    CAPTURE(seed, budget, position);
    REQUIRE(sorted(cache.positions(0)) == held);
  }
}

TEST_CASE("KeepItOdd by hand: a prompt of ten, budget five, one sink") {
  Cache cache = make(5, {.num_sinks = 1, .recent_window = 2});
  append(cache, 10);  // 0 is the sink, 9 one of the two newest once the next token comes
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 3, 5, 7, 9});
  append(cache, 1);  // no even one may go: the oldest odd one does
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 5, 7, 9, 10});
  append(cache, 1);  // 10 is one of the two newest
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 7, 9, 10, 11});
  append(cache, 1);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 7, 9, 11, 12});
}

TEST_CASE("KeepItOdd refuses bad options, naming them") {
  CHECK(test::says(test::message_of([] { KeepItOdd{{.num_sinks = -1}}; }), {"KeepItOdd", "num_sinks", ">= 0", "-1"}));
}
