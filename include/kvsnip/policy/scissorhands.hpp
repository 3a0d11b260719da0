// Scissorhands: tokens that attention keeps passing over go.
//
// Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
// Time", arXiv:2305.17118, section 4.1, algorithm 2. A slot is low in a row of attention weights when its weight is below
// 1 / (visible slots), that is below uniform attention.
//   Mode::count     the paper: score by low rows within the history window; half the budget is dropped at once.
//   Mode::fraction  (default) low rows / rows seen, so that a young token is not kept for its youth alone; victims wait in
//                   the eviction queue, and the cache stays full.
// Differs from the paper: weights are averaged over the query group, sinks can be protected, rows can be sampled.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "kvsnip/detail/bit_history.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

enum class ScissorhandsMode { fraction, count };
constexpr std::array<std::string_view, 2> enum_names(ScissorhandsMode) { return {"fraction", "count"}; }

struct ScissorhandsOptions {
  Index history_window = 400;  ///< recorded rows that count [rows], 1 to 65535; the paper uses 400
  Index recent_window = 10;    ///< newest positions never evicted, the incoming one included [tokens], >= 0; the paper uses 10
  Index num_sinks = 4;         ///< first positions never evicted [tokens], >= 0
  bool keep_prompt = false;    ///< never evict the first prompt; it must leave recent_window of the budget free
  Index drop = 0;              ///< victims chosen at once [slots], >= 1; 0: 8 (fraction), half the budget (count, the paper)
  Index record_interval = 1;   ///< record the rows whose position is a multiple of this [tokens], >= 1
  ScissorhandsMode mode = ScissorhandsMode::fraction;

  static void each(auto& options, auto visit) {
    visit("history_window", options.history_window);
    visit("recent_window", options.recent_window);
    visit("num_sinks", options.num_sinks);
    visit("keep_prompt", options.keep_prompt);
    visit("drop", options.drop);
    visit("record_interval", options.record_interval);
    visit("mode", options.mode);
  }
};

/// Needs every recorded row while decoding, and the last history_window recorded rows of a prompt.
class Scissorhands {
 public:
  static constexpr std::string_view name = "scissorhands";
  static constexpr std::string_view paper = "arXiv:2305.17118";
  static constexpr std::string_view needs = "attention rows";
  using Options = ScissorhandsOptions;
  using Mode = ScissorhandsMode;

  explicit Scissorhands(const ScissorhandsOptions& options = {}) : options_(options) {
    detail::require(options.history_window >= 1 && options.history_window <= 65535, "Scissorhands: history_window must be in [1, 65535], got ",
                    options.history_window);
    detail::require(options.recent_window >= 0, "Scissorhands: recent_window must be >= 0, got ", options.recent_window);
    detail::require(options.num_sinks >= 0, "Scissorhands: num_sinks must be >= 0, got ", options.num_sinks);
    detail::require(options.drop >= 0, "Scissorhands: drop must be >= 0, got ", options.drop);
    detail::require(options.record_interval >= 1 && options.record_interval <= (Index{1} << 31),
                    "Scissorhands: record_interval must be in [1, 2^31], got ", options.record_interval);
  }

  const ScissorhandsOptions& options() const { return options_; }
  Protection protection(Phase) const {
    return {.num_sinks = options_.num_sinks, .recent_window = options_.recent_window, .keep_prompt = options_.keep_prompt};
  }
  Eviction eviction(Index budget) const {
    if (options_.mode == Mode::count) return {.count = options_.drop > 0 ? options_.drop : std::max<Index>(budget / 2, 1), .bulk = true};
    return {.count = options_.drop > 0 ? options_.drop : 8};
  }
  /// From the first recorded position of the last history_window in the step on.
  Index wanted_rows(const StepInfo& step) const {
    const Index m = options_.record_interval;
    const Index newest = step.last_position() / m * m;  // the newest multiple of m
    if (newest < step.first_position || step.num_queries == 0) return 0;
    return step.last_position() - std::max(newest - (options_.history_window - 1) * m, (step.first_position + m - 1) / m * m) + 1;
  }

  void observe(Index kv_head, const AttentionRows& rows) {
    detail::BitHistory& history = histories_[static_cast<std::size_t>(kv_head)];
    for (Index j = 0; j < rows.num_queries(); ++j) {
      const Index position = rows.first_position + j;
      if (position % options_.record_interval != 0) continue;
      const float* weights = rows.mean.col(j).data();
      const float uniform = 1.0f / static_cast<float>(rows.num_visible(j));
      const auto is_low = [=](Index slot) { return weights[slot] < uniform; };
      if (position == rows.step.last_position()) {
        history.record(rows.mean.rows(), is_low);
        continue;
      }
      const auto is_later = [&](Index slot) { return rows.positions[static_cast<std::size_t>(slot)] > position; };
      history.record(rows.mean.rows(), [&](Index slot) { return !is_later(slot) && is_low(slot); });
      for (Index slot = 0; slot < rows.mean.rows(); ++slot)
        if (is_later(slot)) history.unsee(slot);
    }
  }

  /// The larger the share (or number) of low rows, the lower. A slot never observed ranks above all that were.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    const float by_seen = options_.mode == Mode::count ? 0.0f : 1.0f;
    float* scores = out.data();
    histories_[static_cast<std::size_t>(kv_head)].for_each(slots.size(), [=](Index slot, float low, float seen) {
      const float unseen = std::max(1.0f - seen, 0.0f);  // 1 or 0: no branch, so that compilers vectorise
      scores[slot] = unseen - low / (1.0f + by_seen * (seen + unseen - 1.0f));
    });
  }

  void reserve(Index kv_head, Index num_slots) { histories_[static_cast<std::size_t>(kv_head)].reserve(num_slots); }
  void on_insert(Index kv_head, Index slot, const SlotsView&) { histories_[static_cast<std::size_t>(kv_head)].clear(slot); }
  void on_gather(Index kv_head, std::span<const Index> kept) { histories_[static_cast<std::size_t>(kv_head)].gather(kept); }
  void on_prompt_end(Index kv_head) { histories_[static_cast<std::size_t>(kv_head)].shrink(); }
  void reset(const Shape& shape) {
    histories_.assign(static_cast<std::size_t>(shape.kv_heads), detail::BitHistory(options_.history_window));
  }
  Index bytes() const {
    Index bytes = detail::heap_bytes(histories_);
    for (const detail::BitHistory& history : histories_) bytes += history.bytes();
    return bytes;
  }

 private:
  ScissorhandsOptions options_;
  std::vector<detail::BitHistory> histories_;  // (kv_heads): the rows in which a slot was low
};
static_assert(Policy<Scissorhands> && ScoresSlots<Scissorhands> && ObservesAttention<Scissorhands> && TracksInserts<Scissorhands> &&
              ChoosesEviction<Scissorhands> && ProtectsSlots<Scissorhands> && ChoosesRows<Scissorhands>);

}  // namespace kvsnip
