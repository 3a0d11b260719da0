// Chain<P, D>: P compresses the prompt, D evicts while decoding.
//
// D sees the prompt's rows too, so that it starts with a history: Chain<SnapKV, Scissorhands>.
#pragma once

#include <algorithm>
#include <concepts>
#include <utility>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

/// P's protection holds when a prompt is compacted (and D's keep_prompt), D's afterwards.
template <Policy P, Policy D>
  requires(ScoresSlots<P> || ScoresLayers<P>)
class Chain {
 public:
  Chain()
    requires(std::default_initializable<P> && std::default_initializable<D>)
      : Chain(P{}, D{}) {}
  explicit Chain(P prompt, D decode = D{}) : prompt_(std::move(prompt)), decode_(std::move(decode)) {
    detail::require(hooks::evicts(prompt_, Phase::long_prompt), "Chain: the first policy must compress prompts, and this one never evicts");
  }

  const P& prompt() const { return prompt_; }
  const D& decode() const { return decode_; }

  bool evicts(Phase phase) const {
    return phase == Phase::decode ? hooks::evicts(decode_, phase) : hooks::evicts(prompt_, phase);
  }
  Protection protection(Phase phase) const {
    if (phase == Phase::decode) return hooks::protection(decode_, phase);
    Protection p = hooks::protection(prompt_, phase);
    p.keep_prompt |= hooks::protection(decode_, phase).keep_prompt;  // a later prompt must not undo it
    return p;
  }
  Eviction eviction(Index budget) const { return hooks::eviction(decode_, budget); }
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    if (slots.phase == Phase::decode) hooks::score(decode_, kv_head, slots, out);
    else hooks::score(prompt_, kv_head, slots, out);
  }
  bool scores_layer(Phase phase) const {
    return phase == Phase::decode ? hooks::scores_layer(decode_, phase) : hooks::scores_layer(prompt_, phase);
  }
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    if (heads.front().phase == Phase::decode) hooks::score_layer(decode_, heads, out);
    else hooks::score_layer(prompt_, heads, out);
  }
  bool refines(Phase phase) const { return phase == Phase::decode ? hooks::refines(decode_, phase) : hooks::refines(prompt_, phase); }
  void refine(Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) {
    if (slots.phase == Phase::decode) hooks::refine(decode_, kv_head, slots, choice, scores);
    else hooks::refine(prompt_, kv_head, slots, choice, scores);
  }
  bool shares_budget() const { return hooks::shares_budget(prompt_); }
  void head_budgets(std::span<const std::span<const float>> scores, Index total, std::span<Index> out) {
    hooks::head_budgets(prompt_, scores, total, out);
  }
  Index head_budget(Index kv_head, Index budget) const { return hooks::head_budget(prompt_, kv_head, budget); }
  bool needs_rope() const { return hooks::needs_rope(prompt_) || hooks::needs_rope(decode_); }

  Index wanted_rows(const StepInfo& step) const { return std::max(prompt_rows(step), hooks::wanted_rows(decode_, step)); }
  bool wants_query_heads() const { return hooks::wants_query_heads(prompt_) || hooks::wants_query_heads(decode_); }
  /// Each gets the rows it asked for: rows in hand that come before a policy's share are not passed on.
  void observe(Index kv_head, const AttentionRows& rows) {
    const StepInfo& step = rows.step;
    const auto share = [&](Index wanted) {
      const Index first = step.first_position + step.num_queries - std::min(wanted, step.num_queries);
      return rows.without_first(std::clamp<Index>(first - rows.first_position, 0, rows.num_queries()));
    };
    if (const AttentionRows p = share(prompt_rows(step)); p.num_queries() > 0) hooks::observe(prompt_, kv_head, p);
    if (const AttentionRows d = share(hooks::wanted_rows(decode_, step)); d.num_queries() > 0) hooks::observe(decode_, kv_head, d);
  }
  Index wanted_queries(const StepInfo& step) const { return std::max(prompt_queries(step), hooks::wanted_queries(decode_, step)); }
  void observe_queries(Index kv_head, const QueryRows& queries) {
    const auto share = [&](Index wanted) { return queries.without_first(queries.num_queries() - std::min(wanted, queries.num_queries())); };
    if (const QueryRows p = share(prompt_queries(queries.step)); p.num_queries() > 0) hooks::observe_queries(prompt_, kv_head, p);
    if (const QueryRows d = share(hooks::wanted_queries(decode_, queries.step)); d.num_queries() > 0) hooks::observe_queries(decode_, kv_head, d);
  }
  bool wants_column_sums(const StepInfo& step) const {
    return hooks::wants_column_sums(prompt_, step) || hooks::wants_column_sums(decode_, step);
  }
  void observe_column_sums(Index kv_head, const ColumnSums& sums) {
    if (hooks::wants_column_sums(prompt_, sums.step)) hooks::observe_column_sums(prompt_, kv_head, sums);
    if (hooks::wants_column_sums(decode_, sums.step)) hooks::observe_column_sums(decode_, kv_head, sums);
  }
  void reserve(Index kv_head, Index num_slots) {
    hooks::reserve(prompt_, kv_head, num_slots);
    hooks::reserve(decode_, kv_head, num_slots);
  }
  void on_insert(Index kv_head, Index slot, const SlotsView& slots) {
    hooks::on_insert(prompt_, kv_head, slot, slots);
    hooks::on_insert(decode_, kv_head, slot, slots);
  }
  bool handles_evictions() const { return hooks::handles_evictions(prompt_) || hooks::handles_evictions(decode_); }
  void on_evict(Index kv_head, const Leaving& leaving) {
    hooks::on_evict(prompt_, kv_head, leaving);
    hooks::on_evict(decode_, kv_head, leaving);
  }
  void on_gather(Index kv_head, std::span<const Index> kept) {
    hooks::on_gather(prompt_, kv_head, kept);
    hooks::on_gather(decode_, kv_head, kept);
  }
  void on_prompt_end(Index kv_head) {
    hooks::on_prompt_end(prompt_, kv_head);
    hooks::on_prompt_end(decode_, kv_head);
  }
  void reset(const Shape& shape) {
    hooks::reset(prompt_, shape);
    hooks::reset(decode_, shape);
  }
  Index bytes() const { return hooks::bytes(prompt_) + hooks::bytes(decode_); }

 private:
  /// P learns from prompts alone.
  Index prompt_queries(const StepInfo& step) const { return step.phase == Phase::decode ? 0 : hooks::wanted_queries(prompt_, step); }
  Index prompt_rows(const StepInfo& step) const { return step.phase == Phase::decode ? 0 : hooks::wanted_rows(prompt_, step); }

  P prompt_;
  D decode_;
};

}  // namespace kvsnip
