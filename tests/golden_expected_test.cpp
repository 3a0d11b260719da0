// What looks through RoPE, against the public references: ExpectedAttention, rerotate.

#include <kvsnip/policy/expected_attention.hpp>
#include <kvsnip/rope.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::Rope;

/// The references split heads in halves.
Rope rope_of(const GoldenCase& golden) {
  const auto frequencies = golden.tensor<float>("in_inv_freq");
  return {{frequencies.data.begin(), frequencies.data.end()}, Rope::Pairing::half_split};
}

/// Sinks have the maximum + 1 there: they are protected here.
void check_kvpress_expected(const GoldenCase& golden, Findings& findings) {
  const Shape shape{.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
  const Index prompt = golden.integer("q_len"), sinks = golden.integer("n_sink");
  const Rope rope = rope_of(golden);
  const kvsnip::ExpectedAttention policy{{.num_future_positions = golden.integer("n_future_positions"),
                                          .use_covariance = golden.text_or("use_covariance", "1") == "1",
                                          .use_value_norm = golden.text_or("use_vnorm", "1") == "1",
                                          .epsilon = golden.has("epsilon") ? static_cast<float>(golden.number("epsilon")) : 0.0f,
                                          .num_sinks = sinks,
                                          .recent_window = 0}};
  RowsCache<kvsnip::ExpectedAttention> cache(shape, golden.integer("n_kept"), RecordScores(policy), rope);
  auto step = cache.update(stacked(golden.tensor<float>("in_keys"), 0, prompt), stacked(golden.tensor<float>("in_values"), 0, prompt));
  for (Index h = 0; h < shape.kv_heads; ++h) {
    Eigen::MatrixXf queries = side_by_side(golden.tensor<float>("in_queries_pre_rope"), h, prompt, shape.group_size());
    for (Index t = 0; t < prompt; ++t) rope.rotate(queries.middleCols(t * shape.group_size(), shape.group_size()), t);
    step.on_queries(h, queries);
  }
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_scores(cache, golden.tensor<float>("out_scores"), sinks, prompt, 1.0, findings);
}

void check_kvpress_rerotate(const GoldenCase& golden, Findings& findings) {
  const auto keys = golden.tensor<float>("in_keys"), want = golden.tensor<float>("out_keys");
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < keys.dim(0); ++h) {
    const std::vector<Index> positions = sorted(row(kept, h));
    Eigen::MatrixXf of_head(keys.dim(2), std::ssize(positions));
    for (Index i = 0; i < of_head.cols(); ++i)
      for (Index d = 0; d < of_head.rows(); ++d) of_head(d, i) = keys(h, positions.begin()[i], d);
    kvsnip::rerotate(of_head, positions, rope_of(golden));
    for (Index i = 0; i < of_head.cols(); ++i)
      for (Index d = 0; d < of_head.rows(); ++d)
        findings.check(close_enough(of_head(d, i), want(h, i, d)), "kv_head ", h, ", position ", positions.begin()[i], ": key ", of_head(d, i), ", expected ", want(h, i, d));
  }
}

const RegisterGolden kinds{{
    {"kvpress_score expected", check_kvpress_expected},
    {"kvpress_rerotate", check_kvpress_rerotate},
}};

}  // namespace
