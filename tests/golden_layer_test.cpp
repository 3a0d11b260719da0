// Policies that score all kv_heads together, against the public references: TOVA, LeverageScore, NonCausalAttention, Compactor's parts.

#include <kvsnip/policy/leverage_score.hpp>
#include <kvsnip/policy/non_causal_attention.hpp>
#include <kvsnip/policy/tova.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::Rope;

Shape shape_of(const GoldenCase& golden) {
  return {.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
}
/// The last position has the maximum + 1 there: it is protected here.
void check_kvpress_tova(const GoldenCase& golden, Findings& findings) {
  const Index prompt = golden.integer("q_len");
  const auto cache = run_on_queries(shape_of(golden), golden.integer("n_kept"), kvsnip::TOVA{}, stacked(golden.tensor<float>("in_keys"), 0, prompt), golden.tensor<float>("in_queries"));
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_scores(cache, golden.tensor<float>("out_scores"), 0, prompt - 1, 1.0, findings);
}

/// [kv_heads, dim, sketch_dimension]
std::vector<Eigen::MatrixXf> sketch_of(const GoldenCase& golden) {
  const auto sketch = golden.tensor<float>("in_sketch");
  std::vector<Eigen::MatrixXf> result;
  for (Index h = 0; h < sketch.dim(0); ++h) {
    result.emplace_back(sketch.dim(1), sketch.dim(2));
    for (Index d = 0; d < sketch.dim(1); ++d)
      for (Index s = 0; s < sketch.dim(2); ++s) result.back()(d, s) = sketch(h, d, s);
  }
  return result;
}
/// Keys as a model would store them: the case's, turned to their positions.
Eigen::MatrixXf rotated(Eigen::MatrixXf keys, const Shape& shape, const Rope& rope) {
  for (Index t = 0; t < keys.cols(); ++t)
    for (Index h = 0; h < shape.kv_heads; ++h) rope.rotate({keys.col(t).data() + h * shape.head_dim, static_cast<std::size_t>(shape.head_dim)}, t);
  return keys;
}
/// Rounding of sums over the matrix is larger than that of a dot product.
template <class Cache>
void check_rough_scores(const Cache& cache, const Array<float>& want, Index begin, Index end, Findings& findings) {
  for (Index h = 0; h < cache.shape().kv_heads; ++h)
    for (Index i = begin; i < end; ++i) {
      const double got = static_cast<double>(cache.policy().last_scores(h).at(static_cast<std::size_t>(i)));
      findings.check(test::close(got, want(h, i), 2e-3, 2e-3), "kv_head ", h, ": score of position ", i, " is ", got, ", expected ", want(h, i));
    }
}
void check_kvpress_leverage(const GoldenCase& golden, Findings& findings) {
  const Shape shape = shape_of(golden);
  const Rope rope = Rope::standard(shape.head_dim, Rope::Pairing::half_split);
  const Index prompt = golden.integer("q_len");
  RowsCache<kvsnip::LeverageScore> cache(shape, golden.integer("n_kept"), RecordScores(kvsnip::LeverageScore(sketch_of(golden), {.recent_window = 0})), rope);
  const Eigen::MatrixXf keys = rotated(stacked(golden.tensor<float>("in_keys_pre_rope"), 0, prompt), shape, rope);
  auto step = cache.update(keys, keys);
  for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_rough_scores(cache, golden.tensor<float>("out_scores"), 0, prompt, findings);
}

/// All queries of the prompt.
template <class P>
RowsCache<P> run_on_all_queries(const GoldenCase& golden, const P& policy) {
  const Shape shape = shape_of(golden);
  const Index prompt = golden.integer("q_len");
  RowsCache<P> cache(shape, golden.integer("n_kept"), RecordScores<P>(policy));
  auto step = cache.update(stacked(golden.tensor<float>("in_keys"), 0, prompt), stacked(golden.tensor<float>("in_values"), 0, prompt));
  for (Index h = 0; h < shape.kv_heads; ++h) step.on_queries(h, side_by_side(golden.tensor<float>("in_queries"), h, prompt, shape.group_size()));
  return cache;
}
void check_kvpress_noncausal(const GoldenCase& golden, Findings& findings) {
  const auto cache = run_on_all_queries(golden, kvsnip::NonCausalAttention{{.chunk_size = golden.integer("chunk_size"), .recent_window = 0}});
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_scores(cache, golden.tensor<float>("out_scores"), 0, golden.integer("q_len"), 1.0, findings);
}
/// The case's keys before RoPE are not those after it, turned: no cache can hold both. So Compactor's parts run by
/// themselves and are added up here; compactor_test shows that Compactor adds the same.
void check_kvpress_compactor(const GoldenCase& golden, Findings& findings) {
  const Shape shape = shape_of(golden);
  const Index prompt = golden.integer("q_len"), sinks = 8, recents = 4;
  const auto want = golden.tensor<float>("out_scores");
  const Rope rope = Rope::standard(shape.head_dim, Rope::Pairing::half_split);
  const auto drawn = run_on_all_queries(golden, kvsnip::NonCausalAttention{{.chunk_size = golden.integer("chunk_size"), .num_sinks = sinks, .recent_window = recents + 1}});
  RowsCache<kvsnip::LeverageScore> leverage(shape, golden.integer("n_kept"), RecordScores(kvsnip::LeverageScore(sketch_of(golden), {.num_sinks = sinks, .recent_window = recents + 1})),
                                            rope);
  const Eigen::MatrixXf keys = rotated(stacked(golden.tensor<float>("in_keys_pre_rope"), 0, prompt), shape, rope);
  auto step = leverage.update(keys, keys);
  for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
  for (Index h = 0; h < shape.kv_heads; ++h)
    for (Index i = sinks; i < prompt - recents; ++i) {
      const auto slot = static_cast<std::size_t>(i);
      const double got = golden.number("compression_ratio") * static_cast<double>(leverage.policy().last_scores(h)[slot]) + static_cast<double>(drawn.policy().last_scores(h)[slot]);
      findings.check(test::close(got, want(h, i), 2e-3, 2e-3), "kv_head ", h, ": score of position ", i, " is ", got, ", expected ", want(h, i));
    }
}

const RegisterGolden kinds{{
    {"kvpress_score tova", check_kvpress_tova},
    {"kvpress_score leverage", check_kvpress_leverage},
    {"kvpress_score noncausal", check_kvpress_noncausal},
    {"kvpress_score compactor", check_kvpress_compactor},
}};

}  // namespace
