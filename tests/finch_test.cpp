// Finch against its literal version, by hand, and the paper's claim in small.

#include "reference/finch.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/prompt_rows.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/finch.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <vector>

namespace {

using kvsnip::Finch;
using kvsnip::Index;
using kvsnip::KVCache;
using test::causal_weights;
using test::feed;
using test::Random;
using test::sorted;

using Cache = KVCache<float, test::RecordScores<Finch>>;

Cache make(const kvsnip::Shape& shape, const reference::FinchOptions& o) {
  return Cache(shape, o.budget, test::RecordScores<Finch>(Finch{{.observation_window = o.observation_window, .normalize = o.normalize, .num_sinks = o.num_sinks}}));
}

reference::FinchOptions random_options(Random& random) {
  reference::FinchOptions o;
  o.observation_window = random.pick({1, 2, 7, 16});
  o.num_sinks = random.pick({0, 0, 1, 4});
  o.budget = o.observation_window + o.num_sinks + random.pick({1, 2, 3, 17});
  o.normalize = random.one_in(2);
  return o;
}

}  // namespace

TEST_CASE("Finch scores and keeps what its literal version does, also when the prompt comes in pieces") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 100));
  Random random(seed);
  const reference::FinchOptions o = random_options(random);
  const Index group = random.pick({1, 2, 4, 8}), prompt = o.budget + random.pick({1, 2, 13, 40});
  CAPTURE(seed, o.budget, o.observation_window, o.normalize, o.num_sinks, group, prompt);
  const std::vector<Eigen::MatrixXf> weights{causal_weights(random, prompt, group), causal_weights(random, prompt, group)};
  Cache whole = make({.query_heads = 2 * group, .kv_heads = 2, .head_dim = 1}, o), pieces = whole;
  feed(whole, weights, prompt, false);
  for (Index left = prompt; left > 0;) {
    const Index piece = random.between(1, std::min<Index>(left, 20));
    left -= piece;
    feed(pieces, weights, piece, left > 0);
  }
  Index h = 0;
  for (const Eigen::MatrixXf& w : weights) {
    const reference::FinchResult expected = reference::finch(test::rows_per_query_head(w, o.observation_window, group), o);
    CAPTURE(h);
    for (const Cache* cache : {&whole, &pieces}) {
      REQUIRE(cache->policy().last_scores(h).size() == expected.scores.size());
      for (std::size_t i = 0; i < expected.scores.size(); ++i) REQUIRE(test::close(cache->policy().last_scores(h)[i], expected.scores[i], 1e-6, 1e-7));
      CHECK(std::vector<Index>(cache->positions(h).begin(), cache->positions(h).end()) == expected.kept);
    }
    ++h;
  }
}

// A question of two, budget four of six positions; weights in eighths.
//   position        0  1  2  3 | 4  5
//   query 4         3  1  0  0 | 4          sees 4 others
//   query 5         0  1  0  3 | 2  2       sees 5
//   normalised      12 9  0 15 |            keeps 0 and 3: each once looked at hard
//   not             3  2  0  3 |
TEST_CASE("Finch by hand: later rows see more, and count for more") {
  Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(6, 6);
  weights.col(4) << 3, 1, 0, 0, 4, 0;
  weights.col(5) << 0, 1, 0, 3, 2, 2;
  const auto scores = [&](bool normalize) {
    Cache cache = make({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, {.budget = 4, .observation_window = 2, .normalize = normalize});
    feed(cache, {weights / 8}, 6, false);
    CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 3, 4, 5});
    const std::vector<float>& all = cache.policy().last_scores(0);
    return std::vector<float>(all.begin(), all.begin() + 4);
  };
  CHECK(scores(true) == std::vector<float>{12 / 16.0f, 9 / 16.0f, 0, 15 / 16.0f});
  CHECK(scores(false) == std::vector<float>{3 / 16.0f, 2 / 16.0f, 0, 3 / 16.0f});
}

TEST_CASE("Finch keeps the answer that the question looks at, as the paper claims") {
  const Index dim = 16, prompt = 400, answer = 123, length = 6, question = 10;
  Random random(12);
  Eigen::MatrixXf k = random.matrix(dim, prompt), q = random.matrix(dim, prompt);
  for (Index t = answer; t < answer + length; ++t)  // what any of the question's queries is after
    for (Index j = prompt - question; j < prompt; ++j) k.col(t) += 0.6f * q.col(j);
  KVCache<float, Finch> cache({.query_heads = 1, .kv_heads = 1, .head_dim = dim}, 40, Finch{{.observation_window = question}});
  Eigen::MatrixXf out(dim, prompt);
  kvsnip::attend(cache.update(k, k), q, out);
  const std::vector<Index> held = sorted(cache.positions(0)), expected = test::consecutive(answer, answer + length);
  CHECK(std::includes(held.begin(), held.end(), expected.begin(), expected.end()));
}

TEST_CASE("Finch alone lets the cache grow while decoding, a chain bounds it, and rows of an earlier prompt are forgotten") {
  Random random(4);
  const reference::FinchOptions o{.budget = 12, .observation_window = 8};
  Cache cache = make({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, o);
  feed(cache, {causal_weights(random, 30, 1)}, 30, false);
  CHECK(cache.policy().bytes() < 100);
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(1, 1);
  for (int token = 0; token < 20; ++token) cache.update(zero, zero).done(0);
  CHECK(cache.size(0) == 32);
  KVCache<float, kvsnip::Chain<Finch, kvsnip::StreamingLLM>> chain(cache.shape(), 12, kvsnip::Chain{Finch{{.observation_window = 8}}, kvsnip::StreamingLLM{}});
  feed(chain, {causal_weights(random, 30, 1)}, 30, false);
  for (int token = 0; token < 20; ++token) chain.update(zero, zero).done(0);
  CHECK(chain.size(0) == 12);
}

TEST_CASE("Finch refuses bad options, naming them, and a budget that its question fills") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { Finch{{.observation_window = 0}}; }), {"Finch", "observation_window", ">= 1", "0"}));
  CHECK(says(message_of([] { Finch{{.num_sinks = -1}}; }), {"Finch", "num_sinks", ">= 0", "-1"}));
  CHECK_THROWS_AS(make({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, {.budget = 8, .observation_window = 8}), std::invalid_argument);
}
