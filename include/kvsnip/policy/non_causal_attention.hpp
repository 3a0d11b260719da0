// NonCausalAttention: what a prompt's queries would attend to if they could look ahead, chunk by chunk.
//
// Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
// arXiv:2507.08143; the details (no scale, a last chunk filled up with zeros) are those of kvpress' non-causal press.
// Prompt only: alone it lets the cache grow while decoding; a Chain or Periodic bounds it.
#pragma once

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/select.hpp"
#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/z_scores.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct NonCausalAttentionOptions {
  Index chunk_size = 256;   ///< queries and keys that see each other [tokens], >= 1; as in kvpress
  Index num_sinks = 0;      ///< first positions: kept, and in no chunk [tokens], >= 0
  Index recent_window = 1;  ///< newest positions: likewise, the next token included [tokens], >= 0

  static void each(auto& options, auto visit) {
    visit("chunk_size", options.chunk_size);
    visit("num_sinks", options.num_sinks);
    visit("recent_window", options.recent_window);
  }
};

/// Needs all queries of a prompt that may exceed the budget; holds those of a chunk that is not full yet, so that a prompt
/// may come in any pieces. State: 4 bytes per slot and kv_head. A token that no chunk had (it came while decoding) gets the mean.
class NonCausalAttention : public detail::SlotNumbers<1> {
 public:
  static constexpr std::string_view name = "non_causal_attention";
  static constexpr std::string_view paper = "arXiv:2507.08143";
  static constexpr std::string_view needs = "a prompt's queries, keys and values";
  using Options = NonCausalAttentionOptions;

  explicit NonCausalAttention(const NonCausalAttentionOptions& options = {}) : options_(options) {
    detail::require(options.chunk_size >= 1, "NonCausalAttention: chunk_size must be >= 1, got ", options.chunk_size);
    detail::require(options.num_sinks >= 0, "NonCausalAttention: num_sinks must be >= 0, got ", options.num_sinks);
    detail::require(options.recent_window >= 0, "NonCausalAttention: recent_window must be >= 0, got ", options.recent_window);
  }

  const NonCausalAttentionOptions& options() const { return options_; }
  bool evicts(Phase phase) const { return phase != Phase::decode; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .recent_window = options_.recent_window}; }
  Index wanted_queries(const StepInfo& step) const { return step.phase == Phase::long_prompt ? step.num_queries : 0; }
  void observe_queries(Index kv_head, const QueryRows& rows) {
    Waiting& waiting = waiting_[static_cast<std::size_t>(kv_head)];
    if (waiting.queries.empty()) waiting.first_slot = rows.slots.size() - rows.num_queries();
    waiting.queries.insert(waiting.queries.end(), rows.queries.data(), rows.queries.data() + rows.queries.size());
    const Index query = rows.queries.rows() * rows.group_size;  // floats
    if (const Index sinks = std::min(options_.num_sinks - waiting.first_slot, std::ssize(waiting.queries) / query); sinks > 0) waiting.drop(sinks, query);
    while (std::ssize(waiting.queries) / query - num_recents() >= options_.chunk_size) run_chunk(kv_head, rows.slots, options_.chunk_size);
  }
  void on_insert(Index kv_head, Index slot, const SlotsView&) { *enter(kv_head, slot) = std::numeric_limits<float>::quiet_NaN(); }

  /// What the keys of a chunk drew, times the norm of the value, averaged over three neighbours; as z-scores over all kv_heads.
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    std::vector<std::vector<float>> scores;
    std::vector<std::vector<Index>> lists;
    for (Index h = 0; h < std::ssize(heads); ++h) {
      const SlotsView& slots = heads[static_cast<std::size_t>(h)];
      if (const Index left = num_waiting(h, slots.head_dim()) - num_recents(); left > 0) run_chunk(h, slots, left);
      lists.push_back(detail::middle(slots.positions, 0, 0));
      std::erase_if(lists.back(), [&](Index slot) { return numbers(h)[slot] != numbers(h)[slot]; });
      scores.push_back(pooled(h, slots, lists.back()));
    }
    detail::to_z_scores(scores);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      std::fill(out[h].begin(), out[h].end(), 0.0f);
      for (std::size_t i = 0; i < lists[h].size(); ++i) out[h][static_cast<std::size_t>(lists[h][i])] = scores[h][i];
    }
  }

  void on_prompt_end(Index kv_head) {
    SlotNumbers::on_prompt_end(kv_head);
    waiting_[static_cast<std::size_t>(kv_head)] = {};
  }
  void reset(const Shape& shape) {
    SlotNumbers::reset(shape);
    waiting_.assign(static_cast<std::size_t>(shape.kv_heads), {});
    group_size_ = shape.group_size();
  }
  Index bytes() const {
    Index bytes = SlotNumbers::bytes() + detail::heap_bytes(waiting_);
    for (const Waiting& waiting : waiting_) bytes += detail::heap_bytes(waiting.queries);
    return bytes;
  }

 private:
  /// Queries that have not been in a chunk; their tokens are in the slots from first_slot on.
  struct Waiting {
    std::vector<float> queries;  // (head_dim, tokens * group_size)
    Index first_slot = 0;
    void drop(Index tokens, Index query) {
      queries.erase(queries.begin(), queries.begin() + tokens * query);
      first_slot += tokens;
    }
  };

  Index num_recents() const { return std::max<Index>(options_.recent_window - 1, 0); }
  Index num_waiting(Index kv_head, Index head_dim) const { return std::ssize(waiting_[static_cast<std::size_t>(kv_head)].queries) / (head_dim * group_size_); }
  /// The first `count` tokens that wait are a chunk; one that is too short has zeros behind.
  void run_chunk(Index kv_head, const SlotsView& slots, Index count) {
    Waiting& waiting = waiting_[static_cast<std::size_t>(kv_head)];
    const Index dim = slots.head_dim(), missing = options_.chunk_size - count;
    detail::require_vectors("NonCausalAttention", slots);
    Eigen::MatrixXf keys(dim, count);
    for (Index i = 0; i < count; ++i) slots.read_key(waiting.first_slot + i, {keys.col(i).data(), static_cast<std::size_t>(dim)});
    const Eigen::Map<const Eigen::MatrixXf> queries(waiting.queries.data(), dim, count * group_size_);
    Eigen::ArrayXXf weights = keys.transpose() * queries;  // (keys, queries * group_size)
    const auto most = (weights.colwise().maxCoeff().max(missing > 0 ? 0.0f : -std::numeric_limits<float>::infinity())).eval();
    weights = (weights.rowwise() - most).exp();
    const auto total = (weights.colwise().sum() + static_cast<float>(missing) * (-most).exp()).eval();
    const Eigen::ArrayXf drawn = (weights.rowwise() / total).rowwise().sum() / static_cast<float>(group_size_) + static_cast<float>(missing) / static_cast<float>(options_.chunk_size);
    std::copy_n(drawn.data(), count, numbers(kv_head) + waiting.first_slot);
    waiting.drop(count, dim * group_size_);
  }
  std::vector<float> pooled(Index kv_head, const SlotsView& slots, const std::vector<Index>& list) {
    std::vector<float> drawn(list.size() + 2), result(list.size());  // a zero at either end
    for (std::size_t i = 0; i < list.size(); ++i) drawn[i + 1] = numbers(kv_head)[list[i]] * value(kv_head, slots, list[i]).norm();
    for (std::size_t i = 0; i < list.size(); ++i) result[i] = (drawn[i] + drawn[i + 1] + drawn[i + 2]) / 3.0f;
    return result;
  }

  NonCausalAttentionOptions options_;
  std::vector<Waiting> waiting_;  // (kv_heads)
  Index group_size_ = 1;
};
static_assert(Policy<NonCausalAttention> && ScoresLayers<NonCausalAttention> && ObservesQueries<NonCausalAttention> && ChoosesPhases<NonCausalAttention> &&
              ProtectsSlots<NonCausalAttention>);

}  // namespace kvsnip
