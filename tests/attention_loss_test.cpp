// AttentionLoss against attention in float64 over every token that was ever seen.

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention_loss.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/full.hpp>
#include <kvsnip/policy/scissorhands.hpp>
#include <kvsnip/policy/snapkv.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace {

using kvsnip::AttentionLoss;
using kvsnip::Index;
using kvsnip::Shape;

/// What a query gives the positions that are not `held`. @param keys  (head_dim, positions it sees)
double lost(const Eigen::MatrixXf& keys, const Eigen::VectorXf& query, const std::vector<Index>& held) {
  Eigen::ArrayXd weights = (keys.cast<double>().transpose() * query.cast<double>()).array() / std::sqrt(static_cast<double>(keys.rows()));
  weights = (weights - weights.maxCoeff()).exp();
  double of_lost = 0;
  for (Index position = 0; position < weights.size(); ++position)
    if (std::find(held.begin(), held.end(), position) == held.end()) of_lost += weights[position];
  return of_lost / weights.sum();
}

}  // namespace

TEST_CASE("The mass lost is what full attention gives to tokens that are not held, per query and query head") {
  using Policy = kvsnip::Chain<kvsnip::SnapKV, kvsnip::Scissorhands>;
  const auto seed = GENERATE(range<std::uint64_t>(0, 10));
  CAPTURE(seed);
  test::Random random(seed);
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 6};
  AttentionLoss<float, Policy> loss(shape, 12, Policy{kvsnip::SnapKV{{.observation_window = 4}}, kvsnip::Scissorhands{{.recent_window = 4}}});
  kvsnip::KVCache<float, Policy> alone = loss.cache();
  Eigen::MatrixXf keys(12, 0);
  Eigen::VectorXd sum = Eigen::VectorXd::Zero(4);
  Index queries = 0;
  for (const Index tokens : {30, 1, 1, 3, 1, 20, 1, 2, 1}) {
    const Eigen::MatrixXf k = random.matrix(12, tokens), v = random.matrix(12, tokens), q = random.matrix(24, tokens);
    keys.conservativeResize(12, keys.cols() + tokens);
    keys.rightCols(tokens) = k;
    loss.update(k, v);
    auto step = alone.update(k, v);
    std::vector<std::vector<Index>> held;
    for (Index h = 0; h < 2; ++h) held.emplace_back(step.positions(h).begin(), step.positions(h).end());
    Eigen::MatrixXf out(24, tokens), expected_out(24, tokens);
    kvsnip::attend(step, q, expected_out);
    loss.attend(q, out);
    CHECK(out == expected_out);
    REQUIRE(loss.lost().cols() == tokens);
    for (Index head = 0; head < 4; ++head)
      for (Index j = 0; j < tokens; ++j) {
        const Index seen = keys.cols() - tokens + j + 1;
        const double expected = lost(keys.block(head / 2 * 6, 0, 6, seen), q.block(head * 6, j, 6, 1), held.begin()[head / 2]);
        CHECK(test::close(loss.lost()(head, j), expected, 0, 1e-5));
        sum(head) += expected;
      }
    queries += tokens;
  }
  CHECK(test::largest_difference(loss.mean_lost(), (sum / static_cast<double>(queries)).eval()) < 1e-5);
  CHECK(loss.mean_lost().minCoeff() > 0.01);
}

TEST_CASE("A budget that holds everything loses nothing, a moved measurement goes on, and reset() forgets") {
  test::Random random(1);
  AttentionLoss<Eigen::half, kvsnip::StreamingLLM> first({.query_heads = 2, .kv_heads = 1, .head_dim = 4}, 8);
  const auto feed = [&](auto& loss, Index tokens) {
    const Eigen::MatrixXf k = random.matrix(4, tokens), q = random.matrix(8, tokens);
    Eigen::MatrixXf out(8, tokens);
    loss.update(k, k);
    loss.attend(q, out);
  };
  feed(first, 8);
  CHECK(first.mean_lost().isZero());
  AttentionLoss<Eigen::half, kvsnip::StreamingLLM> moved = std::move(first);
  feed(moved, 1);
  CHECK(moved.mean_lost().minCoeff() > 0);
  moved.reset();
  CHECK(moved.mean_lost().isZero());
  feed(moved, 5);
  CHECK(moved.mean_lost().isZero());
  CHECK(moved.cache().tokens_seen() == 5);
}

TEST_CASE("AttentionLoss refuses calls out of turn and bad input, and loses nothing by it") {
  AttentionLoss<float, kvsnip::StreamingLLM> loss({.query_heads = 1, .kv_heads = 1, .head_dim = 2}, 8);
  Eigen::MatrixXf k = Eigen::MatrixXf::Ones(2, 3), out(2, 3);
  CHECK_THROWS_AS(loss.attend(k, out), std::logic_error);
  CHECK_THROWS_AS(loss.update(k, k.leftCols(2)), std::invalid_argument);
  loss.update(k, k);
  CHECK_THROWS_AS(loss.update(k, k), std::logic_error);
  CHECK_THROWS_AS(loss.attend(k.leftCols(2), out), std::invalid_argument);
  loss.attend(k, out);
  CHECK(loss.lost().cols() == 3);
  CHECK(loss.cache().tokens_seen() == 3);
}
