// Budgets of layers and heads, against the public references: pyramids, funnels, SimLayerKV.

#include <kvsnip/layer_budgets.hpp>
#include <kvsnip/policy/sim_layer_kv.hpp>
#include <kvsnip/policy/snapkv.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
namespace layer_budgets = kvsnip::layer_budgets;

void check_budgets(const std::vector<Index>& got, const Array<std::int32_t>& want, Findings& findings) {
  findings.check(std::ssize(got) == want.dim(0), got.size(), " layers, expected ", want.dim(0));
  for (Index layer = 0; layer < std::min(std::ssize(got), want.dim(0)); ++layer)
    findings.check(got.begin()[layer] == want(layer), "layer ", layer, " gets ", got.begin()[layer], ", expected ", want(layer));
}
/// The schedule of KVCache-Factory or of AdaKV's code.
std::vector<Index> schedule(const GoldenCase& golden, Index num_layers, const std::string& beta, bool even_if_short) {
  return layer_budgets::pyramid(num_layers, static_cast<double>(golden.integer("max_capacity_prompt")),
                                {.prompt = golden.integer("q_len"), .observation_window = golden.integer("window_size"), .beta = golden.number(beta), .even_if_short = even_if_short});
}
void check_pyramid_budget(const GoldenCase& golden, Findings& findings) {
  const bool adakv = golden.text("entry").find("pyram_mode") != std::string::npos;
  check_budgets(schedule(golden, golden.integer("num_hidden_layers"), "beta", !adakv), golden.tensor<std::int32_t>("out_kept"), findings);
}
void check_kvpress_pyramid_budget(const GoldenCase& golden, Findings& findings) {
  const Index prompt = golden.integer("q_len");
  const double budget = static_cast<double>(prompt) * (1 - golden.number("compression_ratio"));
  check_budgets(layer_budgets::pyramid(golden.integer("num_hidden_layers"), budget,
                                       {.prompt = prompt, .observation_window = golden.integer("window_size"), .beta = golden.number("beta"), .window_apart = false}),
                golden.tensor<std::int32_t>("out_budgets"), findings);
}
void check_kvpress_n_kept(const GoldenCase& golden, Findings& findings) {
  const auto tokens = golden.tensor<std::int32_t>("in_q_len"), want = golden.tensor<std::int32_t>("out_n_kept");
  const auto ratio = golden.tensor<float>("in_ratio");
  for (Index i = 0; i < tokens.dim(0); ++i) {
    const double as_written = std::round(static_cast<double>(ratio(i)) * 1e5) / 1e5;
    const Index got = layer_budgets::after_removing(as_written, tokens(i));
    findings.check(got == want(i), tokens(i), " tokens less ", as_written, ": ", got, ", expected ", want(i));
  }
}
/// A layer of a pyramid: SnapKV with the layer's budget.
void check_pyramid_cluster(const GoldenCase& golden, Findings& findings) {
  using kvsnip::SnapKV;
  const Index window = golden.integer("window_size"), prompt = golden.integer("q_len");
  const Shape shape{.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
  const Index budget = schedule(golden, golden.integer("num_hidden_layers"), "beta", true)[static_cast<std::size_t>(golden.integer("layer_idx"))];
  const auto cache = run_on_queries(shape, budget,
                                    SnapKV{{.observation_window = window,
                                            .kernel_size = golden.integer("kernel_size"),
                                            .pooling = golden.text("pooling") == "maxpool" ? SnapKV::Pooling::max : SnapKV::Pooling::average,
                                            .group = golden.text_or("gqa_score_agg", "mean") == "max" ? SnapKV::Group::max : SnapKV::Group::mean}},
                                    stacked(golden.tensor<float>("in_keys"), 0, prompt, golden.has("kv_repeat") ? golden.integer("kv_repeat") : 1), golden.tensor<float>("in_queries"));
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
}
void check_cc_pattern(const GoldenCase& golden, Findings& findings) {
  std::vector<Index> normalized;
  std::stringstream list(golden.text("max_cache_length"));
  for (std::string word; std::getline(list, word, ' ');) normalized.push_back(layer_budgets::from_share(std::stod(word), golden.integer("max_seq_length")));
  const auto want = golden.tensor<std::int32_t>("out_normalized");
  for (Index i = 0; i < want.dim(0); ++i) findings.check(i < std::ssize(normalized) && normalized.begin()[i] == want(i), "budget ", i, " is not ", want(i));
  const std::string pattern = golden.text("pattern");
  const Index layers = golden.integer("n_layers");
  std::vector<Index> got;
  if (pattern == "tile") got = layer_budgets::tile(normalized, layers);
  else if (pattern == "repeat") got = layer_budgets::repeat(normalized, layers);
  else got = layer_budgets::funnel(layers, normalized.front(), golden.integer("max_seq_length"));
  if (pattern == "pyramid") std::reverse(got.begin(), got.end());
  check_budgets(got, golden.tensor<std::int32_t>("out_lengths"), findings);
}
/// A lazy layer keeps the first n_initial and the last n_recent - n_last: its budget.
void check_kvpress_simlayer(const GoldenCase& golden, Findings& findings) {
  const Shape shape{.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
  const Index last = golden.integer("n_last"), recent = golden.integer("n_recent"), initial = golden.integer("n_initial"), prompt = golden.integer("q_len");
  const kvsnip::SimLayerKV policy{{.num_sinks = initial, .recent_window = recent, .num_queries = last, .threshold = static_cast<float>(golden.number("lazy_threshold"))}};
  // A window counts the incoming token: the budget has a slot for it, which the reference leaves to the next update.
  const auto cache = run_on_queries(shape, initial + recent, policy, stacked(golden.tensor<float>("in_keys"), 0, prompt), golden.tensor<float>("in_queries"));
  findings.check(cache.policy().is_lazy() == (golden.integer("lazy") == 1), "lazy: ", cache.policy().is_lazy(), ", expected ", golden.integer("lazy"));
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < shape.kv_heads; ++h) {
    std::vector<Index> held = sorted(cache.positions(h));
    if (golden.integer("lazy") == 1) held.erase(held.begin() + initial, held.begin() + initial + last);
    check_same_set(held, row(kept, h), "kv_head " + std::to_string(h), findings);
  }
}

const RegisterGolden kinds{{
    {"cc_pattern", check_cc_pattern},
    {"factory_cluster pyramidkv", check_pyramid_cluster},
    {"kvpress_n_kept", check_kvpress_n_kept},
    {"kvpress_pyramid_budget", check_kvpress_pyramid_budget},
    {"kvpress_simlayer", check_kvpress_simlayer},
    {"pyramid_budget", check_pyramid_budget},
}};

}  // namespace
