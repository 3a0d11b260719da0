// Compactor: keys that others cannot stand in for, and those that a prompt's queries would attend to, added up.
//
// Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
// arXiv:2507.08143. LeverageScore and NonCausalAttention are its parts.
// Differs from kvpress: the weight of leverage is an option of its own there too, but defaults to the share removed; the
// first and last tokens are protected, there they tie with the best.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"
#include "kvsnip/policy/leverage_score.hpp"
#include "kvsnip/policy/non_causal_attention.hpp"

namespace kvsnip {

struct CompactorOptions {
  double blending = 0.5;        ///< weight of leverage, that of non-causal attention being 1; finite
  Index chunk_size = 256;       ///< as NonCausalAttention's
  Index sketch_dimension = 48;  ///< as LeverageScore's
  Index seed = 0;               ///< as LeverageScore's
  Index num_sinks = 8;          ///< first positions, kept and not scored [tokens], >= 0; as in kvpress
  Index recent_window = 5;      ///< newest positions, likewise, the next token included [tokens], >= 0; as in kvpress

  static void each(auto& options, auto visit) {
    visit("blending", options.blending);
    visit("chunk_size", options.chunk_size);
    visit("sketch_dimension", options.sketch_dimension);
    visit("seed", options.seed);
    visit("num_sinks", options.num_sinks);
    visit("recent_window", options.recent_window);
  }
};

/// Needs all queries of a prompt and the model's Rope. Prompt only.
class Compactor : public NonCausalAttention {
 public:
  static constexpr std::string_view name = "compactor";
  static constexpr std::string_view paper = "arXiv:2507.08143";
  static constexpr std::string_view needs = "a prompt's queries, values, keys before RoPE";
  using Options = CompactorOptions;

  explicit Compactor(const CompactorOptions& options = {}) : Compactor(options, LeverageScore(leverage_options(options))) {}
  /// @param sketch  as LeverageScore's
  Compactor(std::vector<Eigen::MatrixXf> sketch, const CompactorOptions& options) : Compactor(options, LeverageScore(std::move(sketch), leverage_options(options))) {}

  const CompactorOptions& options() const { return compactor_options_; }
  bool needs_rope() const { return true; }
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    std::vector<std::vector<float>> leverage;
    for (const std::span<float> of_head : out) leverage.emplace_back(of_head.size());
    leverage_.score_layer(heads, std::vector<std::span<float>>(leverage.begin(), leverage.end()));
    NonCausalAttention::score_layer(heads, out);
    for (std::size_t h = 0; h < out.size(); ++h)
      for (std::size_t slot = 0; slot < out[h].size(); ++slot) out[h][slot] += static_cast<float>(compactor_options_.blending) * leverage[h][slot];
  }
  Index bytes() const { return NonCausalAttention::bytes() + leverage_.bytes(); }

 private:
  Compactor(const CompactorOptions& options, LeverageScore leverage)
      : NonCausalAttention({.chunk_size = options.chunk_size, .num_sinks = options.num_sinks, .recent_window = options.recent_window}),
        compactor_options_(options), leverage_(std::move(leverage)) {
    detail::require(std::isfinite(options.blending), "Compactor: blending must be finite, got ", options.blending);
  }
  static LeverageScoreOptions leverage_options(const CompactorOptions& o) {
    return {.sketch_dimension = o.sketch_dimension, .seed = o.seed, .num_sinks = o.num_sinks, .recent_window = o.recent_window};
  }

  CompactorOptions compactor_options_;
  LeverageScore leverage_;
};
static_assert(Policy<Compactor> && ScoresLayers<Compactor> && ObservesQueries<Compactor> && MayNeedRope<Compactor>);

}  // namespace kvsnip
