// LossEstimate beside AttentionLoss: right where importance persists, and no change to the policy inside.

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/tolerance.hpp"

#include <kvsnip/attention_loss.hpp>
#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/loss_estimate.hpp>
#include <kvsnip/policy/random.hpp>
#include <kvsnip/policy/scissorhands.hpp>
#include <kvsnip/policy/snapkv.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include <string>

namespace {

using kvsnip::AttentionLoss;
using kvsnip::Index;
using kvsnip::LossEstimate;
using kvsnip::Shape;

/// One query that never changes: what a token draws, in proportion to the others, does not either.
template <class P>
void check_where_importance_persists(const P& policy, Index budget) {
  test::Random random(3);
  const Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 4};
  AttentionLoss<float, LossEstimate<P>> loss(shape, budget, LossEstimate<P>(policy));
  const Eigen::MatrixXf query = random.matrix(8, 1);
  for (const Index tokens : {5, 40, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 30, 1, 1, 1}) {
    const Eigen::MatrixXf k = random.matrix(8, tokens), q = query.replicate(1, tokens);
    Eigen::MatrixXf out(8, tokens);
    loss.update(k, k);
    loss.attend(q, out);
    if (tokens > 2) continue;  // a prompt attends to itself whole
    for (Index h = 0; h < 2; ++h) CHECK(test::close(loss.cache().policy().lost(h), loss.lost()(h, tokens - 1), 1e-3, 1e-4));
  }
  CHECK(loss.lost()(0, 0) > 0.05f);
}

}  // namespace

TEST_CASE("Where importance persists the estimate is the mass that is lost: one by one, in bulk, in prompts") {
  check_where_importance_persists(kvsnip::StreamingLLM{{.num_sinks = 2}}, 16);
  check_where_importance_persists(kvsnip::Random{{.recent_window = 4}}, 16);
  check_where_importance_persists(kvsnip::Scissorhands{{.recent_window = 4, .mode = kvsnip::Scissorhands::Mode::count}}, 16);
  check_where_importance_persists(kvsnip::Chain{kvsnip::SnapKV{{.observation_window = 4}}, kvsnip::StreamingLLM{{.num_sinks = 1}}}, 16);
}

TEST_CASE("The policy inside keeps what it would keep alone, whatever rows it wants") {
  test::Random random(4);
  using P = kvsnip::Chain<kvsnip::SnapKV, kvsnip::Scissorhands>;
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 4};
  const P policy{kvsnip::SnapKV{{.observation_window = 3, .group = kvsnip::SnapKV::Group::max}}, kvsnip::Scissorhands{{.history_window = 9, .recent_window = 3, .record_interval = 2}}};
  kvsnip::KVCache<float, P> alone(shape, 10, policy);
  kvsnip::KVCache<float, LossEstimate<P>> estimated(shape, 10, LossEstimate<P>(policy));
  for (const Index tokens : {30, 1, 1, 1, 2, 1, 1, 25, 1, 1, 1}) {
    const Eigen::MatrixXf k = random.matrix(4, tokens), q = random.matrix(8, tokens);
    Eigen::MatrixXf a(8, tokens), b(8, tokens);
    kvsnip::attend(alone.update(k, k), q, a);
    kvsnip::attend(estimated.update(k, k), q, b);
    CHECK(a == b);
  }
  CHECK(estimated.policy().lost(0) > 0);
  estimated.reset();
  CHECK(estimated.policy().lost(0) == 0);
}
