// The hooks of a policy with their defaults, so that callers need not ask which there are. Decorators call these too.
// A policy that scores nothing evicts nothing.
#pragma once

#include <concepts>
#include <span>

#include "kvsnip/policy.hpp"

namespace kvsnip::hooks {

/// A member with a hook's name but another signature would silently be no hook: say so.
template <class P>
consteval bool all_recognised() {
  static_assert(!requires { &P::score; } || ScoresSlots<P>, "a hook must be: score(Index, const SlotsView&, std::span<float>)");
  static_assert(!requires { &P::score_layer; } || ScoresLayers<P>, "a hook must be: score_layer(std::span<const SlotsView>, std::span<const std::span<float>>)");
  static_assert(!requires { &P::refine; } || RefinesScores<P>, "a hook must be: refine(Index, const SlotsView&, const Choice&, std::span<float>)");
  static_assert(!requires { &P::head_budgets; } || SharesBudget<P>, "a hook must be: head_budgets(std::span<const std::span<const float>>, Index, std::span<Index>)");
  static_assert(!requires { &P::head_budget; } || FixesHeadBudgets<P>, "a hook must be: Index head_budget(Index, Index) const");
  static_assert(!requires { &P::wanted_queries; } || ObservesQueries<P>, "hooks must be: Index wanted_queries(const StepInfo&) const, and observe_queries(Index, const QueryRows&)");
  static_assert(!requires { &P::observe_queries; } || ObservesQueries<P>, "a hook needs another: Index wanted_queries(const StepInfo&) const");
  static_assert(!requires { &P::needs_rope; } || MayNeedRope<P>, "a hook must be: bool needs_rope() const");
  static_assert(!requires { &P::observe; } || ObservesAttention<P>, "a hook must be: observe(Index, const AttentionRows&)");
  static_assert(!requires { &P::wants_column_sums; } || ObservesColumnSums<P>, "hooks must be: bool wants_column_sums(const StepInfo&) const, and observe_column_sums(Index, const ColumnSums&)");
  static_assert(!requires { &P::observe_column_sums; } || ObservesColumnSums<P>, "a hook needs another: bool wants_column_sums(const StepInfo&) const");
  static_assert(!requires { &P::wanted_rows; } || ChoosesRows<P>, "a hook must be: Index wanted_rows(const StepInfo&) const");
  static_assert(!requires { &P::wants_query_heads; } || WantsQueryHeads<P>, "a hook must be: bool wants_query_heads() const");
  static_assert(!requires { &P::evicts; } || ChoosesPhases<P>, "a hook must be: bool evicts(Phase) const");
  static_assert(!requires { &P::protection; } || ProtectsSlots<P>, "a hook must be: Protection protection(Phase) const");
  static_assert(!requires { &P::eviction; } || ChoosesEviction<P>, "a hook must be: Eviction eviction(Index) const");
  static_assert(!requires { &P::reserve; } || ReservesState<P>, "a hook must be: reserve(Index, Index)");
  static_assert(!requires { &P::on_insert; } || TracksInserts<P>, "a hook must be: on_insert(Index, Index, const SlotsView&)");
  static_assert(!requires { &P::on_evict; } || HandlesEvictions<P>, "a hook must be: on_evict(Index, const Leaving&)");
  static_assert(!requires { &P::on_gather; } || TracksGathers<P>, "a hook must be: on_gather(Index, std::span<const Index>)");
  static_assert(!requires { &P::on_prompt_end; } || TracksPrompts<P>, "a hook must be: on_prompt_end(Index)");
  static_assert(!requires { &P::reset; } || HasReset<P>, "a hook must be: reset(const Shape&)");
  static_assert(!requires { &P::bytes; } || CountsBytes<P>, "a hook must be: Index bytes() const");
  return true;
}

template <Policy P>
bool evicts(const P& policy, Phase phase) {
  if constexpr (ChoosesPhases<P>) return policy.evicts(phase);
  else return ScoresSlots<P> || ScoresLayers<P>;
}
template <Policy P>
Protection protection(const P& policy, Phase phase) {
  if constexpr (ProtectsSlots<P>) return policy.protection(phase);
  else return {};
}
template <Policy P>
Eviction eviction(const P& policy, Index budget) {
  if constexpr (ChoosesEviction<P>) return policy.eviction(budget);
  else return {};
}
template <Policy P>
Index wanted_rows(const P& policy, const StepInfo& step) {
  if constexpr (ChoosesRows<P>) return policy.wanted_rows(step);
  else return ObservesAttention<P> ? step.num_queries : 0;
}
template <Policy P>
bool wants_column_sums(const P& policy, const StepInfo& step) {
  if constexpr (ObservesColumnSums<P>) return step.phase != Phase::decode && step.num_queries > 0 && policy.wants_column_sums(step);
  else return false;
}
template <Policy P>
void observe_column_sums(P& policy, Index kv_head, const ColumnSums& sums) {
  if constexpr (ObservesColumnSums<P>) policy.observe_column_sums(kv_head, sums);
}
template <Policy P>
bool wants_query_heads(const P& policy) {
  if constexpr (WantsQueryHeads<P>) return policy.wants_query_heads();
  else return false;
}
template <Policy P>
void score(P& policy, Index kv_head, const SlotsView& slots, std::span<float> out) {
  if constexpr (ScoresSlots<P>) policy.score(kv_head, slots, out);
}
/// Whether score_layer, and not score, scores slots for `phase`. Decorators say it of what they decorate.
template <Policy P>
bool scores_layer(const P& policy, Phase phase) {
  if constexpr (requires { { policy.scores_layer(phase) } -> std::same_as<bool>; }) return policy.scores_layer(phase);
  else return ScoresLayers<P>;
}
template <Policy P>
void score_layer(P& policy, std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
  if constexpr (ScoresLayers<P>) policy.score_layer(heads, out);
}
/// Whether there is a refine. Decorators say it of what they decorate.
template <Policy P>
bool refines(const P& policy, Phase phase) {
  if constexpr (requires { { policy.refines(phase) } -> std::same_as<bool>; }) return policy.refines(phase);
  else return RefinesScores<P>;
}
template <Policy P>
void refine(P& policy, Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) {
  if constexpr (RefinesScores<P>) policy.refine(kv_head, slots, choice, scores);
}
/// Whether there is a head_budgets. Decorators say it of what they decorate.
template <Policy P>
bool shares_budget(const P& policy) {
  if constexpr (requires { { policy.shares_budget() } -> std::same_as<bool>; }) return policy.shares_budget();
  else return SharesBudget<P>;
}
template <Policy P>
void head_budgets(P& policy, std::span<const std::span<const float>> scores, Index total, std::span<Index> out) {
  if constexpr (SharesBudget<P>) policy.head_budgets(scores, total, out);
}
template <Policy P>
Index head_budget(const P& policy, Index kv_head, Index budget) {
  if constexpr (FixesHeadBudgets<P>) return policy.head_budget(kv_head, budget);
  else return budget;
}
template <Policy P>
Index wanted_queries(const P& policy, const StepInfo& step) {
  if constexpr (ObservesQueries<P>) return policy.wanted_queries(step);
  else return 0;
}
template <Policy P>
void observe_queries(P& policy, Index kv_head, const QueryRows& queries) {
  if constexpr (ObservesQueries<P>) policy.observe_queries(kv_head, queries);
}
template <Policy P>
bool needs_rope(const P& policy) {
  if constexpr (MayNeedRope<P>) return policy.needs_rope();
  else return false;
}
template <Policy P>
void observe(P& policy, Index kv_head, const AttentionRows& rows) {
  if constexpr (ObservesAttention<P>) policy.observe(kv_head, rows);
}
template <Policy P>
void reserve(P& policy, Index kv_head, Index num_slots) {
  if constexpr (ReservesState<P>) policy.reserve(kv_head, num_slots);
}
template <Policy P>
void on_insert(P& policy, Index kv_head, Index slot, const SlotsView& slots) {
  if constexpr (TracksInserts<P>) policy.on_insert(kv_head, slot, slots);
}
/// Whether there is an on_evict. Decorators say it of what they decorate.
template <Policy P>
bool handles_evictions(const P& policy) {
  if constexpr (requires { { policy.handles_evictions() } -> std::same_as<bool>; }) return policy.handles_evictions();
  else return HandlesEvictions<P>;
}
template <Policy P>
void on_evict(P& policy, Index kv_head, const Leaving& leaving) {
  if constexpr (HandlesEvictions<P>) policy.on_evict(kv_head, leaving);
}
template <Policy P>
void on_gather(P& policy, Index kv_head, std::span<const Index> kept) {
  if constexpr (TracksGathers<P>) policy.on_gather(kv_head, kept);
}
template <Policy P>
void on_prompt_end(P& policy, Index kv_head) {
  if constexpr (TracksPrompts<P>) policy.on_prompt_end(kv_head);
}
template <Policy P>
void reset(P& policy, const Shape& shape) {
  if constexpr (HasReset<P>) policy.reset(shape);
}
template <Policy P>
Index bytes(const P& policy) {
  if constexpr (CountsBytes<P>) return policy.bytes();
  else return 0;
}

}  // namespace kvsnip::hooks
