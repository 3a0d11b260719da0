// ExternalScores: scores come from the user, and may come late.

#include "reference/eviction.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/external_scores.hpp>

#include <limits>
#include <memory>
#include <vector>

namespace {

using kvsnip::ExternalScores;
using kvsnip::Index;
using Cache = kvsnip::KVCache<float, ExternalScores>;

Cache make(Index heads, Index budget, const ExternalScores& policy) { return Cache({.query_heads = heads, .kv_heads = heads, .head_dim = 1}, budget, policy); }
auto update(Cache& cache, Index tokens) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(cache.shape().kv_heads, tokens);
  return cache.update(zeros, zeros);
}

}  // namespace

TEST_CASE("What the user scores highest stays, in prompts and while decoding") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 50));
  test::Random random(seed);
  const Index heads = random.pick({1, 3}), columns = random.one_in(2) ? 1 : heads, budget = random.between(4, 20);
  const Index judged = random.between(10, 60), sinks = random.pick({0, 2}), recents = random.pick({1, 2});
  CAPTURE(seed, heads, columns, budget, judged, sinks, recents);
  const Eigen::MatrixXf scores = random.matrix(judged, columns);
  Cache cache = make(heads, budget, ExternalScores(scores, {.num_sinks = sinks, .recent_window = recents, .refill_interval = 1}));
  std::vector<std::vector<Index>> held(static_cast<std::size_t>(heads));
  for (const Index tokens : {budget + 11, Index{1}, Index{1}, Index{1}, Index{30}, Index{1}, Index{1}}) {
    const Index first = cache.tokens_seen();
    auto step = update(cache, tokens);
    const bool decode = step.phase() == kvsnip::Phase::decode;
    for (Index h = 0; h < heads; ++h) step.done(h);
    for (Index h = 0; h < heads; ++h) {
      std::vector<Index>& of_head = held.begin()[h];
      const auto append = [&] {
        for (Index t = 0; t < tokens; ++t) of_head.push_back(first + t);
      };
      if (!decode) append();
      std::vector<double> given;
      for (const Index position : of_head)
        given.push_back(position < judged ? static_cast<double>(scores(position, columns == 1 ? 0 : h)) : std::numeric_limits<double>::infinity());
      of_head = reference::keep_best(of_head, given, budget - (decode ? tokens : 0), sinks, decode ? recents - tokens : recents - 1);
      if (decode) append();
      REQUIRE(test::sorted(cache.positions(h)) == of_head);
    }
  }
}

TEST_CASE("Scores may be written until the prompt's last callback") {
  const auto scores = std::make_shared<Eigen::MatrixXf>(Eigen::MatrixXf::Zero(6, 1));
  Cache cache = make(1, 2, ExternalScores(scores, {.recent_window = 0}));
  auto step = update(cache, 6);
  (*scores)(1, 0) = (*scores)(4, 0) = 1;
  step.done(0);
  CHECK(test::sorted(cache.positions(0)) == std::vector<Index>{1, 4});
}

TEST_CASE("Scores that are missing, too few or NaN are refused, and nothing is lost") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { ExternalScores(std::shared_ptr<const Eigen::MatrixXf>()); }), {"ExternalScores", "scores", "null"}));
  Cache two_heads = make(3, 2, ExternalScores(Eigen::MatrixXf::Zero(6, 2)));
  auto step = update(two_heads, 6);
  step.done(0), step.done(1);
  CHECK(says(message_of([&] { step.done(2); }), {"ExternalScores", "kv_head 2", "2"}));
  step.abandon();
  CHECK(two_heads.size(0) == 0);
  Cache nan = make(1, 2, ExternalScores(Eigen::MatrixXf::Constant(6, 1, std::numeric_limits<float>::quiet_NaN())));
  auto bad = update(nan, 6);
  CHECK(says(message_of([&] { bad.done(0); }), {"NaN", "kv_head 0", "position 0"}));
}
