// ExpectedAttention against its literal version, and the paper's claim in small; rerotate.

#include "reference/expected_attention.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/expected_attention.hpp>

#include <vector>

namespace {

using kvsnip::ExpectedAttention;
using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Rope;
using test::Random;

}  // namespace

TEST_CASE("ExpectedAttention scores what its literal version does, in whatever pieces the prompt comes") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const Index heads = random.pick({1, 2}), group = random.pick({1, 3}), dim = random.pick({4, 7}), sinks = random.pick({0, 3}), recents = random.pick({0, 1, 4});
  const Index budget = sinks + recents + random.between(2, 12), tokens = budget + random.between(4, 300);
  const bool interleaved = random.one_in(2);
  const reference::ExpectedAttentionOptions o{.num_future_positions = random.pick({1, 40}), .num_sinks = sinks, .use_covariance = random.one_in(2), .use_value_norm = random.one_in(2),
                                              .epsilon = random.one_in(2) ? 0.0 : 0.015625};
  CAPTURE(seed, heads, group, dim, sinks, recents, budget, tokens, interleaved, o.num_future_positions, o.use_covariance, o.use_value_norm, o.epsilon);
  const Rope rope = Rope::standard(dim, interleaved ? Rope::Pairing::interleaved : Rope::Pairing::half_split, 50);
  const Eigen::MatrixXf k = random.matrix(heads * dim, tokens), v = random.matrix(heads * dim, tokens), before = random.matrix(heads * group * dim, tokens).array() + 0.3f;
  Eigen::MatrixXf q = before;
  for (Index t = 0; t < tokens; ++t)
    for (Index h = 0; h < heads * group; ++h) rope.rotate(q.block(h * dim, t, dim, 1), t);
  KVCache<float, test::RecordScores<ExpectedAttention>> cache({.query_heads = heads * group, .kv_heads = heads, .head_dim = dim}, budget,
                                                              test::RecordScores(ExpectedAttention{{.num_future_positions = o.num_future_positions,
                                                                                                    .use_covariance = o.use_covariance,
                                                                                                    .use_value_norm = o.use_value_norm,
                                                                                                    .epsilon = static_cast<float>(o.epsilon),
                                                                                                    .num_sinks = sinks,
                                                                                                    .recent_window = recents}}),
                                                              rope);
  for (Index first = 0; first < tokens;) {
    const Index count = random.one_in(2) ? tokens - first : random.between(1, tokens - first);
    Eigen::MatrixXf out(q.rows(), count);
    kvsnip::attend(cache.update(k.middleCols(first, count), v.middleCols(first, count), {.more = first + count < tokens}), q.middleCols(first, count), out);
    first += count;
  }
  for (Index h = 0; h < heads; ++h) {
    std::vector<Eigen::MatrixXd> queries;
    for (Index g = 0; g < group; ++g) queries.push_back(before.middleRows((h * group + g) * dim, dim).cast<double>());
    const Eigen::VectorXd want = reference::expected_attention(queries, k.middleRows(h * dim, dim).cast<double>(), v.middleRows(h * dim, dim).cast<double>(), rope.inv_freq, interleaved, o);
    for (Index i = 0; i < want.size(); ++i) REQUIRE(test::close(cache.policy().last_scores(h)[static_cast<std::size_t>(sinks + i)], want(i), 1e-3, 1e-6));
    CHECK(cache.size(h) == budget);
  }
  CHECK(cache.policy().bytes() < 300);  // nothing is left of the prompt
}

TEST_CASE("ExpectedAttention keeps the keys that later queries attend to better than chance does, as the paper claims") {
  Random random(2);
  const Index dim = 16, tokens = 400, budget = 40, later = 50;
  const Rope rope = Rope::standard(dim, Rope::Pairing::half_split);
  const Eigen::VectorXf liking = 3 * random.matrix(dim, 1);
  const auto queries_from = [&](Index first, Index count) {
    Eigen::MatrixXf q = random.matrix(dim, count).colwise() + liking;
    for (Index t = 0; t < count; ++t) rope.rotate(q.col(t), first + t);
    return q;
  };
  Eigen::MatrixXf k = random.matrix(dim, tokens);
  for (Index t = 0; t < tokens; ++t) rope.rotate(k.col(t), t);
  KVCache<float, ExpectedAttention> cache({.query_heads = 1, .kv_heads = 1, .head_dim = dim}, budget, ExpectedAttention{{.num_future_positions = later}}, rope);
  Eigen::MatrixXf out(dim, tokens);
  kvsnip::attend(cache.update(k, k), queries_from(0, tokens), out);
  Eigen::ArrayXXf weights = (k.transpose() * queries_from(tokens, later)).array() / 4;
  weights = (weights.rowwise() - weights.colwise().maxCoeff().eval()).exp().eval();
  weights = weights.rowwise() / weights.colwise().sum().eval();
  float kept = 0;
  for (const Index position : cache.positions(0)) kept += weights.row(position).mean();
  CHECK(kept > 4.0f * static_cast<float>(budget) / static_cast<float>(tokens));
}

TEST_CASE("ExpectedAttention refuses bad options and a cache without the model's Rope, naming them") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { ExpectedAttention{{.num_future_positions = 0}}; }), {"ExpectedAttention", "num_future_positions", ">= 1", "0"}));
  CHECK(says(message_of([] { ExpectedAttention{{.epsilon = -1}}; }), {"ExpectedAttention", "epsilon", ">= 0", "-1"}));
  CHECK(says(message_of([] { ExpectedAttention{{.num_sinks = -1}}; }), {"ExpectedAttention", "num_sinks", ">= 0", "-1"}));
  CHECK(says(message_of([] { KVCache<float, ExpectedAttention>({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 20); }), {"KVCache", "Rope"}));
}

TEST_CASE("Rerotated keys give queries at the new distances what they gave at the old") {
  const auto pairing = GENERATE(Rope::Pairing::interleaved, Rope::Pairing::half_split);
  Random random(3);
  const Rope rope = Rope::standard(6, pairing, 100);
  const Eigen::MatrixXf before = random.matrix(7, 4);  // the seventh is in no pair
  const std::vector<Index> positions{0, 3, 4, 90};
  Eigen::MatrixXf keys = before;
  for (Index slot = 0; slot < 4; ++slot) rope.rotate(keys.col(slot), positions.begin()[slot]);
  kvsnip::rerotate(keys, positions, rope);
  for (Index slot = 0; slot < 4; ++slot) {
    Eigen::MatrixXf expected = before.col(slot);
    rope.rotate(expected, slot);
    CHECK(test::largest_difference(keys.col(slot).eval(), expected) < 1e-5);
  }
  CHECK(test::says(test::message_of([&] { kvsnip::rerotate(keys, {positions.data(), 3}, rope); }), {"rerotate", "keys", "3", "4"}));
  CHECK(test::says(test::message_of([&] { kvsnip::rerotate(keys, positions, Rope::standard(20, pairing)); }), {"rerotate", "rope.inv_freq", "3", "10"}));
}
