// ChunkKV against its literal version, by hand, and around policies that score a layer at once.

#include "reference/chunk_kv.hpp"
#include "reference/eviction.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/chunk_kv.hpp>
#include <kvsnip/policy/external_scores.hpp>

#include <vector>

namespace {

using kvsnip::ChunkKV;
using kvsnip::ExternalScores;
using kvsnip::Index;
using Chunks = ChunkKV<ExternalScores>;
using Cache = kvsnip::KVCache<float, test::RecordScores<Chunks>>;

Cache make(const Eigen::MatrixXf& scores, Index budget, Index chunk_length, Index recents) {
  return Cache({.query_heads = scores.cols(), .kv_heads = scores.cols(), .head_dim = 1}, budget,
               test::RecordScores<Chunks>(Chunks(ExternalScores(scores, {.recent_window = recents}), {.chunk_length = chunk_length})));
}
void feed(Cache& cache, Index tokens, Index first_position = -1) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(cache.shape().kv_heads, tokens);
  auto step = cache.update(zeros, zeros, {.first_position = first_position});
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
}

}  // namespace

TEST_CASE("ChunkKV scores and keeps what its literal version does, a second prompt and gaps included") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 100));
  test::Random random(seed);
  const Index heads = random.pick({1, 2, 5}), length = random.pick({1, 2, 7, 10, 64}), budget = random.between(3, 30), recents = random.pick({1, 3});
  const Eigen::MatrixXf scores = random.matrix(200, heads);
  CAPTURE(seed, heads, length, budget, recents);
  Cache cache = make(scores, budget, length, recents);
  std::vector<std::vector<Index>> held(static_cast<std::size_t>(heads));
  Index first = random.between(0, 20);
  for (int prompt = 0; prompt < 2; ++prompt) {
    const Index tokens = budget + random.between(1, 40);
    std::vector<std::vector<double>> given(held.size());
    for (std::size_t h = 0; h < held.size(); ++h) {
      for (Index t = 0; t < tokens; ++t) held[h].push_back(first + t);
      for (const Index position : held[h]) given[h].push_back(static_cast<double>(scores(position, static_cast<Index>(h))));
    }
    feed(cache, tokens, first);
    const auto expected = reference::chunk_kv(given, held, length);
    for (std::size_t h = 0; h < held.size(); ++h) {
      const std::vector<float>& got = cache.policy().last_scores(static_cast<Index>(h));
      REQUIRE(got.size() == expected[h].size());
      for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(test::close(got[i], expected[h][i], 1e-6, 1e-6));
      const std::vector<double> as_scored(got.begin(), got.end());  // so that ties are ties
      held[h] = reference::keep_best(held[h], as_scored, budget, 0, recents - 1);
      CHECK(test::sorted(cache.positions(static_cast<Index>(h))) == held[h]);
    }
    first += tokens + random.between(0, 9);
  }
}

// Chunks of three; two heads that disagree; a budget of five.
//   position   0 1 2 | 3 4 5 | 6 7 8
//   head 0     9 0 0 | 1 1 1 | 0 0 0        sums  9 + 0 = 9 of six: kept whole
//   head 1     0 0 0 | 1 1 1 | 2 2 0              3 + 3 = 6: cut, the newer two stay
//                                                 0 + 4 = 4: goes
TEST_CASE("ChunkKV by hand: what all heads make of a chunk decides, and the last one is cut to fill the budget") {
  Eigen::MatrixXf scores(9, 2);
  scores << 9, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 0, 2, 0, 0;
  Cache cache = make(scores, 5, 3, 0);
  feed(cache, 9);
  for (Index h = 0; h < 2; ++h) CHECK(test::sorted(cache.positions(h)) == std::vector<Index>{0, 1, 2, 4, 5});
}

TEST_CASE("ChunkKV leaves decoding to the policy inside, and decorates itself") {
  Eigen::MatrixXf scores(8, 1);
  scores << 0, 5, 0, 5, 0, 5, 0, 5;
  kvsnip::KVCache<float, ChunkKV<Chunks>> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 4,
                                                ChunkKV<Chunks>(Chunks(ExternalScores(scores, {.refill_interval = 1}), {.chunk_length = 2}), {.chunk_length = 4}));
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(1, 1);
  for (int token = 0; token < 7; ++token) cache.update(zero, zero).done(0);
  CHECK(test::sorted(cache.positions(0)) == std::vector<Index>{1, 3, 5, 6});  // by the scores themselves
}

TEST_CASE("ChunkKV refuses a chunk of nothing, naming the option") {
  CHECK(test::says(test::message_of([] { Chunks(ExternalScores(Eigen::MatrixXf(1, 1)), {.chunk_length = 0}); }), {"ChunkKV", "chunk_length", ">= 1", "0"}));
}
