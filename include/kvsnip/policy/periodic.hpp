// Periodic<P>: while decoding, P compresses the cache every `interval` tokens as if they had been a prompt.
//
// For policies that score prompts alone (SnapKV, Finch, ExpectedAttention, ...), so that they bound a cache by themselves,
// as kvpress' decoding presses do (https://github.com/NVIDIA/kvpress, DecodingPress).
#pragma once

#include <algorithm>
#include <concepts>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/decode_record.hpp"
#include "kvsnip/detail/decorator.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct PeriodicOptions {
  Index interval = 64;  ///< tokens from one compaction to the next, which leaves budget - interval slots or what is protected, >= 1

  static void each(auto& options, auto visit) { visit("interval", options.interval); }
};

/// P is shown the rows, and the queries if it wants them, of the last `interval` tokens as a prompt's. A compaction
/// allocates what a prompt's does; the steps between allocate nothing.
template <Policy P>
class Periodic : public detail::Decorator<P> {
  using Base = detail::Decorator<P>;

 public:
  static constexpr std::string_view name = "periodic";
  static constexpr std::string_view needs = "what the policy inside needs, while decoding too";
  using Options = PeriodicOptions;

  Periodic()
    requires std::default_initializable<P>
      : Periodic(P{}) {}
  explicit Periodic(P inner, const PeriodicOptions& options = {}) : Base(std::move(inner)), options_(options) {
    detail::require(options.interval >= 1, "Periodic: interval must be >= 1, got ", options.interval);
    detail::require(hooks::evicts(this->inner_, Phase::long_prompt), "Periodic: the policy inside must compress prompts, and this one never evicts");
    detail::require(!hooks::wants_column_sums(this->inner_, interval_as_prompt()), "Periodic: the policy inside must not need column sums");
  }

  const PeriodicOptions& options() const { return options_; }
  bool evicts(Phase) const { return true; }
  Protection protection(Phase phase) const {
    Protection p = hooks::protection(this->inner_, Phase::long_prompt);
    if (phase == Phase::decode) p.recent_window = std::max(p.recent_window, p.observation_window + 1);  // the window, and the incoming token
    return p;
  }
  Eviction eviction(Index) const { return {.count = options_.interval, .bulk = true}; }

  Index wanted_rows(const StepInfo& step) const {
    return step.phase == Phase::decode ? std::min(hooks::wanted_rows(this->inner_, interval_as_prompt()), step.num_queries) : Base::wanted_rows(step);
  }
  Index wanted_queries(const StepInfo& step) const {
    return step.phase == Phase::decode ? std::min(hooks::wanted_queries(this->inner_, interval_as_prompt()), step.num_queries) : Base::wanted_queries(step);
  }
  void observe(Index kv_head, const AttentionRows& rows) {
    if (rows.step.phase == Phase::decode) record(kv_head).keep(rows);
    else Base::observe(kv_head, rows);
  }
  void observe_queries(Index kv_head, const QueryRows& queries) {
    if (queries.step.phase == Phase::decode) record(kv_head).keep(queries);
    else Base::observe_queries(kv_head, queries);
  }

  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    if (slots.phase != Phase::decode) return Base::score(kv_head, slots, out);
    Base::score(kv_head, as_prompt(kv_head, slots), out);
    Base::on_prompt_end(kv_head);
  }
  bool scores_layer(Phase) const { return Base::scores_layer(Phase::long_prompt); }
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    if (heads.front().phase != Phase::decode) return Base::score_layer(heads, out);
    std::vector<SlotsView> prompts;
    for (Index h = 0; h < std::ssize(heads); ++h) prompts.push_back(as_prompt(h, heads[static_cast<std::size_t>(h)]));
    Base::score_layer(prompts, out);
    for (Index h = 0; h < std::ssize(heads); ++h) Base::on_prompt_end(h);
  }
  bool refines(Phase) const { return Base::refines(Phase::long_prompt); }
  void refine(Index kv_head, SlotsView slots, const Choice& choice, std::span<float> scores) {
    slots.phase = Phase::long_prompt;
    Base::refine(kv_head, slots, choice, scores);
  }

  void reserve(Index kv_head, Index num_slots) {
    Base::reserve(kv_head, num_slots);
    record(kv_head).reserve(num_slots);
  }
  void on_gather(Index kv_head, std::span<const Index> kept) {
    Base::on_gather(kv_head, kept);
    record(kv_head).gather(kept);
  }
  void on_prompt_end(Index kv_head) {
    Base::on_prompt_end(kv_head);
    const StepInfo step = interval_as_prompt();
    const auto wanted = [&](Index count) { return std::clamp<Index>(count, 0, options_.interval); };
    record(kv_head) = detail::DecodeRecord(wanted(hooks::wanted_rows(this->inner_, step)), this->wants_query_heads() ? shape_.group_size() : 1,
                                           wanted(hooks::wanted_queries(this->inner_, step)), shape_);
  }
  void reset(const Shape& shape) {
    Base::reset(shape);
    shape_ = shape;
    records_.assign(static_cast<std::size_t>(shape.kv_heads), {});
  }
  Index bytes() const {
    Index bytes = Base::bytes() + detail::heap_bytes(records_);
    for (const detail::DecodeRecord& record : records_) bytes += record.bytes();
    return bytes;
  }

 private:
  StepInfo interval_as_prompt() const { return {Phase::long_prompt, 0, options_.interval}; }
  detail::DecodeRecord& record(Index kv_head) { return records_[static_cast<std::size_t>(kv_head)]; }
  /// Shows P what has been decoded, and nothing else: a compaction that failed half-way may have left something.
  SlotsView as_prompt(Index kv_head, SlotsView slots) {
    Base::on_prompt_end(kv_head);
    slots.phase = Phase::long_prompt;
    record(kv_head).replay(this->inner_, kv_head, slots, options_.interval);
    return slots;
  }

  PeriodicOptions options_;
  Shape shape_;
  std::vector<detail::DecodeRecord> records_;  // (kv_heads)
};

}  // namespace kvsnip
