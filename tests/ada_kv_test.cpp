// AdaKV: the shares against their literal version, and heads that really hold different numbers of slots.

#include "reference/ada_kv.hpp"
#include "reference/eviction.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/ada_kv.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/external_scores.hpp>
#include <kvsnip/policy/scissorhands.hpp>
#include <kvsnip/policy/snapkv.hpp>

#include <string>
#include <vector>

namespace {

using kvsnip::AdaKV;
using kvsnip::Chain;
using kvsnip::ExternalScores;
using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Scissorhands;
using kvsnip::SnapKV;
using test::Random;
using test::sorted;
using Ada = AdaKV<ExternalScores>;

/// An over-long prompt of zeros, of which nothing is wanted.
template <class Cache>
void feed_prompt(Cache& cache, Index tokens) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(cache.shape().kv_heads * cache.shape().head_dim, tokens);
  auto step = cache.update(zeros, zeros);
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
}

}  // namespace

TEST_CASE("AdaKV's heads keep as many as their literal shares say, and the best of what they have") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 200));
  Random random(seed);
  const Index heads = random.pick({1, 2, 3, 5}), prompt = random.between(20, 60), budget = random.between(6, 19);
  const Index sinks = random.pick({0, 2}), recents = random.pick({1, 4});
  const reference::AdaKVOptions o{.floor = static_cast<double>(random.pick({0, 1, 2, 10})) / 10, .blend = random.one_in(2), .normalize = random.one_in(2)};
  CAPTURE(seed, heads, prompt, budget, sinks, recents, o.floor, o.blend, o.normalize);
  Eigen::MatrixXf scores = random.matrix(prompt, heads).cwiseAbs();
  for (Index h = 0; h < heads; ++h) scores.col(h) *= static_cast<float>(1 + h * h);  // heads that have more to say
  KVCache<float, Ada> cache({.query_heads = heads, .kv_heads = heads, .head_dim = 1}, budget,
                            Ada(ExternalScores(scores, {.num_sinks = sinks, .recent_window = recents}),
                                {.floor = o.floor, .safeguard = o.blend ? Ada::Safeguard::blend : Ada::Safeguard::least, .normalize = o.normalize}));
  feed_prompt(cache, prompt);

  const Index num_protected = sinks + recents - 1;
  std::vector<std::vector<double>> candidates, all;
  for (Index h = 0; h < heads; ++h) {
    const Eigen::VectorXd column = scores.col(h).cast<double>();
    candidates.emplace_back(column.data() + sinks, column.data() + prompt - (recents - 1));
    all.emplace_back(column.data(), column.data() + prompt);
  }
  Index h = 0;
  for (const Index share : reference::with_at_least(reference::ada_kv(candidates, heads * (budget - num_protected), o), 1)) {  // decoding needs one more
    CHECK(std::vector<Index>(cache.positions(h).begin(), cache.positions(h).end()) ==
          reference::keep_best(test::consecutive(0, prompt), all.begin()[h], num_protected + share, sinks, recents - 1));
    CHECK(cache.size(h) == cache.budget(h));
    ++h;
  }
}

// Two heads, six tokens, a budget of two each: 8, 7 and 5 are the best of all, and then 4.
//   head 0   8 7 5 1 1 1      takes three
//   head 1   4 3 2 1 1 1      takes one
TEST_CASE("AdaKV by hand: the best of both heads stay, whichever head they are in") {
  Eigen::MatrixXf scores(6, 2);
  scores << 1, 1, 8, 1, 7, 3, 1, 4, 5, 2, 1, 1;
  const auto held = [&](double floor) {
    KVCache<float, Ada> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 2, Ada(ExternalScores(scores, {.recent_window = 0}), {.floor = floor}));
    feed_prompt(cache, 6);
    return std::vector{sorted(cache.positions(0)), sorted(cache.positions(1))};
  };
  CHECK(held(0) == std::vector<std::vector<Index>>{{1, 2, 4}, {3}});
  CHECK(held(1) == std::vector<std::vector<Index>>{{1, 2}, {2, 3}});  // even shares
}

TEST_CASE("A head that AdaKV leaves nothing still has room to decode") {
  Eigen::MatrixXf scores = Eigen::MatrixXf::Ones(40, 2);
  scores.col(1).setConstant(9);
  KVCache<float, Ada> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 12,
                            Ada(ExternalScores(scores, {.num_sinks = 2, .recent_window = 4, .refill_interval = 1}), {.floor = 0}));
  feed_prompt(cache, 40);
  CHECK(cache.budget(0) == 6);
  CHECK(cache.budget(1) == 18);
  for (Index token = 0; token < 20; ++token) {
    feed_prompt(cache, 1);
    CHECK(cache.size(0) == 6);
    CHECK(cache.size(1) == 18);
    CHECK(sorted(cache.positions(0)) == std::vector<Index>{0, 1, 37 + token, 38 + token, 39 + token, 40 + token});
  }
}

TEST_CASE("AdaKV's memory is what its heads hold: nothing is padded, and decoding keeps to each head's share") {
  const kvsnip::Shape shape{.query_heads = 8, .kv_heads = 4, .head_dim = 16};
  Random random(3);
  const Index prompt = 300, budget = 64;
  Eigen::MatrixXf k = random.matrix(64, prompt + 50), q = random.matrix(128, prompt + 50);
  for (Index h = 0; h < 4; ++h) k.middleRows(16 * h, 16) *= static_cast<float>(h);  // from even attention to sharp
  const auto run = [&]<class Policy>(const Policy& policy) {
    KVCache<float, Policy> cache(shape, budget, policy);
    Eigen::MatrixXf out(128, prompt);
    kvsnip::attend(cache.update(k.leftCols(prompt), k.leftCols(prompt)), q.leftCols(prompt), out);
    return cache;
  };
  const auto snap = run(AdaKV<SnapKV>(SnapKV{{.observation_window = 8}}));
  Index held = 0;
  bool ragged = false;
  for (Index h = 0; h < 4; ++h) held += snap.size(h), ragged = ragged || snap.size(h) != budget;
  CHECK(ragged);
  CHECK(std::abs(held - 4 * budget) <= 4);  // shares are rounded
  CHECK(snap.bytes().keys == held * 16 * static_cast<Index>(sizeof(float)));
  CHECK(snap.bytes().values == snap.bytes().keys);

  auto chain = run(Chain(AdaKV<SnapKV>(SnapKV{{.observation_window = 8}}), Scissorhands{{.recent_window = 8}}));
  const kvsnip::Bytes before = chain.bytes();
  Eigen::MatrixXf out(128, 1);
  for (Index t = prompt; t < prompt + 50; ++t) {
    kvsnip::attend(chain.update(k.col(t), k.col(t)), q.col(t), out);
    for (Index h = 0; h < 4; ++h) CHECK(chain.size(h) == snap.size(h));
  }
  CHECK(chain.bytes().keys == before.keys);
  chain.reset();
  for (Index h = 0; h < 4; ++h) CHECK(chain.budget(h) == budget);
}

TEST_CASE("AdaKV refuses bad options, naming them") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { AdaKV<SnapKV>(SnapKV{}, {.floor = 1.5}); }), {"AdaKV", "floor", "[0, 1]", "1.5"}));
  CHECK(says(message_of([] { AdaKV<SnapKV>(SnapKV{}, {.floor = -0.5}); }), {"AdaKV", "floor", "[0, 1]", "-0.5"}));
}
