// Prompts scored by the rows of their last queries, as the public references score them: SnapKV, Finch.

#include <kvsnip/policy/finch.hpp>
#include <kvsnip/policy/snapkv.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::SnapKV;
using SnapCache = RowsCache<SnapKV>;

/// The caches of SnapKV's own repository and of KVCache-Factory.
void check_snapkv_cluster(const GoldenCase& golden, Findings& findings) {
  const Index repeat = golden.integer("kv_repeat"), window = golden.integer("window_size"),
              prompt = golden.integer("q_len");
  const Index capacity = golden.integer("max_capacity_prompt");
  const Index kv_heads = golden.integer("n_kv_heads") * repeat;
  const Shape shape{
      .query_heads = golden.integer("n_heads"), .kv_heads = kv_heads, .head_dim = golden.integer("head_dim")};
  const std::string group = golden.text_or("gqa_score_agg", "unused");
  const SnapKV policy{{.observation_window = window,
                       .kernel_size = golden.integer("kernel_size"),
                       .pooling = golden.text("pooling") == "maxpool" ? SnapKV::Pooling::max : SnapKV::Pooling::average,
                       .group = group == "max" ? SnapKV::Group::max : SnapKV::Group::mean}};
  const Eigen::MatrixXf keys = stacked(golden.tensor<float>("in_keys"), 0, prompt, repeat);
  const Array<float> queries = golden.tensor<float>("in_queries");
  const Array<std::int32_t> kept = golden.tensor<std::int32_t>("out_kept");

  const SnapCache cache = run_on_queries(shape, capacity, policy, keys, queries);
  for (Index h = 0; h < kv_heads; ++h) {
    const std::vector<Index> held = sorted(cache.positions(h));
    if (golden.text("boundary_tie") == "boundary")
      check_best(held, golden.tensor<float>("out_scores"), h, window, capacity, findings);
    else
      check_same_set(held, row(kept, h), "kv_head " + std::to_string(h), findings);
  }
  if (!golden.has_tensor("out_scores")) return;
  // A prompt that fits is not scored here, as it is there: a budget one short makes us say what the scores would be.
  const SnapCache scored = prompt > capacity ? cache : run_on_queries(shape, prompt - 1, policy, keys, queries);
  const double sum_over_group = group == "sum" ? static_cast<double>(shape.group_size()) : 1.0;
  check_scores(scored, golden.tensor<float>("out_scores"), 0, prompt - window, sum_over_group, findings);
}

void check_kvpress_snapkv(const GoldenCase& golden, Findings& findings) {
  const Index window = golden.integer("window_size"), prompt = golden.integer("q_len"),
              budget = golden.integer("n_kept");
  const Shape shape{.query_heads = golden.integer("n_heads"),
                    .kv_heads = golden.integer("n_kv_heads"),
                    .head_dim = golden.integer("head_dim")};
  const SnapKV policy{{.observation_window = window, .kernel_size = golden.integer("kernel_size")}};
  const SnapCache cache =
      golden.has_tensor("in_attn_window")
          ? run_on_attention(shape, budget, policy, golden.tensor<float>("in_attn_window"))
          : run_on_queries(shape, budget, policy, stacked(golden.tensor<float>("in_keys"), 0, prompt),
                           golden.tensor<float>("in_queries"));
  const Array<std::int32_t> kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < shape.kv_heads; ++h)
    check_same_set(sorted(cache.positions(h)), row(kept, h), "kv_head " + std::to_string(h), findings);
  check_scores(cache, golden.tensor<float>("out_scores"), 0, prompt - window, 1.0 / static_cast<double>(window),
               findings);
}

void check_kvpress_finch(const GoldenCase& golden, Findings& findings) {
  const Index window = golden.integer("window_size"), prompt = golden.integer("q_len");
  const Shape shape{.query_heads = golden.integer("n_heads"),
                    .kv_heads = golden.integer("n_kv_heads"),
                    .head_dim = golden.integer("head_dim")};
  const kvsnip::Finch policy{
      {.observation_window = window, .normalize = golden.text_or("normalize_scores", "1") == "1"}};
  const auto cache =
      run_on_queries(shape, golden.integer("n_kept"), policy, stacked(golden.tensor<float>("in_keys"), 0, prompt),
                     golden.tensor<float>("in_queries"));
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < shape.kv_heads; ++h)
    check_same_set(sorted(cache.positions(h)), row(kept, h), "kv_head " + std::to_string(h), findings);
  check_scores(cache, golden.tensor<float>("out_scores"), 0, prompt - window, 1.0, findings);
}

const RegisterGolden kinds{{
    {"snapkv_official", check_snapkv_cluster},
    {"factory_cluster snapkv", check_snapkv_cluster},
    {"kvpress_score finch", check_kvpress_finch},
    {"kvpress_score snapkv", check_kvpress_snapkv},
}};

}  // namespace
