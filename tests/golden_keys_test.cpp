// Policies that look at keys and values, against the public references: KeyNorm, KeyDiff, QFilter, CUR, LagKV.

#include <kvsnip/policy/cur.hpp>
#include <kvsnip/policy/key_diff.hpp>
#include <kvsnip/policy/key_norm.hpp>
#include <kvsnip/policy/lag_kv.hpp>
#include <kvsnip/policy/q_filter.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::KeyDiff;
using kvsnip::KeyNorm;

// --- KeyNorm

/// The reference's recent_window leaves the incoming token out.
KeyNorm key_norm_of_cold_compress(const GoldenCase& golden) {
  return KeyNorm{{.num_sinks = golden.integer("global_tokens"),
                  .recent_window = golden.integer("recent_window") + 1,
                  .refill_interval = 1}};
}
const KeyNorm plain_key_norm{{.num_sinks = 0, .recent_window = 0}};

void check_decode_l2(const GoldenCase& golden, Findings& findings) {
  const auto largest_norm = [](const auto& cache, Index heads) {
    double largest = 0;
    for (Index h = 0; h < heads; ++h)
      for (const float score : cache.policy().last_scores(h)) largest = std::max(largest, -static_cast<double>(score));
    return largest;
  };
  check_decode(golden, key_norm_of_cold_compress(golden), golden.tensor<float>("in_keys"), largest_norm, findings);
}
void check_compress_l2(const GoldenCase& golden, Findings& findings) {
  const auto cache = compress(golden, golden.integer("max_cache_length"), key_norm_of_cold_compress(golden));
  const Index prompt = golden.integer("prompt_length");
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_scores(cache, golden.tensor<float>("out_priority"), golden.integer("global_tokens"),
               prompt - golden.integer("recent_window"), 1.0, findings);
}
void check_attention_l2(const GoldenCase& golden, Findings& findings) {
  check_attention(golden, key_norm_of_cold_compress(golden), findings);
}
void check_kvpress_knorm(const GoldenCase& golden, Findings& findings) {
  check_press(golden, plain_key_norm, 0, golden.integer("q_len"), findings);
}
/// Layers to be skipped have no budget.
void check_factory_l2norm(const GoldenCase& golden, Findings& findings) {
  const std::vector<Index> skipped = golden.integers("skip_layers");
  const bool skips = std::find(skipped.begin(), skipped.end(), golden.integer("layer_idx")) != skipped.end();
  const Index budget = skips ? kvsnip::unlimited_budget : golden.integer("max_capacity_prompt");
  check_held(compress(golden, budget, plain_key_norm), golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
}
/// Chunks are compressed each on its own: a cache for each.
void check_chunk_knorm(const GoldenCase& golden, Findings& findings) {
  const auto keys = golden.tensor<float>("in_keys");
  const Index heads = keys.dim(0), size = golden.integer("size");
  const double kept_fraction = 1 - golden.number("compression_ratio");
  std::vector<std::vector<Index>> held(static_cast<std::size_t>(heads));
  for (Index first = 0; first < keys.dim(1); first += size) {
    const Index count = std::min(size, keys.dim(1) - first);
    const Index budget = std::max<Index>(1, static_cast<Index>(static_cast<double>(count) * kept_fraction));
    KVCache<float, KeyNorm> cache({.query_heads = heads, .kv_heads = heads, .head_dim = keys.dim(2)}, budget,
                                  plain_key_norm);
    const Eigen::MatrixXf k = stacked(keys, first, count);
    auto step = cache.update(k, k, {.first_position = first});
    for (Index h = 0; h < heads; ++h) step.done(h);
    for (Index h = 0; h < heads; ++h)
      held.begin()[h].insert(held.begin()[h].end(), cache.positions(h).begin(), cache.positions(h).end());
  }
  for (Index h = 0; h < heads; ++h)
    check_same_set(held.begin()[h], row(golden.tensor<std::int32_t>("out_kept"), h), "kv_head " + std::to_string(h),
                   findings);
}

// --- KeyDiff

const KeyDiff plain_key_diff{{.num_sinks = 0, .recent_window = 0}};

void check_kvpress_keydiff(const GoldenCase& golden, Findings& findings) {
  check_press(golden, plain_key_diff, 0, golden.integer("q_len"), findings);
}
/// A prompt in blocks, cut to the budget after each: every block is a series of its own.
void check_block_keydiff(const GoldenCase& golden, Findings& findings) {
  const auto keys = golden.tensor<float>("in_keys");
  const Index heads = keys.dim(0), size = golden.integer("size"), tokens = keys.dim(1);
  const auto budget = static_cast<Index>(static_cast<double>(tokens) * (1 - golden.number("compression_ratio")));
  KVCache<float, KeyDiff> cache({.query_heads = heads, .kv_heads = heads, .head_dim = keys.dim(2)}, budget,
                                plain_key_diff);
  const auto append = [&](Index first, Index count, bool more) {
    const Eigen::MatrixXf k = stacked(keys, first, count);
    auto step = cache.update(k, k, {.more = more});
    for (Index h = 0; h < heads; ++h) step.done(h);
  };
  append(0, budget, false);
  for (Index first = budget; first < tokens; first += size) {
    append(first, std::min(size, tokens - first), true);
    append(first, 0, false);
  }
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
}

// --- the other policies that look at keys and values

void check_kvpress_qfilter(const GoldenCase& golden, Findings& findings) {
  const auto filters = golden.tensor<float>("in_filters");  // [kv_heads, dim]
  const kvsnip::QFilter policy(Eigen::Map<const Eigen::MatrixXf>(filters.data.data(), filters.dim(1), filters.dim(0)),
                               {.num_sinks = 0, .recent_window = 0});
  check_press(golden, policy, 0, golden.integer("q_len"), findings);
}
void check_kvpress_cur(const GoldenCase& golden, Findings& findings) {
  using kvsnip::CUR;
  const std::string leverage = golden.text_or("leverage_type", "kv_product");
  const Index sinks = golden.has("num_sinks") ? golden.integer("num_sinks") : 4;
  const Index window = golden.has("local_window_size") ? golden.integer("local_window_size") : 16;
  const CUR policy{{.leverage = leverage == "kv_product" ? CUR::Leverage::product
                                : leverage == "kv_avg"   ? CUR::Leverage::mean
                                : leverage == "key"      ? CUR::Leverage::key
                                                         : CUR::Leverage::value,
                    .local_window = golden.text_or("use_local_approximation", "1") == "1" ? window : 0,
                    .num_sinks = sinks,
                    .recent_window = 0}};
  check_press(golden, policy, sinks, golden.integer("q_len"), findings);
}
/// What is not judged scores 1 here and ties with its like, the newer first; there so do the last partitions, while in a
/// prompt too short for two partitions scores rise with the position: what stays is the same, and is compared.
void check_kvpress_lagkv(const GoldenCase& golden, Findings& findings) {
  const Index sinks = golden.integer("n_sink"), lag = golden.integer("lag_size"), budget = golden.integer("n_kept");
  const kvsnip::LagKV policy{{.lag_size = lag,
                              .cross_scoring = golden.text_or("cross_scoring", "0") == "1",
                              .num_sinks = sinks,
                              .recent_window = 0}};
  const auto scores = golden.tensor<float>("out_scores");
  const Index prompt = scores.dim(1);
  const auto cache = compress(golden, budget, policy);
  const bool too_short = prompt < sinks + 2 * lag;
  if (!too_short) check_scores(cache, scores, 0, prompt, 1.0, findings);
  for (Index h = 0; h < cache.shape().kv_heads; ++h) {
    if (golden.text("boundary_tie") == "boundary")
      check_best(sorted(cache.positions(h)), scores, h, 0, budget, findings);
    else
      check_same_set(sorted(cache.positions(h)), row(golden.tensor<std::int32_t>("out_kept"), h),
                     "kv_head " + std::to_string(h), findings);
  }
}

const RegisterGolden kinds{{
    {"cc_attention l2", check_attention_l2},
    {"cc_compress l2", check_compress_l2},
    {"cc_decode l2", check_decode_l2},
    {"factory_l2norm l2norm", check_factory_l2norm},
    {"kvpress_score keydiff", check_kvpress_keydiff},
    {"kvpress_wrapped block_keydiff", check_block_keydiff},
    {"kvpress_score knorm", check_kvpress_knorm},
    {"kvpress_wrapped chunk_knorm", check_chunk_knorm},
    {"kvpress_score cur", check_kvpress_cur},
    {"kvpress_score lagkv", check_kvpress_lagkv},
    {"kvpress_score qfilter", check_kvpress_qfilter},
}};

}  // namespace
