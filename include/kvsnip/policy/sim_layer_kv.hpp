// SimLayerKV: a layer whose last queries attend to the first and the newest tokens alone is lazy, and keeps only those.
//
// Zhang et al., "SimLayerKV: A Simple Framework for Layer-Level KV Cache Reduction", arXiv:2410.13846, section 3; decided
// at the end of a prompt, as in kvpress.
// The budget is a lazy layer's. A layer that is not lazy keeps everything and grows without a limit: of the rules on budgets
// neither "no more than the budget" nor "a full cache evicts" holds for it.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/select.hpp"
#include "kvsnip/policy.hpp"
#include "kvsnip/policy/streaming_llm.hpp"

namespace kvsnip {

struct SimLayerKVOptions {
  Index num_sinks = 4;        ///< first positions, never evicted, and part of the test [tokens], >= 0
  Index recent_window = 512;  ///< newest positions never evicted, the incoming one included, and part of the test [tokens], >= 1; the paper: 1020
  Index num_queries = 1;      ///< last queries of a prompt that the test is about [tokens], >= 1
  float threshold = 0.9f;     ///< share of their attention that makes a layer lazy, in [0, 1]; the paper's differs by model

  static void each(auto& options, auto visit) {
    visit("num_sinks", options.num_sinks);
    visit("recent_window", options.recent_window);
    visit("num_queries", options.num_queries);
    visit("threshold", options.threshold);
  }
};

/// Needs the last num_queries rows of a prompt that may exceed the budget. Until one did, a layer counts as lazy.
class SimLayerKV {
 public:
  static constexpr std::string_view name = "sim_layer_kv";
  static constexpr std::string_view paper = "arXiv:2410.13846";
  static constexpr std::string_view needs = "a prompt's last attention rows";
  using Options = SimLayerKVOptions;

  explicit SimLayerKV(const SimLayerKVOptions& options = {}) : options_(options) {
    detail::require(options.num_sinks >= 0, "SimLayerKV: num_sinks must be >= 0, got ", options.num_sinks);
    detail::require(options.recent_window >= 1, "SimLayerKV: recent_window must be >= 1, got ", options.recent_window);
    detail::require(options.num_queries >= 1, "SimLayerKV: num_queries must be >= 1, got ", options.num_queries);
    detail::require(options.threshold >= 0 && options.threshold <= 1, "SimLayerKV: threshold must be in [0, 1], got ", options.threshold);
  }

  const SimLayerKVOptions& options() const { return options_; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .recent_window = options_.recent_window}; }
  Index wanted_rows(const StepInfo& step) const { return step.phase == Phase::long_prompt ? std::min(options_.num_queries, step.num_queries) : 0; }
  /// What the queries give to the first num_sinks and the last recent_window of the tokens before them.
  void observe(Index kv_head, const AttentionRows& rows) {
    Test& test = tests_[static_cast<std::size_t>(kv_head)];
    if (rows.first_position == rows.step.last_position() - wanted_rows(rows.step) + 1) test = {};
    const std::vector<Index> slots = detail::middle(rows.positions, 0, options_.num_queries);  // the queries' own tokens do not count
    const Index size = std::ssize(slots), num_sinks = std::min(options_.num_sinks, size), first_recent = std::max(size - options_.recent_window, num_sinks);
    for (Index j = 0; j < rows.num_queries(); ++j, ++test.num_rows)
      for (Index i = 0; i < size; i = i + 1 == num_sinks ? std::max(i + 1, first_recent) : i + 1)
        if (i < num_sinks || i >= first_recent) test.mass += rows.mean(slots[static_cast<std::size_t>(i)], j);
  }
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const { StreamingLLM{}.score(kv_head, slots, out); }
  Eviction eviction(Index budget) const { return StreamingLLM{}.eviction(budget); }
  void head_budgets(std::span<const std::span<const float>>, Index, std::span<Index> out) const {
    if (!is_lazy()) std::fill(out.begin(), out.end(), unlimited_budget);
  }
  /// Of the last prompt that exceeded the budget.
  bool is_lazy() const {
    float mass = 0, rows = 0;
    for (const Test& test : tests_) mass += test.mass, rows += static_cast<float>(test.num_rows);
    return rows == 0 || mass > options_.threshold * rows;
  }
  void reset(const Shape& shape) { tests_.assign(static_cast<std::size_t>(shape.kv_heads), {}); }
  Index bytes() const { return detail::heap_bytes(tests_); }

 private:
  struct Test {
    float mass = 0;
    Index num_rows = 0;
  };
  SimLayerKVOptions options_;
  std::vector<Test> tests_;  // (kv_heads)
};
static_assert(Policy<SimLayerKV> && ScoresSlots<SimLayerKV> && SharesBudget<SimLayerKV> && ObservesAttention<SimLayerKV> && ChoosesRows<SimLayerKV> &&
              ProtectsSlots<SimLayerKV>);

}  // namespace kvsnip
