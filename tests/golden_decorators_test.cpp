// Policies around policies, and scores from outside, against the public references: AdaKV, CriticalKV, ChunkKV, Merging.

#include <kvsnip/policy/ada_kv.hpp>
#include <kvsnip/policy/chunk_kv.hpp>
#include <kvsnip/policy/critical_kv.hpp>
#include <kvsnip/policy/external_scores.hpp>
#include <kvsnip/policy/merging.hpp>
#include <kvsnip/policy/snapkv.hpp>

#include <limits>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::AdaKV;
using kvsnip::ChunkKV;
using kvsnip::CriticalKV;
using kvsnip::ExternalScores;
using kvsnip::SnapKV;

/// [kv_heads, positions], nothing protected.
ExternalScores external(const Array<float>& scores) {
  return ExternalScores(Eigen::Map<const Eigen::MatrixXf>(scores.data.data(), scores.dim(1), scores.dim(0)), {.recent_window = 0});
}
Index kept_of(const GoldenCase& golden) {
  return static_cast<Index>(static_cast<double>(golden.integer("q_len")) * (1 - golden.number("compression_ratio")));
}
template <class Cache>
void check_mask(const Cache& cache, const GoldenCase& golden, Findings& findings) {
  const auto mask = golden.tensor<std::uint8_t>("out_kept_mask");
  const auto budgets = golden.tensor<std::int32_t>("out_head_budgets");
  for (Index h = 0; h < mask.dim(0); ++h) {
    std::vector<Index> expected;
    for (Index position = 0; position < mask.dim(1); ++position)
      if (mask(h, position) != 0) expected.push_back(position);
    check_same_set(sorted(cache.positions(h)), expected, "kv_head " + std::to_string(h), findings);
    findings.check(cache.size(h) == budgets(h), "kv_head ", h, " holds ", cache.size(h), " slots, expected ", budgets(h));
  }
}

// --- AdaKV

/// AdaKV's own repository, and KVCache-Factory: SnapKV's scores, a floor that is blended in.
void check_adakv_cluster(const GoldenCase& golden, Findings& findings) {
  const Index window = golden.integer("window_size"), prompt = golden.integer("q_len"), base = golden.integer("base_capacity");
  const Shape shape{.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
  const bool skipped = golden.has("skip") && golden.integer("layer_idx") < golden.integer("skip");  // has even budgets
  const std::string group = golden.text("gqa_score_agg");
  const AdaKV<SnapKV> policy(SnapKV{{.observation_window = window,
                                     .kernel_size = golden.integer("kernel_size"),
                                     .pooling = golden.text("pooling") == "maxpool" ? SnapKV::Pooling::max : SnapKV::Pooling::average,
                                     .group = group == "max" ? SnapKV::Group::max : SnapKV::Group::mean}},
                             {.floor = skipped ? 1.0 : golden.number("floor"), .normalize = golden.integer("normalize") == 1});
  const auto queries = golden.tensor<float>("in_queries");
  const auto cache = run_on_queries(shape, base + window, policy, stacked(golden.tensor<float>("in_keys"), 0, prompt), queries);
  if (golden.has_tensor("out_scores") && prompt > base + window)
    check_scores(cache, golden.tensor<float>("out_scores"), 0, prompt - window, (group == "sum" ? static_cast<double>(shape.group_size()) : 1.0) / static_cast<double>(window), findings);
  const auto lens = golden.tensor<std::int32_t>("out_head_lens"), flat = golden.tensor<std::int32_t>("out_kept_flat");
  Index first = 0;
  for (Index h = 0; h < shape.kv_heads; ++h) {
    check_same_set(sorted(cache.positions(h)), {flat.data.begin() + first, flat.data.begin() + first + lens(h)}, "kv_head " + std::to_string(h), findings);
    first += lens(h);
  }
  findings.check(first == flat.dim(0), "head_lens are not of kept_flat");
}
void check_kvpress_adakv(const GoldenCase& golden, Findings& findings) {
  const auto scores = golden.tensor<float>("in_scores");
  const AdaKV<ExternalScores> policy(external(scores), {.floor = golden.number("alpha_safeguard"), .safeguard = AdaKV<ExternalScores>::Safeguard::least});
  const auto keys = no_keys(scores.dim(0), scores.dim(1));
  check_mask(compress(keys, keys, kept_of(golden), policy), golden, findings);
}

// --- CriticalKV

/// in_wo [hidden, query_heads * head_dim]
CriticalKV<ExternalScores>::OutputProjection projection(const GoldenCase& golden) {
  const auto wo = std::make_shared<const Array<float>>(golden.tensor<float>("in_wo"));
  const Index dim = golden.integer("head_dim");
  return [wo, dim](Index query_head) -> Eigen::Ref<const Eigen::MatrixXf> {
    using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    return Eigen::Ref<const Eigen::MatrixXf>(Eigen::Map<const RowMajor>(wo->data.data(), wo->dim(0), wo->dim(1)).middleCols(query_head * dim, dim));
  };
}
template <class P>
auto compress_critical(const GoldenCase& golden, const P& policy) {
  const auto values = golden.tensor<float>("in_values");
  const Shape shape{.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
  KVCache<float, RecordScores<P>> cache(shape, kept_of(golden), RecordScores<P>(policy));
  const Eigen::MatrixXf v = stacked(values, 0, values.dim(1));
  auto step = cache.update(v, v);
  for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
  return cache;
}
void check_kvpress_criticalkv(const GoldenCase& golden, Findings& findings) {
  const auto cache = compress_critical(golden, CriticalKV(external(golden.tensor<float>("in_scores")), projection(golden),
                                                          {.first_stage = golden.number("first_stage_ratio"), .epsilon = static_cast<float>(golden.number("epsilon"))}));
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_scores(cache, golden.tensor<float>("out_scores"), 0, golden.integer("q_len"), 1.0, findings);
}
void check_kvpress_criticaladakv(const GoldenCase& golden, Findings& findings) {
  using Ada = AdaKV<ExternalScores>;
  const Ada shares(external(golden.tensor<float>("in_scores")), {.floor = golden.number("alpha_safeguard"), .safeguard = Ada::Safeguard::least});
  const CriticalKV policy(shares, projection(golden), {.first_stage = golden.number("first_stage_ratio"), .epsilon = static_cast<float>(golden.number("epsilon"))});
  check_mask(compress_critical(golden, policy), golden, findings);
}

// --- ChunkKV

/// The reference keeps whole chunks: as many slots as that are is our budget.
void check_kvpress_chunkkv(const GoldenCase& golden, Findings& findings) {
  const auto scores = golden.tensor<float>("in_scores");
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  const auto keys = no_keys(scores.dim(0), scores.dim(1));
  const auto cache = compress(keys, keys, kept.dim(1), ChunkKV<ExternalScores>(external(scores), {.chunk_length = golden.integer("chunk_length")}));
  check_held(cache, kept, "prompt", findings);
}

// --- Merging

/// in_selected and the last window_size positions stay; theirs are the merged keys and values, in that order.
void check_factory_merge(const GoldenCase& golden, Findings& findings) {
  using Merged = kvsnip::Merging<ExternalScores>;
  const auto keys = golden.tensor<float>("in_keys"), values = golden.tensor<float>("in_values");
  const auto selected = golden.tensor<std::int32_t>("in_selected");
  const Index heads = keys.dim(0), prompt = keys.dim(1), dim = keys.dim(2), window = golden.integer("window_size");
  Eigen::MatrixXf scores = Eigen::MatrixXf::Zero(prompt, heads);
  for (Index h = 0; h < heads; ++h)
    for (Index i = 0; i < selected.dim(1); ++i) scores(selected(h, i), h) = 1;
  const Merged policy(ExternalScores(scores, {.recent_window = window + 1}),
                      {.weights = golden.text("merge") == "pivot" ? Merged::Weights::pivot : Merged::Weights::similarity});
  const auto cache = compress(golden, selected.dim(1) + window, policy);
  const auto want_keys = golden.tensor<float>("out_keys"), want_values = golden.tensor<float>("out_values");
  for (Index h = 0; h < heads; ++h) {
    std::vector<Index> order = row(selected, h);
    for (const Index position : consecutive(prompt - window, prompt)) order.push_back(position);
    check_same_set(sorted(cache.positions(h)), order, "kv_head " + std::to_string(h), findings);
    for (Index i = 0; i < std::ssize(order); ++i) {
      const auto found = std::find(cache.positions(h).begin(), cache.positions(h).end(), order.begin()[i]);
      if (found == cache.positions(h).end()) continue;
      const Index slot = found - cache.positions(h).begin();
      for (Index d = 0; d < dim; ++d) {
        findings.check(close_enough(cache.keys(h)(d, slot), want_keys(h, i, d)), "kv_head ", h, ", position ", *found, ": key ", cache.keys(h)(d, slot), ", expected ", want_keys(h, i, d));
        findings.check(close_enough(cache.values(h)(d, slot), want_values(h, i, d)), "kv_head ", h, ", position ", *found, ": value ", cache.values(h)(d, slot), ", expected ",
                       want_values(h, i, d));
      }
    }
  }
}

const RegisterGolden kinds{{
    {"adakv_cluster", check_adakv_cluster},
    {"factory_merge", check_factory_merge},
    {"kvpress_adakv", check_kvpress_adakv},
    {"kvpress_chunkkv", check_kvpress_chunkkv},
    {"kvpress_criticaladakv", check_kvpress_criticaladakv},
    {"kvpress_criticalkv", check_kvpress_criticalkv},
}};

}  // namespace
