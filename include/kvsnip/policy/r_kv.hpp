// RKV: what the last queries attend to and no later token repeats, for reasoning that goes on for thousands of tokens.
//
// Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv:2505.24133, section 3; the
// constants are those of https://github.com/Zefan-Cai/R-KV.
// By itself it compresses prompts. The paper's form while decoding, every 128 tokens, is Periodic<RKV> with interval 128.
// Differs from the authors' code: weights are averaged over the query group, where the code takes the largest logit.
#pragma once

#include <algorithm>
#include <limits>
#include <string_view>
#include <vector>

#include "kvsnip/detail/observation_window.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/select.hpp"
#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct RKVOptions {
  Index observation_window = 8;  ///< last queries that vote, and positions kept whole [tokens], >= 1
  Index kernel_size = 7;         ///< of the max pooling of their votes over positions [slots], odd, >= 1
  float importance = 0.1f;       ///< the share of importance in the score, that of redundancy is the rest, in [0, 1]
  float similarity = 0.5f;       ///< cosine of keys above which a token repeats another, in [-1, 1]
  Index num_sinks = 0;           ///< first positions kept whatever their score [tokens], >= 0

  static void each(auto& options, auto visit) {
    visit("observation_window", options.observation_window);
    visit("kernel_size", options.kernel_size);
    visit("importance", options.importance);
    visit("similarity", options.similarity);
    visit("num_sinks", options.num_sinks);
  }
};

/// Needs the last observation_window rows of a prompt that may exceed the budget, and keys: a choice among n slots costs
/// n^2 head_dim multiply-adds.
class RKV : public detail::ObservationWindow<RKVOptions> {
 public:
  static constexpr std::string_view name = "r_kv";
  static constexpr std::string_view paper = "arXiv:2505.24133";
  static constexpr std::string_view needs = "a prompt's last attention rows, keys";

  explicit RKV(const RKVOptions& options = {}) : ObservationWindow("RKV", options) {
    detail::require(options.kernel_size >= 1 && options.kernel_size % 2 == 1, "RKV: kernel_size must be odd and >= 1, got ", options.kernel_size);
    detail::require(options.importance >= 0 && options.importance <= 1, "RKV: importance must be in [0, 1], got ", options.importance);
    detail::require(options.similarity >= -1 && options.similarity <= 1, "RKV: similarity must be in [-1, 1], got ", options.similarity);
  }

  void observe(Index kv_head, const AttentionRows& rows) {
    record(kv_head, rows, false, [](Index) { return 1.0f; });
  }
  /// importance x pooled votes - (1 - importance) x redundancy; the window is protected.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    const std::vector<Index> by_position = detail::middle(slots.positions, 0, 0);
    const Index n = slots.size(), prefix = std::max<Index>(n - options_.observation_window, 0), reach = options_.kernel_size / 2;
    const Eigen::ArrayXf votes = sum_of_rows(kv_head, n, false).col(0) / static_cast<float>(std::max<Index>(num_rows(kv_head), 1));
    const Eigen::ArrayXf repeated = redundancy(slots, by_position);
    std::fill(out.begin(), out.end(), 0.0f);
    for (Index i = 0; i < prefix; ++i) {
      float most = 0.0f;
      for (Index near = std::max<Index>(i - reach, 0); near <= std::min(i + reach, prefix - 1); ++near) most = std::max(most, votes[by_position[static_cast<std::size_t>(near)]]);
      out[static_cast<std::size_t>(by_position[static_cast<std::size_t>(i)])] = options_.importance * most - (1.0f - options_.importance) * repeated[i];
    }
  }

 private:
  /// (slots by position) Softmax over the tokens of how like the others each is. Of all that a token resembles, the newest
  /// one is not blamed for it.
  Eigen::ArrayXf redundancy(const SlotsView& slots, const std::vector<Index>& by_position) const {
    detail::require_vectors("RKV", slots);
    constexpr Index block = 64;
    const Index n = slots.size(), dim = slots.head_dim();
    Eigen::MatrixXf keys(dim, n);
    for (Index i = 0; i < n; ++i) {
      slots.read_key(by_position[static_cast<std::size_t>(i)], {keys.col(i).data(), static_cast<std::size_t>(dim)});
      keys.col(i) /= std::max(keys.col(i).norm(), std::numeric_limits<float>::min());
    }
    Eigen::ArrayXf likeness = Eigen::ArrayXf::Zero(n);
    Eigen::MatrixXf cosines(n, block);
    for (Index first = 0; first < n; first += block) {
      const Index count = std::min(block, n - first);
      cosines.leftCols(count).noalias() = keys.transpose() * keys.middleCols(first, count);
      for (Index j = 0; j < count; ++j) {
        cosines(first + j, j) = 0.0f;
        Index newest = n - 1;
        while (newest >= 0 && (newest == first + j || cosines(newest, j) <= options_.similarity)) --newest;
        if (newest >= 0) cosines(newest, j) = 0.0f;
      }
      likeness += cosines.leftCols(count).rowwise().sum().array();
    }
    likeness /= static_cast<float>(n);
    likeness = (likeness - likeness.maxCoeff()).exp();
    return likeness / likeness.sum();
  }
};
static_assert(Policy<RKV> && ScoresSlots<RKV> && ObservesAttention<RKV> && ChoosesRows<RKV> && ChoosesPhases<RKV> && ProtectsSlots<RKV>);

}  // namespace kvsnip
