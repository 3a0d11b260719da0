// What the public reference implementations did with fixed inputs, done again through the public interface.
//
// The cases are found at run time; the folder's README says what each kind feeds and expects. Two differences are ours:
// kept positions are ascending (references return them best first), so they are compared as sets; and our scores are
// sums over the window's rows, so they are divided where a reference takes the mean.

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/cur.hpp>
#include <kvsnip/policy/finch.hpp>
#include <kvsnip/policy/keep_it_odd.hpp>
#include <kvsnip/policy/key_diff.hpp>
#include <kvsnip/policy/key_norm.hpp>
#include <kvsnip/policy/lag_kv.hpp>
#include <kvsnip/policy/q_filter.hpp>
#include <kvsnip/policy/snapkv.hpp>
#include <kvsnip/policy/streaming_llm.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/dictated.hpp"
#include "support/golden_run.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/record_scores.hpp"
#include "support/tolerance.hpp"

namespace {

using kvsnip::Index;
using kvsnip::KeepItOdd;
using kvsnip::KeyDiff;
using kvsnip::KeyNorm;
using kvsnip::KVCache;
using kvsnip::Shape;
using kvsnip::SnapKV;
using kvsnip::StreamingLLM;
using test::Array;
using test::consecutive;
using test::Findings;
using test::GoldenCase;
using test::GoldenRunner;
using test::sorted;

/// As the README of the vectors says.
bool close_enough(double got, double want) { return test::close(got, want, 2e-4, 1e-5); }

/// [heads, tokens, dim], tokens [first, first + count) -> (heads * dim, count), each head `repeat` times in a row.
Eigen::MatrixXf stacked(const Array<float>& x, Index first, Index count, Index repeat = 1) {
  const Index heads = x.dim(0), dim = x.dim(2);
  Eigen::MatrixXf out(heads * repeat * dim, count);
  for (Index row = 0; row < out.rows(); ++row)
    for (Index t = 0; t < count; ++t) out(row, t) = x(row / dim / repeat, first + t, row % dim);
  return out;
}
/// [query_heads, queries, dim], the last `count` of a kv_head -> (dim, count * group), a query's heads side by side.
Eigen::MatrixXf side_by_side(const Array<float>& x, Index kv_head, Index count, Index group) {
  Eigen::MatrixXf out(x.dim(2), count * group);
  for (Index column = 0; column < out.cols(); ++column)
    for (Index d = 0; d < out.rows(); ++d)
      out(d, column) = x(kv_head * group + column % group, x.dim(1) - count + column / group, d);
  return out;
}
/// Row `i` of a list of positions.
std::vector<Index> row(const Array<std::int32_t>& positions, Index i) {
  std::vector<Index> result;
  for (Index j = 0; j < positions.dim(1); ++j) result.push_back(positions(i, j));
  return result;
}
std::string to_string(std::span<const Index> positions) {
  std::string text;
  for (const Index position : positions) text += (text.empty() ? "" : " ") + std::to_string(position);
  return text;
}
void check_same_set(const std::vector<Index>& got, const std::vector<Index>& want, const std::string& what,
                    Findings& findings) {
  findings.check(sorted(got) == sorted(want), what, ": held ", to_string(sorted(got)), "; expected ",
                 to_string(sorted(want)));
}

// --- prompts scored by the rows of their last queries: SnapKV, Finch

template <class P>
using RowsCache = KVCache<float, test::RecordScores<P>>;
using SnapCache = RowsCache<SnapKV>;

Eigen::MatrixXf random_keys(const Shape& shape, Index tokens) {
  return test::Random(1).matrix(shape.kv_heads * shape.head_dim, tokens);
}

/// A prompt whose wanted rows come from the case's queries, the last of the prompt.
template <class P>
RowsCache<P> run_on_queries(const Shape& shape, Index budget, const P& policy, const Eigen::MatrixXf& keys,
                            const Array<float>& queries) {
  RowsCache<P> cache(shape, budget, test::RecordScores<P>(policy));
  auto step = cache.update(keys, keys);
  const Index wanted = step.wanted_rows();
  for (Index h = 0; h < shape.kv_heads; ++h) {
    if (wanted > 0)
      step.on_queries(h, side_by_side(queries, h, wanted, shape.group_size()));
    else
      step.done(h);
  }
  return cache;
}
/// A prompt whose wanted rows come from the case's weights [query_heads, rows, prompt], of which the last are taken.
SnapCache run_on_attention(const Shape& shape, Index budget, const SnapKV& policy, const Array<float>& attention) {
  const Index prompt = attention.dim(2), group = shape.group_size();
  SnapCache cache(shape, budget, test::RecordScores<SnapKV>(policy));
  const Eigen::MatrixXf keys = random_keys(shape, prompt);
  SnapCache::Step step = cache.update(keys, keys);
  const Index wanted = step.wanted_rows();
  for (Index h = 0; h < shape.kv_heads; ++h) {
    if (wanted > 0)
      step.on_attention(h, side_by_side(attention, h, wanted, group));
    else
      step.done(h);
  }
  return cache;
}

/// Scores of the prefix [0, end) against the case's, ours times `factor`.
template <class Cache>
void check_scores(const Cache& cache, const Array<float>& want, Index begin, Index end, double factor,
                  Findings& findings) {
  for (Index h = 0; h < cache.shape().kv_heads; ++h) {
    const std::vector<float>& got = cache.policy().last_scores(h);
    findings.check(std::ssize(got) >= end, "kv_head ", h, ": no scores were asked for");
    for (Index i = begin; i < std::min<Index>(end, std::ssize(got)); ++i) {
      const double score = factor * static_cast<double>(got.begin()[i]);
      findings.check(close_enough(score, want(h, i)), "kv_head ", h, ": score of position ", i, " is ", score,
                     ", expected ", want(h, i));
    }
  }
}

/// Where equal scores straddle the cut there is no one right set: the window must be whole, the count right, and
/// nothing kept that scores below the last place.
/// @param scores  [kv_heads, prefix]
void check_best(const std::vector<Index>& held, const Array<float>& scores, Index h, Index window, Index budget,
                Findings& findings) {
  const Index prefix = scores.dim(1);
  findings.check(std::ssize(held) == budget, "kv_head ", h, ": holds ", held.size(), " positions, expected ", budget);
  for (const Index position : consecutive(prefix, prefix + window))
    findings.check(std::binary_search(held.begin(), held.end(), position), "kv_head ", h, ": position ", position,
                   " of the window is gone");
  std::vector<float> best;
  for (Index i = 0; i < prefix; ++i) best.push_back(scores(h, i));
  std::sort(best.begin(), best.end(), std::greater<>());
  const float last_place = best[static_cast<std::size_t>(budget - window - 1)];
  for (const Index position : held)
    findings.check(
        position >= prefix || scores(h, position) >= last_place || close_enough(scores(h, position), last_place),
        "kv_head ", h, ": position ", position, " scores ", scores(h, std::min(position, prefix - 1)),
        ", below the last place ", last_place);
}

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

/// cold-compress' prompt compressor: SnapKV with its global tokens as sinks; the group is averaged already.
void check_compress_heavy_hitter(const GoldenCase& golden, Findings& findings) {
  const Index kv_heads = golden.integer("n_kv_heads"), prompt = golden.integer("prompt_length"),
              sinks = golden.integer("global_tokens");
  const Index window = golden.integer("observation_len");
  const Shape shape{.query_heads = kv_heads, .kv_heads = kv_heads, .head_dim = golden.integer("head_dim")};
  const SnapKV policy{{.observation_window = window,
                       .kernel_size = golden.integer("kernel_size"),
                       .pool_over = SnapKV::PoolOver::row,
                       .count_padding = false,
                       .num_sinks = sinks}};
  const Array<float> attention = golden.tensor<float>(golden.has_tensor("in_attn") ? "in_attn" : "in_attn_last16");
  const SnapCache cache = run_on_attention(shape, golden.integer("max_cache_length"), policy, attention);
  const Array<std::int32_t> kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < kv_heads; ++h)
    check_same_set(sorted(cache.positions(h)), row(kept, h), "kv_head " + std::to_string(h), findings);
  check_scores(cache, golden.tensor<float>("out_priority"), sinks, prompt - window, 1.0 / static_cast<double>(window),
               findings);
}

// --- policies whose every choice is compared, by slot and by score

using test::Dictated;
using test::Dictation;

/// A row for each kv_head; the reference has one row where all heads share the choice.
std::vector<std::vector<Index>> row_by_head(const Array<std::int32_t>& positions, Index kv_heads) {
  std::vector<std::vector<Index>> rows;
  for (Index h = 0; h < kv_heads; ++h) rows.push_back(row(positions, std::min(h, positions.dim(0) - 1)));
  return rows;
}
/// [rows, slots], -1 for free slots.
template <class Cache>
void check_held(const Cache& cache, const Array<std::int32_t>& want, const std::string& what, Findings& findings) {
  for (Index h = 0; h < cache.shape().kv_heads; ++h) {
    std::vector<Index> expected = row(want, std::min(h, want.dim(0) - 1));
    std::erase(expected, -1);
    check_same_set(sorted(cache.positions(h)), expected, what + ", kv_head " + std::to_string(h), findings);
  }
}
/// Positions by slot; the reference marks a free slot with -1.
std::vector<Index> padded(std::span<const Index> positions, Index slots) {
  std::vector<Index> result(positions.begin(), positions.end());
  result.resize(static_cast<std::size_t>(slots), -1);
  return result;
}
/// The reference's choices were among the best by our scores.
void check_dictated(const Dictation& dictation, Findings& findings) {
  findings.check(dictation.asked > 0, "no choice had to be made");
  findings.check(dictation.worst <= 1e-5, "a choice of the reference is worse than another by ", dictation.worst);
}

/// A prompt, [kv_heads, tokens, dim].
template <class P>
KVCache<float, test::RecordScores<P>> compress(const Array<float>& keys, const Array<float>& values, Index budget,
                                               const P& policy) {
  const Shape shape{.query_heads = keys.dim(0), .kv_heads = keys.dim(0), .head_dim = keys.dim(2)};
  KVCache<float, test::RecordScores<P>> cache(shape, budget, test::RecordScores<P>(policy));
  auto step = cache.update(stacked(keys, 0, keys.dim(1)), stacked(values, 0, keys.dim(1)));
  for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
  return cache;
}
/// The case's keys and values (the keys once more, if it has no values).
template <class P>
KVCache<float, test::RecordScores<P>> compress(const GoldenCase& golden, Index budget, const P& policy) {
  const auto keys = golden.tensor<float>("in_keys");
  return compress(keys, golden.has_tensor("in_values") ? golden.tensor<float>("in_values") : keys, budget, policy);
}
/// kvpress: what stays, and the scores of positions [first, end).
template <class P>
void check_press(const GoldenCase& golden, const P& policy, Index first, Index end, Findings& findings) {
  const auto cache = compress(golden, golden.integer("n_kept"), policy);
  check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
  check_scores(cache, golden.tensor<float>("out_scores"), first, end, 1.0, findings);
}

/// cold-compress' decode cache: our scores of what may go are the reference's (plus `shift`), and so are the victims.
/// @param keys   [kv_heads, tokens, dim]
/// @param shift  of all heads' scores at a step, which they are the same by
template <class P, class Shift>
void check_decode(const GoldenCase& golden, const P& policy, const Array<float>& keys, const Shift& shift,
                  Findings& findings) {
  const Index heads = keys.dim(0), length = golden.integer("max_cache_length"), prompt = golden.integer("prompt_length");
  const auto dictation = std::make_shared<Dictation>();
  KVCache<float, Dictated<P>> cache({.query_heads = heads, .kv_heads = heads, .head_dim = keys.dim(2)}, length,
                                    Dictated<P>(policy, dictation));
  const auto append = [&](Index first, Index count) {
    const Eigen::MatrixXf k = stacked(keys, first, count);
    auto step = cache.update(k, k);
    for (Index h = 0; h < heads; ++h) step.done(h);
  };
  append(0, prompt);
  const auto slots = golden.tensor<std::int32_t>("out_evicted_slot"),
             positions = golden.tensor<std::int32_t>("out_evicted_pos");
  const auto scores = golden.tensor<float>("out_scores");
  for (Index step = 0; step < golden.integer("decode_steps"); ++step) {
    std::vector<std::vector<Index>> before, victims;
    for (Index h = 0; h < heads; ++h) {
      before.push_back(padded(cache.positions(h), length));
      victims.push_back({slots(step, std::min(h, slots.dim(1) - 1))});
    }
    dictation->expect(victims);
    const bool full = cache.size(0) == length;
    append(prompt + step, 1);
    for (Index h = 0; h < heads; ++h) {
      const Index reference_head = std::min(h, slots.dim(1) - 1), slot = victims.begin()[h].front();
      const Index evicted = before.begin()[h].begin()[slot];
      findings.check(evicted == positions(step, reference_head), "step ", step, ", kv_head ", h, ": evicted ", evicted,
                     ", expected ", positions(step, reference_head));
      findings.check(cache.positions(h)[static_cast<std::size_t>(slot)] == prompt + step, "step ", step, ", kv_head ",
                     h, ": slot ", slot, " was not the one written");
      for (Index i = 0; full && i < length; ++i) {
        const double got = static_cast<double>(cache.policy().last_scores(h).begin()[i]) + shift(cache, heads);
        const float want = scores(step, reference_head, i);
        findings.check(std::isinf(want) || close_enough(got, want), "step ", step, ", kv_head ", h, ": slot ", i,
                       " scores ", got, ", expected ", want);
      }
    }
  }
  check_held(cache, golden.tensor<std::int32_t>("out_final_pos"), "at the end", findings);
  check_dictated(*dictation, findings);
}

/// The whole attention layer: grouped queries, prompt, compression, decode. Victims are the reference's.
template <class P>
void check_attention(const GoldenCase& golden, const P& policy, Findings& findings) {
  const Shape shape{.query_heads = golden.integer("n_heads"),
                    .kv_heads = golden.integer("n_kv_heads"),
                    .head_dim = golden.integer("head_dim")};
  const Index prompt = golden.integer("prompt_length"), steps = golden.integer("decode_steps"),
              length = golden.integer("max_cache_length");
  const auto dictation = std::make_shared<Dictation>();
  KVCache<float, Dictated<P>> cache(shape, length, Dictated<P>(policy, dictation));
  const auto q = golden.tensor<float>("in_q"), k = golden.tensor<float>("in_k"), v = golden.tensor<float>("in_v");
  const auto attend = [&](Index first, Index tokens) {
    auto step = cache.update(stacked(k, first, tokens), stacked(v, first, tokens));
    Eigen::MatrixXf out(shape.query_heads * shape.head_dim, tokens);
    kvsnip::attend(step, stacked(q, first, tokens), out);
    return out;
  };

  const auto after_prompt = golden.tensor<std::int32_t>("out_pos_after_prefill");
  dictation->expect(row_by_head(after_prompt, shape.kv_heads));
  const Eigen::MatrixXf prompt_out = attend(0, prompt);
  const auto y_prompt = golden.tensor<float>("out_y_prefill"), y = golden.tensor<float>("out_y");
  for (Index i = 0; i < prompt_out.rows(); ++i)
    findings.check(close_enough(prompt_out(i, prompt - 1), y_prompt(i)), "last row of the prompt, output ", i, " is ",
                   prompt_out(i, prompt - 1), ", expected ", y_prompt(i));
  check_held(cache, after_prompt, "after the prompt", findings);

  const auto slots = golden.tensor<std::int32_t>("out_evicted_slot"),
             positions = golden.tensor<std::int32_t>("out_evicted_pos");
  for (Index step = 0; step < steps; ++step) {
    std::vector<std::vector<Index>> before, victims;
    for (Index h = 0; h < shape.kv_heads; ++h) {
      const Index reference_head = std::min(h, slots.dim(1) - 1);
      victims.push_back({slots(step, reference_head)});
      before.push_back(padded(cache.positions(h), length));
      findings.check(before.back().begin()[victims.back().front()] == positions(step, reference_head), "step ", step,
                     ", kv_head ", h, ": evicts ", before.back().begin()[victims.back().front()], ", expected ",
                     positions(step, reference_head));
    }
    dictation->expect(victims);
    const Eigen::MatrixXf out = attend(prompt + step, 1);
    for (Index h = 0; h < shape.kv_heads; ++h)
      findings.check(padded(cache.positions(h), length).begin()[victims.begin()[h].front()] == prompt + step, "step ",
                     step, ", kv_head ", h, ": slot ", victims.begin()[h].front(), " was not the one written");
    for (Index i = 0; i < out.rows(); ++i)
      findings.check(close_enough(out(i, 0), y(step, i)), "step ", step, ", output ", i, " is ", out(i, 0),
                     ", expected ", y(step, i));
  }
  check_held(cache, golden.tensor<std::int32_t>("out_final_pos"), "at the end", findings);
  check_dictated(*dictation, findings);
}

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

// --- KeepItOdd

KeepItOdd keep_it_odd(const GoldenCase& golden) {
  return KeepItOdd{{.num_sinks = golden.integer("global_tokens"),
                    .recent_window = golden.integer("recent_window") + 1,
                    .refill_interval = 1}};
}
/// Keys of zeros, for policies that look at positions alone.
Array<float> no_keys(Index kv_heads, Index tokens) {
  return {{kv_heads, tokens, 1}, std::vector<float>(static_cast<std::size_t>(kv_heads * tokens))};
}
void check_decode_keep_it_odd(const GoldenCase& golden, Findings& findings) {
  const Index tokens = golden.integer("prompt_length") + golden.integer("decode_steps");
  check_decode(golden, keep_it_odd(golden), no_keys(golden.integer("n_kv_heads"), tokens),
               [](const auto&, Index) { return 0.0; }, findings);
}
/// The reference's priorities break ties by position, as our shared code does: what stays is compared.
void check_compress_keep_it_odd(const GoldenCase& golden, Findings& findings) {
  const auto keys = no_keys(golden.integer("n_kv_heads"), golden.integer("prompt_length"));
  check_held(compress(keys, keys, golden.integer("max_cache_length"), keep_it_odd(golden)),
             golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
}
void check_attention_keep_it_odd(const GoldenCase& golden, Findings& findings) {
  check_attention(golden, keep_it_odd(golden), findings);
}

// --- positions alone: StreamingLLM

using StreamCache = KVCache<float, StreamingLLM>;

StreamCache stream_cache(Index kv_heads, Index budget, Index num_sinks) {
  return StreamCache({.query_heads = kv_heads, .kv_heads = kv_heads, .head_dim = 2}, budget,
                     StreamingLLM{{.num_sinks = num_sinks}});
}
/// @return the slot of the last new token, by kv_head
std::vector<Index> append(StreamCache& cache, Index tokens) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(cache.shape().kv_heads * cache.shape().head_dim, tokens);
  StreamCache::Step step = cache.update(zeros, zeros);
  std::vector<Index> slots;
  for (Index h = 0; h < cache.shape().kv_heads; ++h) slots.push_back(step.new_slots(h).back());
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
  return slots;
}
void check_held_by_all(const StreamCache& cache, const std::vector<Index>& want, const std::string& what,
                       Findings& findings) {
  for (Index h = 0; h < cache.shape().kv_heads; ++h)
    check_same_set(sorted(cache.positions(h)), want, what + ", kv_head " + std::to_string(h), findings);
}

void check_compress_recent_global(const GoldenCase& golden, Findings& findings) {
  StreamCache cache =
      stream_cache(golden.integer("n_kv_heads"), golden.integer("max_cache_length"), golden.integer("global_tokens"));
  append(cache, golden.integer("prompt_length"));
  check_held_by_all(cache, row(golden.tensor<std::int32_t>("out_kept"), 0), "prompt", findings);
}

void check_decode_recent_global(const GoldenCase& golden, Findings& findings) {
  const Index kv_heads = golden.integer("n_kv_heads"), length = golden.integer("max_cache_length");
  StreamCache cache = stream_cache(kv_heads, length, golden.integer("global_tokens"));
  append(cache, golden.integer("prompt_length"));
  const auto slots = golden.tensor<std::int32_t>("out_evicted_slot"),
             positions = golden.tensor<std::int32_t>("out_evicted_pos");
  for (Index step = 0; step < golden.integer("decode_steps"); ++step) {
    std::vector<Index> before;
    for (Index h = 0; h < kv_heads; ++h)
      before.push_back(padded(cache.positions(h), length)[static_cast<std::size_t>(slots(step, Index{0}))]);
    const std::vector<Index> written = append(cache, 1);
    findings.check(std::count(written.begin(), written.end(), slots(step, Index{0})) == kv_heads, "step ", step,
                   ": slots ", to_string(written), ", expected ", slots(step, Index{0}));
    findings.check(std::count(before.begin(), before.end(), positions(step, Index{0})) == kv_heads, "step ", step,
                   ": evicted ", to_string(before), ", expected ", positions(step, Index{0}));
  }
  const std::vector<Index> last = row(golden.tensor<std::int32_t>("out_final_pos"), 0);
  for (Index h = 0; h < kv_heads; ++h)
    findings.check(padded(cache.positions(h), length) == last, "at the end kv_head ", h, " holds by slot ",
                   to_string(cache.positions(h)));
}

void check_attention_recent_global(const GoldenCase& golden, Findings& findings) {
  check_attention(golden, StreamingLLM{{.num_sinks = golden.integer("global_tokens")}}, findings);
}

void check_streaming_cluster(const GoldenCase& golden, Findings& findings) {
  const Index capacity = golden.integer("max_capacity_prompt");
  StreamCache cache = stream_cache(golden.integer("n_kv_heads"), capacity, capacity - golden.integer("window_size"));
  append(cache, golden.integer("q_len"));
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < kept.dim(0); ++h)
    check_same_set(sorted(cache.positions(h)), row(kept, h), "kv_head " + std::to_string(h), findings);
}

/// The original StreamingLLM cache: one cut after the tokens came, one that first makes room for those to come.
void check_streaming_llm(const GoldenCase& golden, Findings& findings) {
  const auto list = [&](const std::string& name) {
    const auto positions = golden.tensor<std::int32_t>(name);
    return std::vector<Index>(positions.data.begin(), positions.data.end());
  };
  const Index start = golden.integer("start_size"), seen = golden.integer("seq_len"),
              coming = golden.integer("num_coming");
  StreamCache whole = stream_cache(1, start + golden.integer("recent_size"), start);
  StreamCache one_by_one = whole;
  append(whole, seen);
  for (Index token = 0; token < seen; ++token) append(one_by_one, 1);
  for (StreamCache* cache : {&whole, &one_by_one}) {
    check_held_by_all(*cache, list("out_kept_call"), "before the next tokens", findings);
    std::vector<Index> expected = list("out_kept_evict_for_space");
    if (coming > 0) append(*cache, coming);
    for (const Index position : consecutive(seen, seen + coming)) expected.push_back(position);
    check_held_by_all(*cache, expected, "with the next tokens", findings);
  }
}

void check_kvpress_streaming(const GoldenCase& golden, Findings& findings) {
  const Index kv_heads = golden.integer("n_kv_heads");
  StreamCache cache = stream_cache(kv_heads, golden.integer("n_kept"), golden.integer("n_sink"));
  append(cache, golden.integer("q_len"));
  const auto scores = golden.tensor<float>("out_scores");
  for (Index h = 0; h < kv_heads; ++h) {
    std::vector<Index> kept;
    for (Index position = 0; position < scores.dim(1); ++position)
      if (scores(h, position) > 0.5f) kept.push_back(position);
    check_same_set(sorted(cache.positions(h)), kept, "kv_head " + std::to_string(h), findings);
  }
}

// --- which case is which

GoldenRunner runner_for(const GoldenCase& golden) {
  const std::string& kind = golden.text("kind");
  const std::string variant =
      golden.text_or("strategy", golden.text_or("method", golden.text_or("press", golden.text_or("wrapper", ""))));
  const std::string label = variant.empty() ? kind : kind + " " + variant;
  if (label == "cc_attention keep_it_odd") return {label, check_attention_keep_it_odd};
  if (label == "cc_attention l2") return {label, check_attention_l2};
  if (label == "cc_attention recent_global") return {label, check_attention_recent_global};
  if (label == "cc_compress heavy_hitter") return {label, check_compress_heavy_hitter};
  if (label == "cc_compress keep_it_odd") return {label, check_compress_keep_it_odd};
  if (label == "cc_compress l2") return {label, check_compress_l2};
  if (label == "cc_compress recent_global") return {label, check_compress_recent_global};
  if (label == "cc_decode keep_it_odd") return {label, check_decode_keep_it_odd};
  if (label == "cc_decode l2") return {label, check_decode_l2};
  if (label == "cc_decode recent_global") return {label, check_decode_recent_global};
  if (label == "snapkv_official" || label == "factory_cluster snapkv") return {label, check_snapkv_cluster};
  if (label == "factory_cluster streamingllm") return {label, check_streaming_cluster};
  if (label == "streaming_llm") return {label, check_streaming_llm};
  if (label == "factory_l2norm l2norm") return {label, check_factory_l2norm};
  if (label == "kvpress_score keydiff") return {label, check_kvpress_keydiff};
  if (label == "kvpress_wrapped block_keydiff") return {label, check_block_keydiff};
  if (label == "kvpress_score knorm") return {label, check_kvpress_knorm};
  if (label == "kvpress_wrapped chunk_knorm") return {label, check_chunk_knorm};
  if (label == "kvpress_score cur") return {label, check_kvpress_cur};
  if (label == "kvpress_score lagkv") return {label, check_kvpress_lagkv};
  if (label == "kvpress_score finch") return {label, check_kvpress_finch};
  if (label == "kvpress_score qfilter") return {label, check_kvpress_qfilter};
  if (label == "kvpress_score snapkv") return {label, check_kvpress_snapkv};
  if (label == "kvpress_score streaming") return {label, check_kvpress_streaming};
  return {label};
}

}  // namespace

TEST_CASE("The golden vectors of the public reference implementations are met") {
  test::run_golden_cases("golden", runner_for);
}
