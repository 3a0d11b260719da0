// LagKV: tokens whose channels vary most, measured against the tokens that come next, stay.
//
// Liang et al., "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important", arXiv:2504.04704.
// After the sinks, tokens are taken in partitions of lag_size. Each is judged once the next one is complete: scaled,
// channel by channel, by the least and the most of that one, a token that spreads over its channels is important.
// Needs keys and values. A token is judged once: each is read four times in all, none at most steps. State: 4 bytes per
// slot and kv_head.
// Differs from the paper, which keeps a fixed share of every partition and so lets the cache grow: here the lowest of all
// judged tokens go. Tokens not judged yet (at least the last lag_size) go after all judged ones, the oldest first: a budget
// below num_sinks + 2 lag_size makes this StreamingLLM. A channel that is constant in the next partition says nothing.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct LagKVOptions {
  Index lag_size = 128;        ///< tokens of a partition [tokens], >= 1; as in kvpress
  bool cross_scoring = false;  ///< scores of different partitions compare by themselves; false: by their ranks, as the paper's shares
  Index num_sinks = 4;         ///< first positions, never evicted, in no partition [tokens], >= 0; as in kvpress
  Index recent_window = 1;     ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;   ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) {
    visit("lag_size", options.lag_size);
    visit("cross_scoring", options.cross_scoring);
    detail::each_usual(options, visit);
  }
};

class LagKV : public detail::UsualOptions<LagKVOptions>, public detail::SlotNumbers<1, 2, true> {
 public:
  static constexpr std::string_view name = "lag_kv";
  static constexpr std::string_view paper = "arXiv:2504.04704";
  static constexpr std::string_view needs = "keys and values";

  explicit LagKV(const LagKVOptions& options = {}) : UsualOptions("LagKV", options) {
    detail::require(options.lag_size >= 1, "LagKV: lag_size must be >= 1, got ", options.lag_size);
  }

  void on_insert(Index kv_head, Index slot, const SlotsView&) { *enter(kv_head, slot) = not_judged; }
  /// In [0, 1]; 1 for sinks and for what is not judged yet.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    detail::require_vectors("LagKV", slots);
    float* scores = numbers(kv_head);
    std::span<Index> waiting = by_position(kv_head, slots, [scores](Index slot) { return scores[slot] == not_judged; });
    if (!std::exchange(knows_sinks_[static_cast<std::size_t>(kv_head)], true)) {
      const std::span<Index> sinks = waiting.first(std::min(waiting.size(), static_cast<std::size_t>(options_.num_sinks)));
      for (const Index slot : sinks) scores[slot] = 1.0f;
      waiting = waiting.subspan(sinks.size());
    }
    for (const auto lag = static_cast<std::size_t>(options_.lag_size); waiting.size() / 2 >= lag; waiting = waiting.subspan(lag))
      judge(kv_head, slots, waiting.first(lag), waiting.subspan(lag, lag), out);
    std::transform(scores, scores + slots.size(), out.begin(), [](float score) { return std::min(score, 1.0f); });
  }
  void reset(const Shape& shape) {
    SlotNumbers::reset(shape);
    knows_sinks_.assign(static_cast<std::size_t>(shape.kv_heads), false);
  }
  Index bytes() const { return SlotNumbers::bytes() + detail::heap_bytes(knows_sinks_); }

 private:
  static constexpr float not_judged = 2.0f;

  /// @param part  the slots to judge, by position; afterwards by score
  /// @param next  the slots of the partition after it
  /// @param out   (slots) scratch
  void judge(Index kv_head, const SlotsView& slots, std::span<Index> part, std::span<const Index> next, std::span<float> out) {
    float* scores = numbers(kv_head);
    for (const Index slot : part) scores[slot] = 0.0f;
    for (const bool of_keys : {true, false}) {
      const auto read = [&](Index slot) { return of_keys ? key(kv_head, slots, slot) : value(kv_head, slots, slot); };
      spread(kv_head, part, next, read, out);
      float most = 0.0f, sum = 0.0f;
      for (const Index slot : part) most = std::max(most, out[static_cast<std::size_t>(slot)]);
      for (const Index slot : part) sum += std::exp(out[static_cast<std::size_t>(slot)] - most);
      for (const Index slot : part) scores[slot] += 0.5f * std::exp(out[static_cast<std::size_t>(slot)] - most) / sum;
    }
    if (options_.cross_scoring) return;
    std::sort(part.begin(), part.end(), [&](Index a, Index b) {
      return scores[a] != scores[b] ? scores[a] < scores[b] : slots.positions[static_cast<std::size_t>(a)] < slots.positions[static_cast<std::size_t>(b)];
    });
    for (std::size_t rank = 0; rank < part.size(); ++rank) scores[part[rank]] = static_cast<float>(rank) / static_cast<float>(part.size());
  }
  /// out[slot], for each of `part`: the standard deviation over its channels, scaled by the range of `next`.
  template <class Read>
  void spread(Index kv_head, std::span<const Index> part, std::span<const Index> next, const Read& read, std::span<float> out) {
    Vector low = vector<0>(kv_head), high = vector<1>(kv_head);
    low = high = read(next.front());
    for (const Index slot : next.subspan(1)) {
      const Column x = read(slot);
      low = low.cwiseMin(x), high = high.cwiseMax(x);
    }
    for (const Index slot : part) {
      const Column x = read(slot);
      double mean = 0, squares = 0;  // Welford's: about the mean so far
      for (Index d = 0; d < x.size(); ++d) {
        const double range = static_cast<double>(high[d]) - static_cast<double>(low[d]);
        const double scaled = range > 0 ? (static_cast<double>(x[d]) - static_cast<double>(low[d])) / range : 0;
        const double difference = scaled - mean;
        mean += difference / static_cast<double>(d + 1);
        squares += difference * (scaled - mean);
      }
      const double deviation = x.size() > 1 ? std::sqrt(squares / static_cast<double>(x.size() - 1)) : 0;
      out[static_cast<std::size_t>(slot)] = static_cast<float>(std::min(deviation, static_cast<double>(std::numeric_limits<float>::max())));
    }
  }

  std::vector<char> knows_sinks_;  // (kv_heads) whether the sinks have been set apart
};
static_assert(Policy<LagKV> && ScoresSlots<LagKV> && TracksInserts<LagKV> && TracksGathers<LagKV> && ReservesState<LagKV> && HasReset<LagKV> && CountsBytes<LagKV>);

}  // namespace kvsnip
