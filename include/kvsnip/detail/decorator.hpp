// What every decorator does: pass each hook on to the policy inside. A decorator overrides by hiding.
#pragma once

#include <utility>

#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// A base for policies that change one thing about another.
template <Policy P>
class Decorator {
 public:
  const P& inner() const { return inner_; }

  bool evicts(Phase phase) const { return hooks::evicts(inner_, phase); }
  Protection protection(Phase phase) const { return hooks::protection(inner_, phase); }
  Eviction eviction(Index budget) const { return hooks::eviction(inner_, budget); }
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) { hooks::score(inner_, kv_head, slots, out); }
  bool scores_layer(Phase phase) const { return hooks::scores_layer(inner_, phase); }
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) { hooks::score_layer(inner_, heads, out); }
  bool refines(Phase phase) const { return hooks::refines(inner_, phase); }
  void refine(Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) {
    hooks::refine(inner_, kv_head, slots, choice, scores);
  }
  bool shares_budget() const { return hooks::shares_budget(inner_); }
  void head_budgets(std::span<const std::span<const float>> scores, Index total, std::span<Index> out) {
    hooks::head_budgets(inner_, scores, total, out);
  }
  Index head_budget(Index kv_head, Index budget) const { return hooks::head_budget(inner_, kv_head, budget); }
  bool needs_rope() const { return hooks::needs_rope(inner_); }

  Index wanted_rows(const StepInfo& step) const { return hooks::wanted_rows(inner_, step); }
  bool wants_query_heads() const { return hooks::wants_query_heads(inner_); }
  void observe(Index kv_head, const AttentionRows& rows) { hooks::observe(inner_, kv_head, rows); }
  bool wants_column_sums(const StepInfo& step) const { return hooks::wants_column_sums(inner_, step); }
  void observe_column_sums(Index kv_head, const ColumnSums& sums) { hooks::observe_column_sums(inner_, kv_head, sums); }
  Index wanted_queries(const StepInfo& step) const { return hooks::wanted_queries(inner_, step); }
  void observe_queries(Index kv_head, const QueryRows& queries) { hooks::observe_queries(inner_, kv_head, queries); }

  void reserve(Index kv_head, Index num_slots) { hooks::reserve(inner_, kv_head, num_slots); }
  void on_insert(Index kv_head, Index slot, const SlotsView& slots) { hooks::on_insert(inner_, kv_head, slot, slots); }
  bool handles_evictions() const { return hooks::handles_evictions(inner_); }
  void on_evict(Index kv_head, const Leaving& leaving) { hooks::on_evict(inner_, kv_head, leaving); }
  void on_gather(Index kv_head, std::span<const Index> kept) { hooks::on_gather(inner_, kv_head, kept); }
  void on_prompt_end(Index kv_head) { hooks::on_prompt_end(inner_, kv_head); }
  void reset(const Shape& shape) { hooks::reset(inner_, shape); }
  Index bytes() const { return hooks::bytes(inner_); }

 protected:
  explicit Decorator(P inner) : inner_(std::move(inner)) {}

  /// The inner policy's scores of all kv_heads, whichever way it gives them.
  void score_inner(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    if (hooks::scores_layer(inner_, heads.front().phase)) return hooks::score_layer(inner_, heads, out);
    for (std::size_t h = 0; h < heads.size(); ++h) hooks::score(inner_, static_cast<Index>(h), heads[h], out[h]);
  }

  P inner_;
};

}  // namespace kvsnip::detail
