// Periodic: every compaction while decoding is what the policy inside does with a prompt that ends in those tokens.

#include "reference/snapkv.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/thrown.hpp"

#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/full.hpp>
#include <kvsnip/policy/key_norm.hpp>
#include <kvsnip/policy/periodic.hpp>
#include <kvsnip/policy/snapkv.hpp>
#include <kvsnip/registry.hpp>

#include <map>
#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Periodic;
using kvsnip::SnapKV;
using test::Random;
using test::sorted;

/// What every query of a token gave every position, a column per query head; by the token's position.
using Rows = std::map<Index, std::map<Index, Eigen::RowVectorXd>>;

}  // namespace

TEST_CASE("Periodic SnapKV keeps what SnapKV would keep of a prompt that ends in the tokens decoded since") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 60));
  Random random(seed);
  const Index group = random.pick({1, 2, 4}), interval = random.pick({1, 2, 5, 9});
  reference::SnapKVOptions o{.observation_window = random.pick({1, 3, 6}), .kernel_size = random.pick({1, 3, 5}), .max_over_group = random.one_in(2), .num_sinks = random.pick({0, 2})};
  o.budget = o.observation_window + 1 + o.num_sinks + random.between(1, 12);
  CAPTURE(seed, group, interval, o.budget, o.observation_window, o.kernel_size, o.max_over_group, o.num_sinks);
  const SnapKV snapkv{{.observation_window = o.observation_window,
                       .kernel_size = o.kernel_size,
                       .group = o.max_over_group ? SnapKV::Group::max : SnapKV::Group::mean,
                       .num_sinks = o.num_sinks}};
  KVCache<float, Periodic<SnapKV>> cache({.query_heads = group, .kv_heads = 1, .head_dim = 1}, o.budget, Periodic<SnapKV>(snapkv, {.interval = interval}));
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(1, 1);
  Rows rows;
  std::vector<Index> held;
  Index compactions = 0;
  for (Index position = 0; position < 80; ++position) {
    if (std::ssize(held) == o.budget) {
      ++compactions;
      const Index num_rows = std::min(std::min(o.observation_window, interval), position - 1);  // position 0 was a prompt
      std::vector<Eigen::MatrixXd> last(static_cast<std::size_t>(group), Eigen::MatrixXd::Zero(std::ssize(held), num_rows));
      for (Index g = 0; g < group; ++g)
        for (Index j = 0; j < num_rows; ++j)
          for (Index i = 0; i < std::ssize(held); ++i)
            if (const auto given = rows[position - num_rows + j].find(held.begin()[i]); given != rows[position - num_rows + j].end())
              last.begin()[g](i, j) = given->second(g);
      reference::SnapKVOptions compaction = o;  // positions are counted among those held
      compaction.budget = std::max(o.budget - interval, o.observation_window + o.num_sinks);
      std::vector<Index> kept;
      for (const Index i : reference::snapkv(last, compaction).kept) kept.push_back(held.begin()[i]);
      held = kept;
    }
    held.push_back(position);
    auto step = cache.update(zero, zero);
    REQUIRE(sorted(step.positions(0)) == held);
    Eigen::MatrixXf weights(step.size(0), group);
    for (Index g = 0; g < group; ++g) weights.col(g) = random.weights(step.size(0));
    for (Index slot = 0; slot < step.size(0); ++slot) rows[position][step.positions(0)[static_cast<std::size_t>(slot)]] = weights.row(slot).cast<double>();
    if (step.wants_attention()) step.on_attention(0, weights);
    else step.done(0);
  }
  CHECK(compactions >= 80 / std::max<Index>(interval, 1) / 3);
}

TEST_CASE("Periodic bounds a cache, compresses prompts as the policy inside does, and needs no rows if that needs none") {
  Random random(1);
  const kvsnip::Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 4};
  auto snap = kvsnip::make_cache<float>("snapkv(observation_window=4)", shape, 20);
  auto periodic = kvsnip::make_cache<float>("periodic(snapkv(observation_window=4), interval=6)", shape, 20);
  KVCache<float, Periodic<kvsnip::KeyNorm>> norms(shape, 20, Periodic<kvsnip::KeyNorm>(kvsnip::KeyNorm{}, {.interval = 6}));
  for (const Index tokens : {50, 1, 1, 30, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}) {
    const Eigen::MatrixXf k = random.matrix(8, tokens), q = random.matrix(16, tokens);
    Eigen::MatrixXf out(16, tokens);
    kvsnip::attend(periodic.update(k, k), q, out);
    kvsnip::attend(norms.update(k, k), q, out);
    if (periodic.tokens_seen() == 50) {
      kvsnip::attend(snap.update(k, k), q, out);
      for (Index h = 0; h < 2; ++h) CHECK(sorted(snap.positions(h)) == sorted(periodic.positions(h)));
    }
    for (Index h = 0; h < 2; ++h) CHECK((periodic.size(h) <= 20 && periodic.size(h) >= 15 && norms.size(h) <= 20));
    CHECK(norms.policy().bytes() < 2000);
  }
}

TEST_CASE("Periodic refuses what it cannot do, naming it") {
  using test::message_of, test::says;
  CHECK(says(message_of([] { Periodic<SnapKV>(SnapKV{}, {.interval = 0}); }), {"Periodic", "interval", ">= 1", "0"}));
  CHECK(says(message_of([] { kvsnip::make_policy("periodic(full)"); }), {"Periodic", "compress prompts"}));
  CHECK(says(message_of([] { KVCache<float, Periodic<SnapKV>>({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 32); }), {"budget", "32"}));
}
