// Policies that look at positions alone, against the public references: StreamingLLM, KeepItOdd.

#include <kvsnip/policy/keep_it_odd.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include "support/golden_checks.hpp"

namespace {

using namespace test;
using kvsnip::KeepItOdd;
using kvsnip::StreamingLLM;

// --- KeepItOdd

KeepItOdd keep_it_odd(const GoldenCase& golden) {
  return KeepItOdd{{.num_sinks = golden.integer("global_tokens"),
                    .recent_window = golden.integer("recent_window") + 1,
                    .refill_interval = 1}};
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

const RegisterGolden kinds{{
    {"cc_attention keep_it_odd", check_attention_keep_it_odd},
    {"cc_attention recent_global", check_attention_recent_global},
    {"cc_compress keep_it_odd", check_compress_keep_it_odd},
    {"cc_compress recent_global", check_compress_recent_global},
    {"cc_decode keep_it_odd", check_decode_keep_it_odd},
    {"cc_decode recent_global", check_decode_recent_global},
    {"factory_cluster streamingllm", check_streaming_cluster},
    {"streaming_llm", check_streaming_llm},
    {"kvpress_score streaming", check_kvpress_streaming},
}};

}  // namespace
