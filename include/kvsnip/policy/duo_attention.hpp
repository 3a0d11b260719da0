// DuoAttention: retrieval heads keep everything, streaming heads the first tokens and the newest.
//
// Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", arXiv:2410.10819,
// section 2. Which heads are which comes from the user: the paper finds it by optimisation, once a model.
// The budget is a streaming head's. A retrieval head grows without a limit: neither "no more than the budget" nor "a full
// cache evicts" holds for it, and a streaming head drops while others have room.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"
#include "kvsnip/policy/streaming_llm.hpp"

namespace kvsnip {

struct DuoAttentionOptions {
  Index num_sinks = 64;  ///< first positions that a streaming head keeps [tokens], >= 0; the paper uses 64 and 256 newest: a budget of 320
};

/// Needs nothing but positions.
class DuoAttention {
 public:
  /// @param is_retrieval_head  by kv_head, of the layer that the cache is of
  explicit DuoAttention(std::vector<bool> is_retrieval_head, const DuoAttentionOptions& options = {})
      : streaming_({.num_sinks = options.num_sinks}), is_retrieval_head_(std::move(is_retrieval_head)) {}

  Index head_budget(Index kv_head, Index budget) const { return is_retrieval_head_[static_cast<std::size_t>(kv_head)] ? unlimited_budget : budget; }
  Protection protection(Phase phase) const { return streaming_.protection(phase); }
  Eviction eviction(Index budget) const { return streaming_.eviction(budget); }
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const { streaming_.score(kv_head, slots, out); }
  /// @throws std::invalid_argument  not one flag a kv_head
  void reset(const Shape& shape) {
    detail::require(static_cast<Index>(is_retrieval_head_.size()) == shape.kv_heads, "DuoAttention: is_retrieval_head must have one flag for each of kv_heads = ", shape.kv_heads,
                    ", got ", is_retrieval_head_.size());
  }
  Index bytes() const { return static_cast<Index>((is_retrieval_head_.capacity() + 7) / 8); }

 private:
  StreamingLLM streaming_;  // what a streaming head does
  std::vector<bool> is_retrieval_head_;
};
static_assert(Policy<DuoAttention> && ScoresSlots<DuoAttention> && FixesHeadBudgets<DuoAttention>);

}  // namespace kvsnip
