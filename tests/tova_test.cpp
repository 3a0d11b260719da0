// TOVA against its literal version in prompts and decode, by hand, and behind a policy that leaves heads different tokens.

#include "reference/eviction.hpp"
#include "reference/tova.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/random.hpp>
#include <kvsnip/policy/tova.hpp>

#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::TOVA;
using test::sorted;

}  // namespace

TEST_CASE("TOVA keeps what the last row's mean over all heads says, in prompts of any pieces and while decoding") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  test::Random random(seed);
  const Index heads = random.pick({1, 2, 4}), group = random.pick({1, 2, 4}), sinks = random.pick({0, 2}), recents = random.pick({1, 2, 4});
  const Index budget = sinks + recents + random.between(1, 12);
  CAPTURE(seed, heads, group, sinks, recents, budget);
  KVCache<float, TOVA> cache({.query_heads = heads * group, .kv_heads = heads, .head_dim = 1}, budget,
                             TOVA{{.num_sinks = sinks, .recent_window = recents, .refill_interval = 1}});
  std::vector<Index> held;                   // by every kv_head
  std::vector<double> scores;                // of these
  const auto keep_best = [&](Index room, Index num_recents) {
    const std::vector<Index> kept = reference::keep_best(held, scores, room, sinks, num_recents);
    std::vector<double> of_kept;
    for (const Index position : kept) of_kept.push_back(scores.begin()[std::find(held.begin(), held.end(), position) - held.begin()]);
    held = kept, scores = of_kept;
  };
  struct Update {
    Index tokens;
    bool more = false;
  };
  for (const Update& update : {Update{3}, {1}, {budget + 9}, {1}, {1}, {1}, {2}, {1}, {1}, {budget, true}, {7, true}, {5}, {1}, {1}, {1}}) {
    CAPTURE(held.size(), update.tokens, update.more);
    const Index first = cache.tokens_seen();
    const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(heads, update.tokens);
    auto step = cache.update(zeros, zeros, {.more = update.more});
    const bool decode = step.phase() == kvsnip::Phase::decode;
    REQUIRE(step.wanted_rows() == 1);
    if (decode) keep_best(budget - update.tokens, recents - update.tokens);
    for (Index t = 0; t < update.tokens; ++t) held.push_back(first + t), scores.push_back(0);
    REQUIRE(sorted(step.positions(0)) == held);
    std::vector<Eigen::MatrixXd> rows;
    for (Index h = 0; h < heads; ++h) {
      Eigen::MatrixXf weights(step.size(h), group);
      for (Index g = 0; g < group; ++g) weights.col(g) = random.weights(step.size(h));
      Eigen::MatrixXd by_position(weights.rows(), group);
      for (Index slot = 0; slot < step.size(h); ++slot)
        by_position.row(std::find(held.begin(), held.end(), step.positions(h)[static_cast<std::size_t>(slot)]) - held.begin()) = weights.row(slot).cast<double>();
      rows.push_back(by_position);
      step.on_attention(h, weights);
    }
    const Eigen::VectorXd mean = reference::tova(rows);
    scores.assign(mean.data(), mean.data() + mean.size());
    if (!decode && !update.more) keep_best(budget, recents - 1);
    for (Index h = 0; h < heads; ++h) REQUIRE(sorted(cache.positions(h)) == held);
  }
}

// Two heads, each sure of something else; neither is asked alone.
//   position   0    1    2    3
//   head 0     6/8  0    1/8  1/8
//   head 1     0    5/8  3/8  0        the mean's best: 0 and 1
TEST_CASE("TOVA by hand: the heads decide together") {
  KVCache<float, TOVA> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 2, TOVA{{.recent_window = 0}});
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(2, 4);
  auto step = cache.update(zeros, zeros);
  step.on_attention(0, Eigen::MatrixXf(Eigen::Vector4f(6, 0, 1, 1) / 8));
  step.on_attention(1, Eigen::MatrixXf(Eigen::Vector4f(0, 5, 3, 0) / 8));
  for (Index h = 0; h < 2; ++h) CHECK(sorted(cache.positions(h)) == std::vector<Index>{0, 1});
}

TEST_CASE("Behind a policy that leaves kv_heads different tokens, each goes by its own row") {
  KVCache<float, kvsnip::Chain<kvsnip::Random, TOVA>> cache({.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 8,
                                                            kvsnip::Chain{kvsnip::Random{}, TOVA{{.recent_window = 1, .refill_interval = 1}}});
  Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(2, 40);
  auto prompt = cache.update(zeros, zeros);
  for (Index h = 0; h < 2; ++h) prompt.on_attention(h, Eigen::MatrixXf::Constant(40, 1, 1.0f / 40));
  REQUIRE(sorted(cache.positions(0)) != sorted(cache.positions(1)));
  test::Random random(2);
  for (int token = 0; token < 20; ++token) {
    auto step = cache.update(zeros.leftCols(1), zeros.leftCols(1));
    std::vector<Index> lowest;
    for (Index h = 0; h < 2; ++h) {
      Eigen::VectorXf weights = random.matrix(8, 1).cwiseAbs();
      weights /= weights.sum();
      step.on_attention(h, Eigen::MatrixXf(weights));
      Index slot = 0;
      weights.minCoeff(&slot);
      lowest.push_back(cache.positions(h)[static_cast<std::size_t>(slot)]);
    }
    auto next = cache.update(zeros.leftCols(1), zeros.leftCols(1));
    for (Index h = 0; h < 2; ++h) {
      const std::vector<Index> held = sorted(next.positions(h));
      CHECK_FALSE(std::binary_search(held.begin(), held.end(), lowest.begin()[h]));
    }
    for (Index h = 0; h < 2; ++h) next.on_attention(h, Eigen::MatrixXf::Constant(8, 1, 0.125f));
  }
}

TEST_CASE("TOVA refuses bad options, naming them") {
  CHECK(test::says(test::message_of([] { TOVA{{.recent_window = -1}}; }), {"TOVA", "recent_window", ">= 0", "-1"}));
}
