// QFilter against its literal version, by hand, and the paper's claim in small.

#include "reference/q_filter.hpp"

#include "support/beside_literal.hpp"
#include "support/thrown.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/q_filter.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <cmath>
#include <limits>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::QFilter;
using test::Random;
using test::sorted;

}  // namespace

TEST_CASE("QFilter scores and keeps what its literal version does, each kv_head by its own filter") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 40));
  Random random(seed);
  const kvsnip::QFilterOptions o{.num_sinks = random.pick({0, 1, 3}), .recent_window = random.pick({0, 1, 2, 5}), .refill_interval = 1};
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11}), dim = random.pick({1, 3, 8});
  CAPTURE(seed, budget, dim, o.num_sinks, o.recent_window);
  const Eigen::MatrixXf filters = random.matrix(dim, 3);
  test::BesideLiteral<QFilter> both({.query_heads = 6, .kv_heads = 3, .head_dim = dim}, budget, QFilter(filters, o),
                                    {.num_sinks = o.num_sinks, .recent_window = o.recent_window}, [&](const test::Candidates& candidates) {
                                      return reference::q_filter(candidates.keys, filters.col(candidates.kv_head).cast<double>());
                                    });
  both.feed_at_random(random, 120);
}

// The filter of kv_head 0 points east, that of kv_head 1 north; both heads get the same keys.
//   key      (3, 0)  (0, 3)  (-1, 2)  (2, -1)
//   east        3       0       -1        2      the first and the last go
//   north       0       3        2       -1      the second and the third go
TEST_CASE("QFilter by hand: two filters, two choices") {
  KVCache<float, QFilter> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 2}, 2,
                                QFilter(Eigen::MatrixXf::Identity(2, 2), {.num_sinks = 0, .recent_window = 0}));
  Eigen::MatrixXf k(4, 4);
  k << 3, 0, -1, 2,
       0, 3, 2, -1,
       3, 0, -1, 2,
       0, 3, 2, -1;
  auto step = cache.update(k, k);
  step.done(0), step.done(1);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 2});
  CHECK(sorted(cache.positions(1)) == std::vector<Index>{0, 3});
}

TEST_CASE("QFilter keeps what queries that lean one way attend to, as the paper claims") {
  const Index dim = 12, count = 500;
  Random random(7);
  const Eigen::VectorXf lean = random.matrix(dim, 1).normalized();
  const auto query = [&] { return Eigen::MatrixXf(3 * lean + 0.5f * random.matrix(dim, 1)); };
  const kvsnip::Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = dim};
  KVCache<float, QFilter> cache(shape, 50, QFilter(-lean)), full(shape, count, QFilter(-lean));
  Eigen::MatrixXf out(dim, 1);
  for (Index t = 0; t < count; ++t) {
    const Eigen::MatrixXf k = 3 * random.matrix(dim, 1);
    kvsnip::attend(cache.update(k, k), query(), out);
    kvsnip::attend(full.update(k, k), query(), out);
  }
  float mass = 0;  // of twenty later queries' attention, within the tenth that is kept
  for (int i = 0; i < 20; ++i) {
    const Eigen::RowVectorXf weights = (query().transpose() * full.keys(0) / std::sqrt(12.0f)).array().exp();
    for (const Index position : cache.positions(0)) mass += weights(position) / weights.sum() / 20;
  }
  CHECK(mass > 0.7f);
}

TEST_CASE("QFilter compresses the prompt for another policy's decode") {
  const kvsnip::Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 1};
  KVCache<float, kvsnip::Chain<QFilter, kvsnip::StreamingLLM>> cache(
      shape, 3, kvsnip::Chain{QFilter(Eigen::MatrixXf::Ones(1, 1), {.num_sinks = 0, .recent_window = 0}), kvsnip::StreamingLLM{{.num_sinks = 0}}});
  Eigen::MatrixXf k(1, 6);
  k << 5, -3, 4, -1, 6, 0;
  cache.update(k, k).done(0);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 3, 5});
  cache.update(k.col(1), k.col(1)).done(0);
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{3, 5, 6});
}

TEST_CASE("QFilter's scores are finite for filters and keys of any accepted size") {
  const float largest = std::numeric_limits<float>::max();
  KVCache<float, test::RecordScores<QFilter>> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 3}, 2,
                                                    test::RecordScores<QFilter>(QFilter(Eigen::MatrixXf::Constant(3, 1, largest), {.num_sinks = 0, .recent_window = 0})));
  Eigen::MatrixXf k(3, 4);
  k << 1e18f, -1e18f, 1e18f, 0,
       1e18f, -1e18f, -1e18f, 0,
       1e18f, -1e18f, 0, 0;
  cache.update(k, k).done(0);
  CHECK(cache.policy().last_scores(0) == std::vector<float>{-largest, largest, 0, 0});
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 3});
}

TEST_CASE("QFilter refuses filters of a wrong shape, filters that are not finite, and bad options") {
  using test::message_of, test::says;
  const kvsnip::Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 3};
  const auto construct = [&](Index rows, Index cols) { return message_of([&] { KVCache<float, QFilter>(shape, 50, QFilter(Eigen::MatrixXf::Ones(rows, cols))); }); };
  CHECK(construct(3, 2) == "");
  CHECK(says(construct(3, 4), {"QFilter", "head_dim x kv_heads = 3 x 2", "3 x 4"}));
  CHECK(says(construct(2, 2), {"QFilter", "3 x 2", "2 x 2"}));
  CHECK(says(message_of([&] { KVCache<float, QFilter>(shape, 50); }), {"QFilter", "3 x 2", "0 x 0"}));
  Eigen::MatrixXf filters = Eigen::MatrixXf::Ones(3, 2);
  filters(2, 1) = std::numeric_limits<float>::infinity();
  CHECK(says(message_of([&] { QFilter{filters}; }), {"QFilter", "finite", "kv_head 1"}));
  CHECK(says(message_of([] { QFilter(Eigen::MatrixXf::Ones(3, 2), {.refill_interval = -1}); }), {"QFilter", "refill_interval", "-1"}));
}
