// KeyDiff against its literal version, by hand, and the paper's claim in small.

#include "reference/key_diff.hpp"

#include "support/beside_literal.hpp"
#include "support/thrown.hpp"

#include <kvsnip/policy/key_diff.hpp>

#include <cmath>

namespace {

using kvsnip::Index;
using kvsnip::KeyDiff;
using kvsnip::KVCache;
using test::Random;
using test::sorted;

std::vector<double> literal(const test::Candidates& candidates) { return reference::key_diff(candidates.keys); }

}  // namespace

TEST_CASE("KeyDiff scores and keeps what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 40));
  Random random(seed);
  const kvsnip::KeyDiffOptions o{.num_sinks = random.pick({0, 1, 3}), .recent_window = random.pick({0, 1, 2, 5}), .refill_interval = 1};
  const Index budget = o.num_sinks + o.recent_window + random.pick({1, 2, 11});
  CAPTURE(seed, budget, o.num_sinks, o.recent_window);
  test::BesideLiteral<KeyDiff> both({.query_heads = 4, .kv_heads = 2, .head_dim = random.pick({2, 3, 8})}, budget, KeyDiff{o},
                                    {.num_sinks = o.num_sinks, .recent_window = o.recent_window}, literal, 2e-5);
  both.feed_at_random(random, 120);
}

// Unit keys in the plane: three east, one north, one west, of which the lengths do not matter.
//   the mean points to (3 - 1, 1) / 5; cosines: east 2/sqrt(5), north 1/sqrt(5), west -2/sqrt(5)
TEST_CASE("KeyDiff by hand: of a prompt of five the two most distinctive stay") {
  KVCache<float, test::RecordScores<KeyDiff>> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 2,
                                                    test::RecordScores<KeyDiff>(KeyDiff{{.recent_window = 0}}));
  Eigen::MatrixXf k(2, 5);
  k << 1, 0, 7, -2, 3,
       0, 4, 0, 0, 0;
  cache.update(k, k).done(0);
  const std::vector<float> scores = cache.policy().last_scores(0);
  const double fifth = std::sqrt(0.2);
  for (const auto& [slot, cosine] : {std::pair{0, 2 * fifth}, {1, fifth}, {2, 2 * fifth}, {3, -2 * fifth}, {4, 2 * fifth}})
    CHECK(test::close(scores.begin()[slot], -cosine, 1e-6, 0));
  CHECK(sorted(cache.positions(0)) == std::vector<Index>{1, 3});
}

TEST_CASE("KeyDiff leaves keys that are less alike than recent ones or random ones are, as the paper claims") {
  Random random(3);
  const Index dim = 16, count = 600, budget = 60;
  // Most keys lie around a few directions; some lie anywhere.
  const Eigen::MatrixXf centres = random.matrix(dim, 3).array() + 1.0f;
  Eigen::MatrixXf k(dim, count);
  for (Index t = 0; t < count; ++t) k.col(t) = random.one_in(12) ? Eigen::MatrixXf(2 * random.matrix(dim, 1)) : Eigen::MatrixXf(centres.col(random.below(3)) + 0.3f * random.matrix(dim, 1));
  const auto likeness = [&](const std::vector<Index>& positions) {  // mean cosine of pairs
    Eigen::VectorXf sum = Eigen::VectorXf::Zero(dim);
    for (const Index position : positions) sum += k.col(position).normalized();
    const auto n = static_cast<float>(positions.size());
    return (sum.squaredNorm() - n) / (n * (n - 1));
  };
  KVCache<float, KeyDiff> at_once({.query_heads = 1, .kv_heads = 1, .head_dim = dim}, budget, KeyDiff{}), by_token = at_once;
  at_once.update(k, k).done(0);
  for (Index t = 0; t < count; ++t) by_token.update(k.col(t), k.col(t)).done(0);
  std::vector<Index> any;
  for (Index i = 0; i < budget; ++i) any.push_back(random.below(count));
  const float others = std::min(likeness(any), likeness(test::consecutive(count - budget, count)));
  for (const auto* cache : {&at_once, &by_token}) CHECK(likeness(sorted(cache->positions(0))) < 0.5f * others);
}

TEST_CASE("KeyDiff's scores are finite and right for keys of any accepted size") {
  const Index dim = 600;
  Random random(4);
  Eigen::MatrixXf k = random.matrix(dim, 8).cwiseMax(-1.0f).cwiseMin(1.0f);
  const std::vector<double> want = reference::key_diff(k.cast<double>());
  Index t = 0;
  for (const float size : {1e18f, 1e-9f, 1.0f, 1e17f, 1e10f, 1e-8f, 1e9f, 3e17f}) k.col(t++) *= size;
  k.conservativeResize(Eigen::NoChange, 9), k.col(8).setZero();
  KVCache<float, test::RecordScores<KeyDiff>> cache({.query_heads = 1, .kv_heads = 1, .head_dim = dim}, 5,
                                                    test::RecordScores<KeyDiff>(KeyDiff{{.recent_window = 1}}));
  cache.update(k, k).done(0);
  for (std::size_t i = 0; i < want.size(); ++i) CHECK(test::close(cache.policy().last_scores(0)[i], want[i], 1e-4, 1e-5));
  CHECK(cache.policy().last_scores(0)[8] == 0.0f);
}

TEST_CASE("KeyDiff refuses bad options, naming them, and a planner without keys") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { KeyDiff{{.num_sinks = -1}}; }), {"KeyDiff", "num_sinks", ">= 0", "-1"}));
  kvsnip::SlotPlanner<KeyDiff> planner({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 20);
  planner.plan(20), planner.done(0), planner.finish();
  CHECK(says(message_of([&] { planner.plan(1); }), {"KeyDiff", "set_vectors"}));
}
