// AdaKV<P>: the layer's budget goes to the kv_heads whose slots score highest, so heads hold different numbers of slots.
//
// Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
// arXiv:2407.11550, algorithm 1. P scores; a compaction shares the budget out, and decoding keeps to the shares.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <functional>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/decorator.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

enum class AdaKVSafeguard { blend, least };
constexpr std::array<std::string_view, 2> enum_names(AdaKVSafeguard) { return {"blend", "least"}; }

struct AdaKVOptions {
  double floor = 0.2;  ///< share of an even budget that every kv_head has, in [0, 1]; the paper uses 0.2
  /// blend: floor x even + (1 - floor) x adaptive (the paper), rounded, so that the total may be off by a few slots;
  /// least: a head's best slots are safe up to floor x even, the rest compete (kvpress)
  AdaKVSafeguard safeguard = AdaKVSafeguard::blend;
  bool normalize = false;  ///< multiply a head's scores by the share of their sum that its best even budget holds (the paper's code)

  static void each(auto& options, auto visit) {
    visit("floor", options.floor);
    visit("safeguard", options.safeguard);
    visit("normalize", options.normalize);
  }
};

template <Policy P>
class AdaKV : public detail::Decorator<P> {
 public:
  static constexpr std::string_view name = "ada_kv";
  static constexpr std::string_view paper = "arXiv:2407.11550";
  static constexpr std::string_view needs = "what the policy inside needs";
  using Options = AdaKVOptions;
  using Safeguard = AdaKVSafeguard;

  AdaKV()
    requires std::default_initializable<P>
      : AdaKV(P{}) {}
  explicit AdaKV(P inner, const AdaKVOptions& options = {}) : detail::Decorator<P>(std::move(inner)), options_(options) {
    detail::require(options.floor >= 0 && options.floor <= 1, "AdaKV: floor must be in [0, 1], got ", options.floor);
  }

  const AdaKVOptions& options() const { return options_; }
  bool shares_budget() const { return true; }
  /// @param scores  of each kv_head's slots that nothing protects
  /// @param total   how many of them all heads together may keep
  void head_budgets(std::span<const std::span<const float>> scores, Index total, std::span<Index> out) const {
    const Index heads = std::ssize(scores), even = total / heads;
    const auto size = [&](Index h) { return std::ssize(scores[static_cast<std::size_t>(h)]); };
    const Index safe = options_.safeguard == Safeguard::least ? floor_of(even) : 0;
    std::vector<std::pair<float, Index>> competing;  // score, kv_head
    for (Index h = 0; h < heads; ++h) {
      std::vector<float> best(scores[static_cast<std::size_t>(h)].begin(), scores[static_cast<std::size_t>(h)].end());
      std::sort(best.begin(), best.end(), std::greater<>());
      const float factor = options_.normalize ? share_of_best(best, even) : 1.0f;
      const Index num_safe = std::min(safe, size(h));
      for (Index i = num_safe; i < size(h); ++i) competing.emplace_back(best[static_cast<std::size_t>(i)] * factor, h);
      out[static_cast<std::size_t>(h)] = num_safe, total -= num_safe;
    }
    const auto end = competing.begin() + std::clamp<Index>(total, 0, std::ssize(competing));
    std::nth_element(competing.begin(), end, competing.end(), [](const auto& a, const auto& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; });
    for (auto winner = competing.begin(); winner != end; ++winner) ++out[static_cast<std::size_t>(winner->second)];
    if (options_.safeguard == Safeguard::least) return;
    for (Index h = 0; h < heads; ++h) {
      const double blended = static_cast<double>(out[static_cast<std::size_t>(h)]) * (1 - options_.floor) + static_cast<double>(floor_of(even));
      out[static_cast<std::size_t>(h)] = std::min(static_cast<Index>(std::nearbyint(blended)), size(h));
    }
  }

 private:
  Index floor_of(Index even) const { return static_cast<Index>(static_cast<double>(even) * options_.floor); }
  /// @param best  descending
  static float share_of_best(const std::vector<float>& best, Index even) {
    const float all = std::accumulate(best.begin(), best.end(), 0.0f);
    return all == 0.0f ? 1.0f : std::accumulate(best.begin(), best.begin() + std::min(even, std::ssize(best)), 0.0f) / all;
  }

  AdaKVOptions options_;
};

}  // namespace kvsnip
