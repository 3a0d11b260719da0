// CriticalKV against its literal version, by hand, and with shares of an AdaKV inside.

#include "reference/critical_kv.hpp"

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/ada_kv.hpp>
#include <kvsnip/policy/critical_kv.hpp>
#include <kvsnip/policy/external_scores.hpp>

#include <vector>

namespace {

using kvsnip::CriticalKV;
using kvsnip::ExternalScores;
using kvsnip::Index;
using kvsnip::KVCache;
using Critical = CriticalKV<ExternalScores>;

template <class Cache>
void feed(Cache& cache, const Eigen::MatrixXf& values) {
  auto step = cache.update(values, values);
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
}

}  // namespace

TEST_CASE("CriticalKV scores and keeps what its literal version does") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 100));
  test::Random random(seed);
  const Index heads = random.pick({1, 2}), group = random.pick({1, 3}), dim = random.pick({1, 4}), hidden = random.pick({1, 9});
  const Index budget = random.between(4, 30), prompt = budget + random.between(1, 120), sinks = random.pick({0, 2}), recents = random.pick({1, 2});
  const double first_stage = static_cast<double>(random.pick({0, 3, 5, 10})) / 10;
  CAPTURE(seed, heads, group, dim, hidden, budget, prompt, sinks, recents, first_stage);
  const Eigen::MatrixXf scores = random.matrix(prompt, heads).cwiseAbs(), values = random.matrix(heads * dim, prompt);
  const Eigen::MatrixXf wo = random.matrix(hidden, heads * group * dim);
  const auto projection = [&](Index query_head) -> Eigen::Ref<const Eigen::MatrixXf> { return wo.middleCols(query_head * dim, dim); };
  KVCache<float, test::RecordScores<Critical>> cache(
      {.query_heads = heads * group, .kv_heads = heads, .head_dim = dim}, budget,
      test::RecordScores<Critical>(Critical(ExternalScores(scores, {.num_sinks = sinks, .recent_window = recents}), projection, {.first_stage = first_stage})));
  feed(cache, values);
  const Index candidates = prompt - sinks - (recents - 1), num_kept = budget - sinks - (recents - 1);
  for (Index h = 0; h < heads; ++h) {
    std::vector<double> given;
    std::vector<Eigen::MatrixXd> parts;
    for (Index i = 0; i < candidates; ++i) given.push_back(static_cast<double>(scores(sinks + i, h)));
    for (Index g = 0; g < group; ++g) parts.push_back(wo.middleCols((h * group + g) * dim, dim).cast<double>());
    const std::vector<double> expected =
        reference::critical_kv(given, values.block(h * dim, sinks, dim, candidates).cast<double>(), parts, num_kept, first_stage, 1e-4);
    const std::vector<float>& got = cache.policy().last_scores(h);
    for (Index i = 0; i < candidates; ++i) REQUIRE(test::close(got.begin()[sinks + i], expected.begin()[i], 1e-5, 1e-6));
    CHECK(cache.size(h) == budget);
  }
}

// Four candidates, room for two, one by score alone. Position 0 scores best and stays; of the others 3 has the value that matters.
TEST_CASE("CriticalKV by hand: a large value makes up for a lower score in the second half") {
  Eigen::MatrixXf scores(4, 1), values(1, 4);
  scores << 9, 4, 3, 2;
  values << 0, 1, 1, 5;
  const Eigen::MatrixXf wo = Eigen::MatrixXf::Ones(1, 1);
  const auto held = [&](double first_stage) {
    KVCache<float, Critical> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 2,
                                   Critical(ExternalScores(scores, {.recent_window = 0}), [&](Index) -> Eigen::Ref<const Eigen::MatrixXf> { return wo; },
                                            {.first_stage = first_stage}));
    feed(cache, values);
    return test::sorted(cache.positions(0));
  };
  CHECK(held(0.5) == std::vector<Index>{0, 3});
  CHECK(held(1) == std::vector<Index>{0, 1});
  CHECK(held(0) == std::vector<Index>{1, 3});
}

TEST_CASE("CriticalKV around AdaKV takes its shares, and decoding goes by the inner scores") {
  using Ada = kvsnip::AdaKV<ExternalScores>;
  Eigen::MatrixXf scores = Eigen::MatrixXf::Ones(40, 2);
  scores.col(1).setConstant(9);
  const Eigen::MatrixXf wo = Eigen::MatrixXf::Ones(1, 2), values = Eigen::MatrixXf::Ones(2, 30), value = Eigen::MatrixXf::Ones(2, 1);
  KVCache<float, CriticalKV<Ada>> cache(
      {.query_heads = 2, .kv_heads = 2, .head_dim = 1}, 10,
      CriticalKV<Ada>(Ada(ExternalScores(scores), {.floor = 0}), [&](Index h) -> Eigen::Ref<const Eigen::MatrixXf> { return wo.col(h); }));
  feed(cache, values);
  CHECK(cache.size(0) == 1);
  CHECK(cache.size(1) == 19);
  feed(cache, value);
  CHECK(cache.size(1) == 19);
}

TEST_CASE("CriticalKV refuses bad options, naming them") {
  using test::message_of, test::says;
  const auto make = [](const kvsnip::CriticalKVOptions& options, Critical::OutputProjection projection) {
    return Critical(ExternalScores(Eigen::MatrixXf(1, 1)), std::move(projection), options);
  };
  const Eigen::MatrixXf wo(1, 1);
  const auto projection = [&](Index) -> Eigen::Ref<const Eigen::MatrixXf> { return wo; };
  CHECK(says(message_of([&] { make({}, nullptr); }), {"CriticalKV", "projection"}));
  CHECK(says(message_of([&] { make({.first_stage = 2}, projection); }), {"CriticalKV", "first_stage", "[0, 1]", "2"}));
  CHECK(says(message_of([&] { make({.epsilon = -1}, projection); }), {"CriticalKV", "epsilon", ">= 0", "-1"}));
}
