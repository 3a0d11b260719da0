// Compactor, and its parts LeverageScore and NonCausalAttention, against their literal versions.

#include "reference/compactor.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/compactor.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <string>
#include <vector>

namespace {

using kvsnip::Compactor;
using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::LeverageScore;
using kvsnip::NonCausalAttention;
using kvsnip::Rope;
using kvsnip::Shape;
using test::Random;

/// A prompt, its keys after RoPE, and the literal version's view of what nothing protects.
struct Prompt {
  Prompt(Random& random, const Shape& s, Index tokens, const Rope& rope) : shape(s), before(random.matrix(s.kv_heads * s.head_dim, tokens)), k(before), v(random.matrix(k.rows(), tokens)), q(random.matrix(s.query_heads * s.head_dim, tokens)) {
    for (Index t = 0; t < tokens; ++t)
      for (Index h = 0; h < s.kv_heads; ++h) rope.rotate({k.col(t).data() + h * s.head_dim, static_cast<std::size_t>(s.head_dim)}, t);
  }
  std::vector<Eigen::MatrixXd> of_heads(const Eigen::MatrixXf& x, Index first, Index last) const {
    std::vector<Eigen::MatrixXd> result;
    for (Index h = 0; h < shape.kv_heads; ++h) result.push_back(x.block(h * shape.head_dim, first, shape.head_dim, x.cols() - first - last).cast<double>());
    return result;
  }
  std::vector<Eigen::MatrixXd> queries(Index first, Index last) const {
    std::vector<Eigen::MatrixXd> result;
    const Index group = shape.group_size(), dim = shape.head_dim;
    for (Index h = 0; h < shape.kv_heads; ++h) {
      result.emplace_back(dim, (q.cols() - first - last) * group);
      for (Index t = first; t < q.cols() - last; ++t)
        for (Index g = 0; g < group; ++g) result.back().col((t - first) * group + g) = q.block((h * group + g) * dim, t, dim, 1).cast<double>();
    }
    return result;
  }
  /// In pieces.
  template <class Cache>
  void feed(Cache& cache, Random& random) const {
    for (Index first = 0; first < k.cols();) {
      const Index count = random.one_in(2) ? k.cols() - first : random.between(1, k.cols() - first);
      Eigen::MatrixXf out(q.rows(), count);
      kvsnip::attend(cache.update(k.middleCols(first, count), v.middleCols(first, count), {.more = first + count < k.cols()}), q.middleCols(first, count), out);
      first += count;
    }
  }

  Shape shape;
  Eigen::MatrixXf before, k, v, q;
};
template <class Cache>
void check_scores(const Cache& cache, const reference::Lists& want, Index first, double tolerance) {
  for (Index h = 0; h < cache.shape().kv_heads; ++h)
    for (Index i = 0; i < want.begin()[h].size(); ++i)
      REQUIRE(test::close(cache.policy().last_scores(h).at(static_cast<std::size_t>(first + i)), want.begin()[h](i), tolerance, tolerance));
}

}  // namespace

TEST_CASE("Compactor and its parts score what their literal versions do, in whatever pieces the prompt comes") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const Shape shape{.query_heads = 4, .kv_heads = random.pick({1, 2, 4}), .head_dim = random.pick({4, 7})};
  const Rope rope = Rope::standard(shape.head_dim, random.one_in(2) ? Rope::Pairing::interleaved : Rope::Pairing::half_split);
  const Index sinks = random.pick({0, 3}), recents = random.pick({0, 4}), budget = sinks + recents + random.between(2, 9), tokens = budget + random.between(1, 60);
  const Index chunk = random.pick({1, 5, 16, 64}), dimension = random.pick({2, 5});
  const double blending = static_cast<double>(random.pick({0, 1, 3})) / 2;
  CAPTURE(seed, shape.kv_heads, shape.head_dim, sinks, recents, budget, tokens, chunk, dimension, blending);
  std::vector<Eigen::MatrixXf> sketch;
  std::vector<Eigen::MatrixXd> sketch_in_double;
  for (Index h = 0; h < shape.kv_heads; ++h) sketch.push_back(random.matrix(shape.head_dim, dimension)), sketch_in_double.push_back(sketch.back().cast<double>());
  const Prompt prompt(random, shape, tokens, rope);

  KVCache<float, test::RecordScores<LeverageScore>> leverage(shape, budget, test::RecordScores(LeverageScore(sketch, {.num_sinks = sinks, .recent_window = recents + 1})), rope);
  KVCache<float, test::RecordScores<NonCausalAttention>> drawn(
      shape, budget, test::RecordScores(NonCausalAttention{{.chunk_size = chunk, .num_sinks = sinks, .recent_window = recents + 1}}));
  KVCache<float, test::RecordScores<Compactor>> both(
      shape, budget, test::RecordScores(Compactor(sketch, {.blending = blending, .chunk_size = chunk, .num_sinks = sinks, .recent_window = recents + 1})), rope);
  prompt.feed(leverage, random), prompt.feed(drawn, random), prompt.feed(both, random);
  const reference::Lists of_leverage = reference::leverage(prompt.of_heads(prompt.before, sinks, recents), sketch_in_double);
  const reference::Lists of_drawn =
      reference::non_causal(prompt.queries(sinks, recents), prompt.of_heads(prompt.k, sinks, recents), prompt.of_heads(prompt.v, sinks, recents), chunk);
  reference::Lists sum;
  for (std::size_t h = 0; h < of_drawn.size(); ++h) sum.push_back(blending * of_leverage[h] + of_drawn[h]);
  check_scores(leverage, of_leverage, sinks, 2e-3);
  check_scores(drawn, of_drawn, sinks, 1e-3);
  check_scores(both, sum, sinks, 4e-3);
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK(both.size(h) == budget);
    const std::vector<Index> held = test::sorted(both.positions(h));
    for (Index i = 0; i < sinks; ++i) CHECK(held.begin()[i] == i);
    for (Index i = 0; i < recents; ++i) CHECK(held.rbegin()[i] == tokens - 1 - i);
  }
}

// Keys in the plane, before RoPE: five along one axis, one along the other, of equal length. The mean lies close to the five.
TEST_CASE("LeverageScore keeps the key that no other resembles") {
  const Rope rope = Rope::standard(2, Rope::Pairing::interleaved);
  Eigen::MatrixXf keys(2, 6);
  keys << 1, 1, 0, 1, 1, 1,
          0, 0, 1, 0, 0, 0;
  for (Index t = 0; t < 6; ++t) rope.rotate({keys.col(t).data(), 2}, t);
  KVCache<float, LeverageScore> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 1, LeverageScore{{.recent_window = 0}}, rope);
  cache.update(keys, keys).done(0);
  CHECK(test::sorted(cache.positions(0)) == std::vector<Index>{2});
}

TEST_CASE("Tokens that came while decoding are worth the mean at the next prompt, and memory is given back between") {
  Random random(5);
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 4};
  const Rope rope = Rope::standard(4, Rope::Pairing::interleaved);
  KVCache<float, test::RecordScores<Compactor>> cache(shape, 30, test::RecordScores(Compactor{{.blending = 0, .chunk_size = 8}}), rope);
  const auto feed = [&](Index tokens) {
    const Eigen::MatrixXf k = random.matrix(4, tokens), q = random.matrix(8, tokens);
    Eigen::MatrixXf out(8, tokens);
    kvsnip::attend(cache.update(k, k), q, out);
  };
  feed(70);
  const Index bytes = cache.policy().bytes();
  CHECK(bytes < 600);
  for (int token = 0; token < 5; ++token) feed(1);
  CHECK(cache.size(0) == 35);
  // A prompt of its own begins only when the cache is empty, for a policy that never evicts while decoding; a chain's second turn is one.
  KVCache<float, kvsnip::Chain<test::RecordScores<Compactor>, kvsnip::StreamingLLM>> chain(
      shape, 30, kvsnip::Chain{test::RecordScores(Compactor{{.blending = 0, .chunk_size = 8}}), kvsnip::StreamingLLM{}}, rope);
  for (const Index tokens : {70, 1, 1, 1, 40}) {
    const Eigen::MatrixXf k = random.matrix(4, tokens), q = random.matrix(8, tokens);
    Eigen::MatrixXf out(8, tokens);
    kvsnip::attend(chain.update(k, k), q, out);
  }
  const std::vector<float>& scores = chain.policy().prompt().last_scores(0);
  REQUIRE(scores.size() == 70);
  CHECK(std::count(scores.begin(), scores.end(), 0.0f) >= 3);
  CHECK(chain.size(0) == 30);
}

TEST_CASE("Compactor and its parts refuse bad options and a cache without the model's Rope, naming them") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { LeverageScore{{.sketch_dimension = 0}}; }), {"LeverageScore", "sketch_dimension", ">= 1", "0"}));
  CHECK(says(message_of([] { LeverageScore{{.num_sinks = -1}}; }), {"LeverageScore", "num_sinks", ">= 0", "-1"}));
  CHECK(says(message_of([] { NonCausalAttention{{.chunk_size = 0}}; }), {"NonCausalAttention", "chunk_size", ">= 1", "0"}));
  CHECK(says(message_of([] { NonCausalAttention{{.recent_window = -2}}; }), {"NonCausalAttention", "recent_window", ">= 0", "-2"}));
  CHECK(says(message_of([] { Compactor{{.blending = std::numeric_limits<double>::infinity()}}; }), {"Compactor", "blending", "finite"}));
  CHECK(says(message_of([] { KVCache<float, Compactor>({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 20); }), {"KVCache", "Rope"}));
  KVCache<float, LeverageScore> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 2}, 2, LeverageScore(std::vector{Eigen::MatrixXf(2, 3)}, {}),
                                      Rope::standard(2, Rope::Pairing::interleaved));
  const Eigen::MatrixXf k = Eigen::MatrixXf::Ones(4, 5);
  auto step = cache.update(k, k);
  step.done(0);
  CHECK(says(message_of([&] { step.done(1); }), {"LeverageScore", "sketch", "kv_head 1"}));
}
