// KeyNorm against its literal version, by hand, and the paper's claim in small.

#include "reference/key_norm.hpp"

#include "support/beside_literal.hpp"
#include "support/thrown.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/policy/key_norm.hpp>

#include <cmath>

namespace {

using kvsnip::Index;
using kvsnip::KeyNorm;
using kvsnip::KVCache;
using test::Random;
using test::sorted;

std::vector<double> literal(const test::Candidates& candidates) { return reference::key_norm(candidates.keys); }

/// One token whose key has this length.
template <class T, class P>
void append(KVCache<T, P>& cache, float length) {
  const Eigen::MatrixXf key = Eigen::MatrixXf::Constant(1, 1, length);
  cache.update(key, key).done(0);
}

}  // namespace

TEST_CASE("KeyNorm scores and keeps what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 40));
  Random random(seed);
  const kvsnip::KeyNormOptions o{.num_sinks = random.pick({0, 1, 3}), .recent_window = random.pick({0, 1, 2, 5}), .refill_interval = 1};
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11});
  CAPTURE(seed, budget, o.num_sinks, o.recent_window);
  test::BesideLiteral<KeyNorm> both({.query_heads = 4, .kv_heads = 2, .head_dim = random.pick({1, 3, 8})}, budget, KeyNorm{o},
                                    {.num_sinks = o.num_sinks, .recent_window = o.recent_window}, literal, 1e-6);
  both.feed_at_random(random, 120);
}

// One sink, the newest is safe, budget 4.
//   position  0  1  2  3  4  5  6
//   norm      9  1  5  2  3  7  1
TEST_CASE("KeyNorm by hand: the largest key that may go goes") {
  KVCache<float, KeyNorm> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 4,
                                KeyNorm{{.num_sinks = 1, .recent_window = 1, .refill_interval = 1}});
  const auto slots = [&] { return std::vector<Index>(cache.positions(0).begin(), cache.positions(0).end()); };
  for (const float norm : {9.0f, 1.0f, 5.0f, -2.0f}) append(cache, norm);
  append(cache, 3.0f);
  CHECK(slots() == std::vector<Index>{0, 1, 4, 3});
  append(cache, -7.0f);
  CHECK(slots() == std::vector<Index>{0, 1, 5, 3});  // a key's sign is nothing to its norm
  append(cache, 1.0f);
  CHECK(slots() == std::vector<Index>{0, 1, 6, 3});
}

TEST_CASE("KeyNorm keeps the tokens that attention is on when small keys get it, as the paper claims") {
  // Queries point away from the large keys, as they do in trained models: what is small gets the attention.
  const kvsnip::Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 8};
  Random random(5);
  KVCache<float, KeyNorm> cache(shape, 40, KeyNorm{{.recent_window = 1}});
  KVCache<float, KeyNorm> full(shape, 400, KeyNorm{});
  const Eigen::VectorXf direction = random.matrix(8, 1).normalized();
  float mass = 0;
  for (Index t = 0; t < 400; ++t) {
    const float length = random.one_in(20) ? 0.5f : 6.0f + random.uniform();
    const Eigen::MatrixXf k = length * (direction + 0.2f * random.matrix(8, 1)), q = -4.0f * direction;
    Eigen::MatrixXf out(8, 1);
    kvsnip::attend(cache.update(k, k), q, out);
    kvsnip::attend(full.update(k, k), q, out);
  }
  const Eigen::MatrixXf q = -4.0f * direction;
  const Eigen::RowVectorXf weights = (q.transpose() * full.keys(0) / std::sqrt(8.0f)).array().exp();
  for (const Index position : cache.positions(0)) mass += weights(position) / weights.sum();
  CHECK(mass > 0.9f);  // a tenth of the tokens
}

TEST_CASE("KeyNorm ranks keys whose squares float32 cannot hold, or not tell from 0") {
  for (const float unit : {1e17f, 1e-30f}) {
    KVCache<float, KeyNorm> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1000}, 3,
                                  KeyNorm{{.num_sinks = 0, .recent_window = 1, .refill_interval = 1}});
    for (const float length : {5.0f, 9.0f, 4.0f, 8.0f, 6.0f}) {
      const Eigen::MatrixXf key = Eigen::MatrixXf::Constant(1000, 1, length * unit);
      cache.update(key, key).done(0);
    }
    CAPTURE(unit);
    CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 2, 4});
  }
}

TEST_CASE("KeyNorm's norms follow their slots through compactions and several tokens at once") {
  KVCache<Eigen::half, KeyNorm> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 6, KeyNorm{{.num_sinks = 0, .recent_window = 2}});
  Random random(6);
  std::vector<float> norms;
  for (const Index count : {20, 1, 1, 1, 3, 1, 30, 1, 2, 1, 1}) {
    const Eigen::MatrixXf k = random.matrix(1, count);
    for (Index t = 0; t < count; ++t) norms.push_back(std::abs(k(0, t)));
    cache.update(k, k).done(0);
  }
  Index slot = 0;
  std::vector<float> scores(6);
  KeyNorm policy = cache.policy();
  kvsnip::SlotsView slots;
  slots.positions = cache.positions(0);
  slots.set_vectors(cache.keys(0).data(), cache.values(0).data(), 1, &kvsnip::detail::read_column<Eigen::half>);
  policy.score(0, slots, scores);
  for (const Index position : cache.positions(0)) CHECK(test::close(scores.begin()[slot++], -norms.begin()[position], 1e-3, 0));
}

TEST_CASE("KeyNorm refuses bad options, naming them, and a planner without keys") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { KeyNorm{{.num_sinks = -1}}; }), {"KeyNorm", "num_sinks", ">= 0", "-1"}));
  CHECK(says(message_of([] { KeyNorm{{.recent_window = -2}}; }), {"KeyNorm", "recent_window", ">= 0", "-2"}));
  CHECK(says(message_of([] { KeyNorm{{.refill_interval = -3}}; }), {"KeyNorm", "refill_interval", ">= 0", "-3"}));
  kvsnip::SlotPlanner<KeyNorm> planner({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 20);
  planner.plan(20), planner.done(0), planner.finish();
  CHECK(says(message_of([&] { planner.plan(1); }), {"KeyNorm", "set_vectors"}));
}

TEST_CASE("KeyNorm chooses a 32nd of the budget at once, unless told otherwise") {
  CHECK(KeyNorm{}.eviction(16).count == 1);
  CHECK(KeyNorm{}.eviction(256).count == 8);
  CHECK(KeyNorm{}.eviction(1 << 20).count == 128);
  CHECK(KeyNorm{{.refill_interval = 5}}.eviction(256).count == 5);
}
