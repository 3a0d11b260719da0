// Heavy hitters as the public references find them: H2O's own code, cold-compress's heavy hitter, KVCache-Factory's H2O,
// kvpress's observed attention.

#include <kvsnip/policy/chain.hpp>
#include <kvsnip/policy/h2o.hpp>
#include <kvsnip/policy/snapkv.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::H2O;
using kvsnip::Phase;
using kvsnip::SnapKV;
using H2OCache = RowsCache<H2O>;

/// [heads, queries, slots], the weights of a kv_head summed over the queries: (slots, group_size).
Eigen::MatrixXf column_sums(const Array<float>& attention, Index kv_head, Index group) {
  Eigen::MatrixXf sums = Eigen::MatrixXf::Zero(attention.dim(2), group);
  for (Index g = 0; g < group; ++g)
    for (Index query = 0; query < attention.dim(1); ++query)
      for (Index slot = 0; slot < attention.dim(2); ++slot) sums(slot, g) += attention(kv_head * group + g, query, slot);
  return sums;
}
/// Likewise of cold-compress's prompt, of which there may be but the mean over the queries that see a slot.
Eigen::VectorXf prompt_sums(const GoldenCase& golden, Index h) {
  if (golden.has_tensor("in_prefill_attn")) return column_sums(golden.tensor<float>("in_prefill_attn"), h, 1);
  const auto means = golden.tensor<float>("in_prefill_avg_attn");
  Eigen::VectorXf sums(means.dim(1));
  for (Index i = 0; i < sums.size(); ++i) sums[i] = means(h, i) * static_cast<float>(sums.size() - i);
  return sums;
}
/// The weights of one query over a cache's slots, [steps, heads, slots].
Eigen::VectorXf weights_of(const Array<float>& attention, Index step, Index h, Index slots) {
  Eigen::VectorXf weights(slots);
  for (Index slot = 0; slot < slots; ++slot) weights[slot] = attention(step, h, slot);
  return weights;
}
/// An update that brings nothing to look at: `tokens` zero vectors.
template <class Cache>
auto append(Cache& cache, Index tokens) {
  const Eigen::MatrixXf zero = Eigen::MatrixXf::Zero(cache.shape().kv_heads * cache.shape().head_dim, tokens);
  return cache.update(zero, zero);
}

// --- cold-compress: a history of one entry is the whole history, and its recent_window leaves the incoming token out.

H2O heavy_hitter(const GoldenCase& golden) {
  const Index window = golden.integer("history_window_size");
  return H2O{{.score = H2O::Score::mean,
              .history_window = window == 1 ? 0 : window,
              .threshold = golden.integer("attn_thresholding") == 1,
              .prompt_as_one_row = true,
              .num_sinks = golden.integer("global_tokens"),
              .recent_window = golden.integer("recent_window") + 1,
              .refill_interval = 1}};
}
/// Our scores of the slots that may go, before the token at `now` comes, are those of a step.
void check_step_scores(const GoldenCase& golden, Index step, Index h, Index now, const std::vector<Index>& positions, std::span<const float> got,
                       Findings& findings) {
  if (!golden.has_tensor("out_scores")) return;
  const auto want = golden.tensor<float>("out_scores");
  for (std::size_t slot = 0; slot < got.size(); ++slot)
    if (positions[slot] >= golden.integer("global_tokens") && positions[slot] < now - golden.integer("recent_window"))
      findings.check(close_enough(got[slot], want(step, h, static_cast<Index>(slot))), "step ", step, ", kv_head ", h, ": slot ", slot, " scores ", got[slot],
                     ", expected ", want(step, h, static_cast<Index>(slot)));
}

void check_hh_freely(const GoldenCase& golden, Findings& findings) {
  const Index heads = golden.integer("n_kv_heads"), length = golden.integer("max_cache_length"), prompt = golden.integer("prompt_length");
  H2OCache cache({.query_heads = heads, .kv_heads = heads, .head_dim = 1}, length, RecordScores<H2O>(heavy_hitter(golden)));
  auto first = append(cache, prompt);
  for (Index h = 0; h < heads; ++h) first.on_column_sums(h, prompt_sums(golden, h));
  const auto attention = golden.tensor<float>("in_attn");
  const auto slots = golden.tensor<std::int32_t>("out_evicted_slot"), positions = golden.tensor<std::int32_t>("out_evicted_pos");
  for (Index step = 0; step < golden.integer("decode_steps"); ++step) {
    std::vector<std::vector<Index>> before;
    for (Index h = 0; h < heads; ++h) before.push_back(padded(cache.positions(h), length));
    auto next = append(cache, 1);
    for (Index h = 0; h < heads; ++h) {
      const Index slot = next.new_slots(h).front(), evicted = before.begin()[h].begin()[slot];
      findings.check(slot == slots(step, h) && evicted == positions(step, h), "step ", step, ", kv_head ", h, ": slot ", slot, ", position ", evicted,
                     " went, expected ", slots(step, h), ", ", positions(step, h));
      check_step_scores(golden, step, h, prompt + step, before.begin()[h], cache.policy().last_scores(h), findings);
      next.on_attention(h, weights_of(attention, step, h, next.size(h)));
    }
  }
  check_held(cache, golden.tensor<std::int32_t>("out_final_pos"), "at the end", findings);
}

/// With a threshold the reference evicts live tokens while slots are free (0 is a common score, and a free slot's), which a
/// cache of ours never does: here the policy alone is told what happens, as a planner with the reference's slots would.
/// What went must have the lowest score. "Uniform" is 1 / (slots filled in kv_head 0) there: weights are scaled to it.
void check_hh_led(const GoldenCase& golden, Findings& findings) {
  const Index heads = golden.integer("n_kv_heads"), length = golden.integer("max_cache_length"), prompt = golden.integer("prompt_length");
  H2O policy = heavy_hitter(golden);
  policy.reset({.query_heads = heads, .kv_heads = heads, .head_dim = 1});
  std::vector<std::vector<Index>> positions;  // by slot, -1: free
  for (Index h = 0; h < heads; ++h) {
    policy.reserve(h, length);
    for (Index slot = 0; slot < prompt; ++slot) policy.on_insert(h, slot, {});
    const Eigen::VectorXf sums = prompt_sums(golden, h);
    positions.push_back(consecutive(0, prompt));
    policy.observe_column_sums(h, {{sums.data(), static_cast<std::size_t>(prompt)}, {Phase::prompt, 0, prompt}, positions.back()});
    policy.on_prompt_end(h);
    positions.back().resize(static_cast<std::size_t>(length), -1);
  }
  const auto attention = golden.tensor<float>("in_attn");
  const auto slots = golden.tensor<std::int32_t>("out_evicted_slot"), evicted = golden.tensor<std::int32_t>("out_evicted_pos");
  for (Index step = 0; step < golden.integer("decode_steps"); ++step) {
    const Index now = prompt + step;
    for (Index h = 0; h < heads; ++h) {
      std::vector<Index>& held = positions.begin()[h];
      const auto goes = static_cast<std::size_t>(slots(step, h));
      findings.check(held[goes] == evicted(step, h), "step ", step, ", kv_head ", h, ": slot ", goes, " held ", held[goes]);
      std::vector<float> scores(held.size());
      policy.reserve(h, length);
      kvsnip::SlotsView view;
      view.positions = held;
      policy.score(h, view, scores);
      check_step_scores(golden, step, h, now, held, scores, findings);
      for (std::size_t slot = 0; slot < held.size(); ++slot)
        if (held[slot] < 0) scores[slot] = 0;
        else if (held[slot] < golden.integer("global_tokens") || held[slot] >= now - golden.integer("recent_window")) scores[slot] = 1;
      const float least = *std::min_element(scores.begin(), scores.end());
      findings.check(close_enough(scores[goes], least), "step ", step, ", kv_head ", h, ": what goes scores ", scores[goes], ", the lowest ", least);
      held[goes] = now;
      policy.on_insert(h, slots(step, h), view);
    }
    const auto filled = static_cast<float>(length - std::count(positions[0].begin(), positions[0].end(), -1));
    for (Index h = 0; h < heads; ++h) {
      const Eigen::VectorXf weights = weights_of(attention, step, h, length) * (filled / static_cast<float>(length));
      policy.observe(h, {{weights.data(), length, 1, Eigen::OuterStride<>(length)}, {nullptr, length, 0, Eigen::OuterStride<>(length)}, now,
                         {Phase::decode, now, 1}, positions.begin()[h]});
    }
  }
  const auto final_positions = golden.tensor<std::int32_t>("out_final_pos");
  for (Index h = 0; h < heads; ++h) findings.check(positions.begin()[h] == row(final_positions, h), "at the end kv_head ", h, " is another");
}

void check_hh_decode(const GoldenCase& golden, Findings& findings) {
  (golden.integer("attn_thresholding") == 1 ? check_hh_led : check_hh_freely)(golden, findings);
}

/// SnapKV with its own edge rule compresses the prompt; the group is averaged before.
SnapKV compressor(const GoldenCase& golden) {
  return SnapKV{{.observation_window = golden.integer("observation_len"),
                 .kernel_size = golden.integer("kernel_size"),
                 .pool_over = SnapKV::PoolOver::row,
                 .count_padding = false,
                 .num_sinks = golden.integer("global_tokens")}};
}
void check_hh_attention(const GoldenCase& golden, Findings& findings) {
  check_attention(golden, kvsnip::Chain{compressor(golden), heavy_hitter(golden)}, findings);
}
/// What it compresses a prompt to, by which votes, and what the decode cache then knows of those that stay.
void check_hh_compress(const GoldenCase& golden, Findings& findings) {
  const Index heads = golden.integer("n_kv_heads"), prompt = golden.integer("prompt_length"), window = golden.integer("observation_len");
  const bool whole = golden.has_tensor("in_attn");
  const auto attention = golden.tensor<float>(whole ? "in_attn" : "in_attn_last16");
  const kvsnip::Chain policy{compressor(golden), H2O{{.score = H2O::Score::mean, .prompt_as_one_row = true, .recent_window = 1}}};
  const auto cache = run_on_attention({.query_heads = heads, .kv_heads = heads, .head_dim = golden.integer("head_dim")}, golden.integer("max_cache_length"),
                                      policy, attention);
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  for (Index h = 0; h < heads; ++h) check_same_set(sorted(cache.positions(h)), row(kept, h), "kv_head " + std::to_string(h), findings);
  check_scores(cache, golden.tensor<float>("out_priority"), golden.integer("global_tokens"), prompt - window, 1.0 / static_cast<double>(window), findings);
  if (!whole) return;
  H2O observed = cache.policy().decode();
  const auto want = golden.tensor<float>("out_cum_attn");
  for (Index h = 0; h < heads; ++h) {
    std::vector<float> means(static_cast<std::size_t>(cache.size(h)));
    kvsnip::SlotsView slots;
    slots.positions = cache.positions(h);
    observed.score(h, slots, means);
    for (Index slot = 0; slot < cache.size(h); ++slot)
      findings.check(close_enough(means.begin()[slot], want(h, slot)), "kv_head ", h, ": slot ", slot, " was given ", means.begin()[slot], ", expected ", want(h, slot));
  }
}

// --- KVCache-Factory: sums over a whole prompt; the last window_size are kept.

/// Groups whose query heads sum up for themselves, and go by the largest sum: every query head is a kv_head here.
class LargestOfGroup : public H2O {
 public:
  explicit LargestOfGroup(const kvsnip::H2OOptions& options = {}, Index group_size = 1) : H2O(options), group_size_(static_cast<std::size_t>(group_size)) {}
  void score_layer(std::span<const kvsnip::SlotsView> heads, std::span<const std::span<float>> out) {
    for (std::size_t h = 0; h < heads.size(); ++h) score(static_cast<Index>(h), heads[h], out[h]);
    for (std::size_t slot = 0; slot < out[0].size(); ++slot)
      for (std::size_t first = 0; first < out.size(); first += group_size_) {
        float largest = 0;
        for (std::size_t h = first; h < first + group_size_; ++h) largest = std::max(largest, out[h][slot]);
        for (std::size_t h = first; h < first + group_size_; ++h) out[h][slot] = largest;
      }
  }

 private:
  std::size_t group_size_;
};

void check_factory_h2o(const GoldenCase& golden, Findings& findings) {
  const Index window = golden.integer("window_size"), prompt = golden.integer("q_len"), query_heads = golden.integer("n_heads"),
              capacity = golden.integer("max_capacity_prompt");
  const bool largest = golden.text("gqa_score_agg") == "max";
  const Index kv_heads = largest ? query_heads : golden.integer("n_kv_heads") * golden.integer("kv_repeat");
  const Index group = golden.integer("n_heads") / golden.integer("n_kv_heads") / golden.integer("kv_repeat"), alike = largest ? group : 1;
  const Shape shape{.query_heads = query_heads, .kv_heads = kv_heads, .head_dim = golden.integer("head_dim")};
  const auto kept = golden.tensor<std::int32_t>("out_kept");
  const auto want = golden.tensor<float>("out_scores");
  const auto run = [&](const auto& policy) {
    const auto cache = run_on_queries(shape, capacity, policy, stacked(golden.tensor<float>("in_keys"), 0, prompt, kv_heads / golden.integer("n_kv_heads")),
                                      golden.tensor<float>("in_queries"));
    for (Index h = 0; h < kv_heads; ++h) {
      check_same_set(sorted(cache.positions(h)), row(kept, h / alike), "kv_head " + std::to_string(h), findings);
      for (Index i = 0; i < prompt - window; ++i)
        findings.check(close_enough(cache.policy().last_scores(h).at(static_cast<std::size_t>(i)), want(h / alike, i)), "kv_head ", h, ": score of position ", i);
    }
  };
  const kvsnip::H2OOptions options{.recent_window = window + 1};  // the next token is one of the newest
  if (largest) run(LargestOfGroup(options, group));
  else run(H2O{options});
}

// --- kvpress: the mean over the queries that see a position.

void check_observed(const GoldenCase& golden, Findings& findings) {
  const Index prompt = golden.integer("q_len");
  const Shape shape{.query_heads = golden.integer("n_heads"), .kv_heads = golden.integer("n_kv_heads"), .head_dim = golden.integer("head_dim")};
  for (const bool prompt_as_one_row : {false, true}) {  // nothing comes after it
    const H2O policy{{.score = H2O::Score::mean, .prompt_as_one_row = prompt_as_one_row, .recent_window = 0}};
    const H2OCache cache = run_on_attention(shape, golden.integer("n_kept"), policy, golden.tensor<float>("in_attn"));
    check_held(cache, golden.tensor<std::int32_t>("out_kept"), "prompt", findings);
    check_scores(cache, golden.tensor<float>("out_scores"), 0, prompt, 1.0, findings);
  }
}

// --- H2O's own code

/// It evicts after a step what we evict before the next one: its cache is ours without the token that has just come.
void check_real_drop(const GoldenCase& golden, Findings& findings) {
  const Index heads = golden.integer("n_heads"), prompt = golden.integer("prompt_length"), steps = golden.integer("decode_steps"),
              recent = golden.integer("recent_size"), budget = golden.integer("hh_size") + recent + 1;
  H2OCache cache({.query_heads = heads, .kv_heads = heads, .head_dim = 1}, budget, RecordScores<H2O>(H2O{{.recent_window = recent + 1, .refill_interval = 1}}));
  auto first = append(cache, prompt);
  for (Index h = 0; h < heads; ++h) first.on_column_sums(h, column_sums(golden.tensor<float>("in_prefill_attn"), h, 1));
  const auto attention = golden.tensor<float>("in_attn");
  const auto width = golden.tensor<std::int32_t>("in_attn_width"), kept = golden.tensor<std::int32_t>("out_kept"),
             kept_of_prompt = golden.tensor<std::int32_t>("out_kept_after_prefill");
  for (Index step = 0; step <= steps; ++step) {  // one more shows what the last one left
    auto next = append(cache, 1);
    for (Index h = 0; h < heads; ++h) {
      std::vector<Index> held = sorted(next.positions(h)), expected;
      const Index columns = step == 0 ? kept_of_prompt.dim(1) : kept.dim(2);
      for (Index i = 0; i < columns; ++i)
        if (const Index position = step == 0 ? kept_of_prompt(h, i) : kept(step - 1, h, i); position >= 0) expected.push_back(position);
      expected.push_back(prompt + step);
      check_same_set(held, expected, "step " + std::to_string(step) + ", kv_head " + std::to_string(h), findings);
      if (step == steps) {
        const auto want = golden.tensor<float>("out_final_scores");
        const std::vector<float>& scores = cache.policy().last_scores(h);
        for (Index slot = 0; slot < next.size(h); ++slot) {
          const Index position = next.positions(h)[static_cast<std::size_t>(slot)], i = std::find(held.begin(), held.end(), position) - held.begin();
          if (position < prompt + step)
            findings.check(close_enough(scores.begin()[slot], want(h, i)), "at the end position ", position, " scores ", scores.begin()[slot], ", expected ", want(h, i));
        }
        next.on_attention(h, Eigen::VectorXf::Zero(next.size(h)));
        continue;
      }
      findings.check(width(step) == next.size(h), "step ", step, ": attends to ", next.size(h), " slots, expected ", width(step));
      Eigen::VectorXf weights(next.size(h));
      for (Index slot = 0; slot < weights.size(); ++slot)
        weights[slot] = attention(step, h, std::find(held.begin(), held.end(), next.positions(h)[static_cast<std::size_t>(slot)]) - held.begin());
      next.on_attention(h, weights);
    }
  }
}

/// It masks what a cache would drop: what the next query sees, itself included, is what our next step holds. (The token that
/// has just left the window is masked for one query whatever its score, and might come back; in no case here does it.)
void check_masked(const GoldenCase& golden, Findings& findings) {
  const Index heads = golden.integer("n_heads"), prompt = golden.integer("prompt_length"), steps = golden.integer("decode_steps"),
              recent = golden.integer("recent_budget"), dim = golden.integer("head_dim");
  H2OCache cache({.query_heads = heads, .kv_heads = heads, .head_dim = dim}, golden.integer("heavy_budget") + recent,
                 RecordScores<H2O>(H2O{{.recent_window = recent, .refill_interval = 1}}));
  const auto q = golden.tensor<float>("in_q"), k = golden.tensor<float>("in_k"), v = golden.tensor<float>("in_v"), y = golden.tensor<float>("out_y");
  const auto mask = golden.tensor<std::uint8_t>("out_mask_next");
  const auto check_visible = [&](const auto& step, Index t) {
    for (Index h = 0; h < heads; ++h) {
      std::vector<Index> expected;
      for (Index position = 0; position <= prompt + t; ++position)
        if (mask(t, h, position) != 0) expected.push_back(position);
      check_same_set(sorted(step.positions(h)), expected, "step " + std::to_string(t) + ", kv_head " + std::to_string(h), findings);
    }
  };
  for (Index t = -1; t < steps; ++t) {  // the prompt, then token by token
    const Index first = t < 0 ? 0 : prompt + t, count = t < 0 ? prompt : 1;
    auto step = cache.update(stacked(k, first, count), stacked(v, first, count));
    if (t >= 0) check_visible(step, t);
    Eigen::MatrixXf out(heads * dim, count);
    kvsnip::attend(step, stacked(q, first, count), out);
    for (Index i = 0; i < out.rows(); ++i)
      findings.check(close_enough(out(i, count - 1), y(t + 1, i)), "step ", t, ", output ", i, " is ", out(i, count - 1), ", expected ", y(t + 1, i));
  }
  std::vector<std::vector<Index>> before;
  for (Index h = 0; h < heads; ++h) before.push_back(padded(cache.positions(h), cache.size(h)));
  auto last = append(cache, 1);  // one more shows what the last one left
  check_visible(last, steps);
  const auto want = golden.tensor<float>("out_final_scores");
  for (Index h = 0; h < heads; ++h)
    for (std::size_t slot = 0; slot < before.begin()[h].size(); ++slot) {
      const Index position = before.begin()[h][slot];
      const bool has_score = last.positions(h)[slot] == position || position >= prompt + steps - recent;  // what is masked is 0, but for the newest
      const float got = has_score ? cache.policy().last_scores(h)[slot] : 0.0f;
      findings.check(close_enough(got, want(h, position)), "at the end position ", position, " scores ", got, ", expected ", want(h, position));
    }
}

const RegisterGolden kinds{{
    {"cc_hh_decode", check_hh_decode},
    {"cc_attention heavy_hitter", check_hh_attention},
    {"cc_compress heavy_hitter", check_hh_compress},
    {"factory_cluster h2o", check_factory_h2o},
    {"kvpress_score observed", check_observed},
    {"h2o_real_drop", check_real_drop},
    {"h2o_masked", check_masked},
}};

}  // namespace
