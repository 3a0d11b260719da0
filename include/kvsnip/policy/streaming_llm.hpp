// StreamingLLM: keep the attention sinks and the most recent positions.
//
// Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv:2309.17453, section 3.2.
// Differs from the paper: keys keep the RoPE phase of their original position.
#pragma once

#include <algorithm>
#include <string_view>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct StreamingLLMOptions {
  Index num_sinks = 4;  ///< first positions, never evicted [tokens], >= 0; the paper uses 4

  static void each(auto& options, auto visit) { visit("num_sinks", options.num_sinks); }
};

/// The rest of the budget is the window of recent positions. Needs nothing but positions.
class StreamingLLM {
 public:
  static constexpr std::string_view name = "streaming_llm";
  static constexpr std::string_view paper = "arXiv:2309.17453";
  static constexpr std::string_view needs = "positions";
  using Options = StreamingLLMOptions;

  explicit StreamingLLM(const StreamingLLMOptions& options = {}) : options_(options) {
    detail::require(options.num_sinks >= 0, "StreamingLLM: num_sinks must be >= 0, got ", options.num_sinks);
  }

  const StreamingLLMOptions& options() const { return options_; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .recent_window = 1}; }
  /// Age never changes its order, so the next victims can be chosen many at a time.
  Eviction eviction(Index budget) const { return {.count = std::clamp<Index>(budget / 8, 1, 64)}; }

  /// The older, the lower. Positions past 2^24 may tie in float32; ties keep the newer anyway.
  void score(Index /*kv_head*/, const SlotsView& slots, std::span<float> out) const {
    std::transform(slots.positions.begin(), slots.positions.end(), out.begin(), [](Index position) { return static_cast<float>(position); });
  }

 private:
  StreamingLLMOptions options_;
};
static_assert(Policy<StreamingLLM> && ScoresSlots<StreamingLLM>);

}  // namespace kvsnip
