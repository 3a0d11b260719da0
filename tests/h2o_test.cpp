// H2O against its literal version, by hand, and the paper's claim in small.

#include "reference/h2o.hpp"

#include "support/beside_literal_rows.hpp"
#include "support/layer.hpp"
#include "support/thrown.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/detail/row_sums.hpp>
#include <kvsnip/policy/h2o.hpp>

#include <map>
#include <vector>

namespace {

using kvsnip::H2O;
using kvsnip::H2OOptions;
using kvsnip::Index;
using kvsnip::KVCache;
using test::Random;
using test::sorted;
using BesideH2O = test::BesideLiteralRows<H2O, reference::H2O>;

H2OOptions random_options(Random& random) {
  return {.score = random.one_in(2) ? H2O::Score::mean : H2O::Score::sum,
          .history_window = random.pick({0, 0, 1, 2, 7, 16}),
          .decay = random.one_in(3) ? 0.875 : 1,
          .threshold = random.one_in(3),
          .prompt_as_one_row = random.one_in(2),
          .num_sinks = random.pick({0, 1, 3}),
          .recent_window = random.pick({0, 1, 2, 5}),
          .refill_interval = 1};
}
BesideH2O beside_literal(const H2OOptions& o, Random& random, Index budget) {
  const Index kv_heads = random.pick({1, 2, 3});
  return BesideH2O({.query_heads = kv_heads * random.pick({1, 2, 4}), .kv_heads = kv_heads, .head_dim = 2}, budget, H2O{o},
                   {.num_sinks = o.num_sinks, .recent_window = o.recent_window},
                   reference::H2O({.mean = o.score == H2O::Score::mean,
                                   .history_window = o.history_window,
                                   .decay = o.decay,
                                   .threshold = o.threshold,
                                   .prompt_as_one_row = o.prompt_as_one_row}));
}

}  // namespace

TEST_CASE("H2O scores and keeps what its literal version does, whatever the options") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 120));
  Random random(seed);
  const H2OOptions o = random_options(random);
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11, 19});
  CAPTURE(seed, budget, static_cast<int>(o.score), o.history_window, o.decay, o.threshold, o.prompt_as_one_row, o.num_sinks, o.recent_window);
  BesideH2O both = beside_literal(o, random, budget);
  both.feed_prompt(random, random.between(1, 2 * budget + 5));
  for (int turn = 0; turn < 3; ++turn) {
    for (int step = 0; step < 25; ++step) both.feed(random, random.pick({1, 1, 1, 1, 1, 2, 3}), false, random.one_in(9) ? random.below(4) : 0);
    both.feed_prompt(random, budget + random.below(20));
  }
}
