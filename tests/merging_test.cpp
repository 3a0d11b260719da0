// Merging against its literal version: compactions, the queue and bulk drops; by hand; and steps that are taken back.

#include "reference/merging.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/key_norm.hpp>
#include <kvsnip/policy/merging.hpp>
#include <kvsnip/policy/scissorhands.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <map>
#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Merging;
using kvsnip::StreamingLLM;
using test::Random;

struct Token {
  Eigen::VectorXd key, value;
};
/// By position.
using Held = std::map<Index, Token>;

Eigen::MatrixXd columns(const Held& tokens, Eigen::VectorXd Token::*member) {
  Eigen::MatrixXd out(tokens.empty() ? 0 : (tokens.begin()->second.*member).size(), static_cast<Index>(tokens.size()));
  Index i = 0;
  for (const auto& [position, token] : tokens) out.col(i++) = token.*member;
  return out;
}
/// `before` without what is not in `stays` any longer, which is folded into the rest; nothing of it may be new.
Held folded(const Held& before, const std::vector<Index>& stays, bool pivot) {
  Held victims, survivors;
  for (const auto& [position, token] : before) (std::find(stays.begin(), stays.end(), position) == stays.end() ? victims : survivors)[position] = token;
  const reference::Merged merged = reference::merge(columns(victims, &Token::key), columns(victims, &Token::value),
                                                    {columns(survivors, &Token::key), columns(survivors, &Token::value)}, pivot);
  Index i = 0;
  for (auto& [position, token] : survivors) token = {merged.keys.col(i), merged.values.col(i)}, ++i;
  return survivors;
}

template <class P>
void run_beside_literal(std::uint64_t seed, const P& inner, Index budget) {
  Random random(seed);
  const Index dim = random.pick({2, 5}), heads = 2;
  const bool pivot = random.one_in(2);
  KVCache<float, Merging<P>> cache({.query_heads = heads, .kv_heads = heads, .head_dim = dim}, budget,
                                   Merging<P>(inner, {.weights = pivot ? Merging<P>::Weights::pivot : Merging<P>::Weights::similarity}));
  std::vector<Held> held(static_cast<std::size_t>(heads));
  Index merges = 0;
  for (const Index tokens : {Index{7}, Index{1}, budget + 20, Index{1}, Index{1}, Index{2}, Index{1}, Index{1}, Index{1}, Index{1}, budget + 2, Index{1}, Index{1}, Index{3}, Index{1}, Index{1}}) {
    const Eigen::MatrixXf k = random.matrix(heads * dim, tokens), v = random.matrix(heads * dim, tokens);
    const Index first = cache.tokens_seen();
    const auto end = [&](auto step) {
      for (Index h = 0; h < heads; ++h) {
        Random weights(seed + 7);  // the same each time
        if (!step.wants_attention()) step.done(h);
        else step.on_attention(h, weights.matrix(step.size(h), step.wanted_rows()).cwiseAbs());
      }
    };
    if (random.one_in(3)) {  // once more, after it was taken back
      auto step = cache.update(k, v);
      step.abandon();
    }
    auto step = cache.update(k, v);
    const bool decode = step.phase() == kvsnip::Phase::decode;
    end(step);
    for (Index h = 0; h < heads; ++h) {
      Held& of_head = held.begin()[h];
      Held newcomers;
      for (Index t = 0; t < tokens; ++t) newcomers[first + t] = {k.block(h * dim, t, dim, 1).cast<double>(), v.block(h * dim, t, dim, 1).cast<double>()};
      if (!decode) of_head.merge(newcomers);
      std::vector<Index> stays(cache.positions(h).begin(), cache.positions(h).end());
      if (decode) std::erase_if(stays, [&](Index position) { return position >= first; });
      merges += std::ssize(of_head) > std::ssize(stays);
      if (std::ssize(of_head) > std::ssize(stays)) of_head = folded(of_head, stays, pivot);
      of_head.merge(newcomers);
      REQUIRE(cache.size(h) == std::ssize(of_head));
      for (Index slot = 0; slot < cache.size(h); ++slot) {
        const Token& want = of_head.at(cache.positions(h)[static_cast<std::size_t>(slot)]);
        REQUIRE(test::largest_difference(cache.keys(h).col(slot).template cast<double>().eval(), want.key) < 1e-4);
        REQUIRE(test::largest_difference(cache.values(h).col(slot).template cast<double>().eval(), want.value) < 1e-4);
      }
    }
  }
  CHECK(merges > 6);
}

}  // namespace

TEST_CASE("Merging folds what goes into what stays as its literal version does: one by one, in bulk, in prompts") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 30));
  CAPTURE(seed);
  run_beside_literal(seed, StreamingLLM{{.num_sinks = 2}}, 9);
  run_beside_literal(seed, kvsnip::Scissorhands{{.history_window = 9, .recent_window = 3, .num_sinks = 1, .drop = 3, .mode = kvsnip::Scissorhands::Mode::count}}, 12);
  run_beside_literal(seed, kvsnip::KeyNorm{{.num_sinks = 1, .recent_window = 2, .refill_interval = 3}}, 12);
}

// Three tokens, two of which stay: 0 is a sink and points up, 2 points right; 1 goes, and its key is nearer to 2's.
//   key     0: (0, 1)   1: (3, 1)    2: (1, 0)
//   value   0: 1        1: 5         2: 3          pivot: 2 becomes the mean of 3 and (5 + 3) / 2
TEST_CASE("Merging by hand: the victim ends in the slot whose key points its way") {
  KVCache<float, Merging<StreamingLLM>> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 2, Merging<StreamingLLM>(StreamingLLM{{.num_sinks = 1}}));
  Eigen::MatrixXf k(2, 3), v(2, 3);
  k << 0, 3, 1, 1, 1, 0;
  v << 1, 5, 3, 1, 5, 3;
  cache.update(k, v).done(0);
  CHECK(test::sorted(cache.positions(0)) == std::vector<Index>{0, 2});
  CHECK(cache.values(0)(0, 0) == 1);
  CHECK(cache.values(0)(0, 1) == 3.5f);
  CHECK(cache.keys(0)(0, 1) == 1.5f);
  CHECK(cache.keys(0)(1, 1) == 0.25f);
}

TEST_CASE("Merging wants every step ended, as something is to be done then") {
  KVCache<float, Merging<StreamingLLM>> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 8);
  const Eigen::MatrixXf one = Eigen::MatrixXf::Ones(1, 1);
  (void)cache.update(one, one);
  CHECK_THROWS_AS(cache.update(one, one), std::logic_error);
}
