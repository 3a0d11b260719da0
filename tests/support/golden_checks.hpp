// What the checks of golden cases have in common: a case's arrays as our interface takes them, the caches they are run
// through, and the comparisons. A kind's checks are in golden_<what they look at>_test.cpp, and register themselves.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <kvsnip/attention.hpp>
#include <kvsnip/kv_cache.hpp>

#include "dictated.hpp"
#include "golden_run.hpp"
#include "positions.hpp"
#include "random.hpp"
#include "record_scores.hpp"
#include "tolerance.hpp"

namespace test {

using kvsnip::KVCache;
using kvsnip::Shape;

inline bool close_enough(double got, double want) { return test::close(got, want, 2e-4, 1e-5); }

/// [heads, tokens, dim], tokens [first, first + count) -> (heads * dim, count), each head `repeat` times in a row.
inline Eigen::MatrixXf stacked(const Array<float>& x, Index first, Index count, Index repeat = 1) {
  const Index heads = x.dim(0), dim = x.dim(2);
  Eigen::MatrixXf out(heads * repeat * dim, count);
  for (Index row = 0; row < out.rows(); ++row)
    for (Index t = 0; t < count; ++t) out(row, t) = x(row / dim / repeat, first + t, row % dim);
  return out;
}
/// [query_heads, queries, dim], the last `count` of a kv_head -> (dim, count * group), a query's heads side by side.
inline Eigen::MatrixXf side_by_side(const Array<float>& x, Index kv_head, Index count, Index group) {
  Eigen::MatrixXf out(x.dim(2), count * group);
  for (Index column = 0; column < out.cols(); ++column)
    for (Index d = 0; d < out.rows(); ++d)
      out(d, column) = x(kv_head * group + column % group, x.dim(1) - count + column / group, d);
  return out;
}
/// Row `i` of a list of positions.
inline std::vector<Index> row(const Array<std::int32_t>& positions, Index i) {
  std::vector<Index> result;
  for (Index j = 0; j < positions.dim(1); ++j) result.push_back(positions(i, j));
  return result;
}
inline std::string to_string(std::span<const Index> positions) {
  std::string text;
  for (const Index position : positions) text += (text.empty() ? "" : " ") + std::to_string(position);
  return text;
}
inline void check_same_set(const std::vector<Index>& got, const std::vector<Index>& want, const std::string& what,
                    Findings& findings) {
  findings.check(sorted(got) == sorted(want), what, ": held ", to_string(sorted(got)), "; expected ",
                 to_string(sorted(want)));
}
// --- prompts scored by the rows of their last queries

template <class P>
using RowsCache = KVCache<float, RecordScores<P>>;

inline Eigen::MatrixXf random_keys(const Shape& shape, Index tokens) {
  return Random(1).matrix(shape.kv_heads * shape.head_dim, tokens);
}

/// A prompt whose wanted rows come from the case's queries, the last of the prompt (all, if sums over all are wanted).
template <class P>
RowsCache<P> run_on_queries(const Shape& shape, Index budget, const P& policy, const Eigen::MatrixXf& keys,
                            const Array<float>& queries) {
  RowsCache<P> cache(shape, budget, RecordScores<P>(policy));
  auto step = cache.update(keys, keys);
  const Index wanted = step.wants_column_sums() ? queries.dim(1) : step.wanted_rows();
  for (Index h = 0; h < shape.kv_heads; ++h) {
    if (wanted > 0)
      step.on_queries(h, side_by_side(queries, h, wanted, shape.group_size()));
    else
      step.done(h);
  }
  return cache;
}
/// A prompt whose wanted rows come from the case's weights [query_heads, rows, prompt], of which the last are taken, and all
/// are summed.
template <class P>
RowsCache<P> run_on_attention(const Shape& shape, Index budget, const P& policy, const Array<float>& attention) {
  const Index prompt = attention.dim(2), group = shape.group_size();
  RowsCache<P> cache(shape, budget, RecordScores<P>(policy));
  const Eigen::MatrixXf keys = random_keys(shape, prompt);
  auto step = cache.update(keys, keys);
  const Index wanted = step.wanted_rows();
  const bool wants_sums = step.wants_column_sums();
  for (Index h = 0; h < shape.kv_heads; ++h) {
    if (wants_sums) {
      const Eigen::MatrixXf rows = side_by_side(attention, h, attention.dim(1), group);
      step.on_column_sums(h, rows.reshaped(prompt * group, attention.dim(1)).rowwise().sum().reshaped(prompt, group));
    }
    if (wanted > 0)
      step.on_attention(h, side_by_side(attention, h, wanted, group));
    else if (!wants_sums)
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
inline void check_best(const std::vector<Index>& held, const Array<float>& scores, Index h, Index window, Index budget,
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

// --- policies whose every choice is compared, by slot and by score

/// A row for each kv_head; the reference has one row where all heads share the choice.
inline std::vector<std::vector<Index>> row_by_head(const Array<std::int32_t>& positions, Index kv_heads) {
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
inline std::vector<Index> padded(std::span<const Index> positions, Index slots) {
  std::vector<Index> result(positions.begin(), positions.end());
  result.resize(static_cast<std::size_t>(slots), -1);
  return result;
}
/// The reference's choices were among the best by our scores.
inline void check_dictated(const Dictation& dictation, Findings& findings) {
  findings.check(dictation.asked > 0, "no choice had to be made");
  findings.check(dictation.worst <= 1e-5, "a choice of the reference is worse than another by ", dictation.worst);
}

/// A prompt, [kv_heads, tokens, dim].
template <class P>
KVCache<float, RecordScores<P>> compress(const Array<float>& keys, const Array<float>& values, Index budget,
                                               const P& policy) {
  const Shape shape{.query_heads = keys.dim(0), .kv_heads = keys.dim(0), .head_dim = keys.dim(2)};
  KVCache<float, RecordScores<P>> cache(shape, budget, RecordScores<P>(policy));
  auto step = cache.update(stacked(keys, 0, keys.dim(1)), stacked(values, 0, keys.dim(1)));
  for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
  return cache;
}
/// The case's keys and values (the keys once more, if it has no values).
template <class P>
KVCache<float, RecordScores<P>> compress(const GoldenCase& golden, Index budget, const P& policy) {
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

/// Keys of zeros, for policies that look at positions alone.
inline Array<float> no_keys(Index kv_heads, Index tokens) {
  return {{kv_heads, tokens, 1}, std::vector<float>(static_cast<std::size_t>(kv_heads * tokens))};
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

}  // namespace test
