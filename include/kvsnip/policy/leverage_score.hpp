// LeverageScore: keys that others cannot stand in for stay: rows of the key matrix with large leverage.
//
// Chari and Van Durme, "Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores",
// arXiv:2507.08143; the constants are those of kvpress' leverage press.
// Prompt only: alone it lets the cache grow while decoding; a Chain or Periodic bounds it.
#pragma once

#include <Eigen/Cholesky>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/mix.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/select.hpp"
#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/z_scores.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct LeverageScoreOptions {
  Index sketch_dimension = 48;  ///< that keys are projected to, >= 1; as in kvpress
  Index seed = 0;               ///< of the projection: any number
  Index num_sinks = 0;          ///< first positions: kept, and no part of the matrix [tokens], >= 0
  Index recent_window = 1;      ///< newest positions: likewise, the next token included [tokens], >= 0

  static void each(auto& options, auto visit) {
    visit("sketch_dimension", options.sketch_dimension);
    visit("seed", options.seed);
    visit("num_sinks", options.num_sinks);
    visit("recent_window", options.recent_window);
  }
};

/// Needs keys as they were before RoPE, and so the model's Rope. Nothing of attention; no state.
class LeverageScore {
 public:
  static constexpr std::string_view name = "leverage_score";
  static constexpr std::string_view paper = "arXiv:2507.08143";
  static constexpr std::string_view needs = "keys before RoPE";
  using Options = LeverageScoreOptions;

  explicit LeverageScore(const LeverageScoreOptions& options = {}) : options_(options) {
    detail::require(options.sketch_dimension >= 1, "LeverageScore: sketch_dimension must be >= 1, got ", options.sketch_dimension);
    detail::require(options.num_sinks >= 0, "LeverageScore: num_sinks must be >= 0, got ", options.num_sinks);
    detail::require(options.recent_window >= 0, "LeverageScore: recent_window must be >= 0, got ", options.recent_window);
  }
  /// @param sketch  (head_dim, sketch_dimension) by kv_head: the projection, in the place of a random one
  LeverageScore(std::vector<Eigen::MatrixXf> sketch, const LeverageScoreOptions& options) : LeverageScore(options) { sketch_ = std::move(sketch); }

  const LeverageScoreOptions& options() const { return options_; }
  bool evicts(Phase phase) const { return phase != Phase::decode; }
  bool needs_rope() const { return true; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .recent_window = options_.recent_window}; }

  /// Leverage, as z-scores over all kv_heads; what is protected gets 0.
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) const {
    std::vector<std::vector<float>> scores;
    for (Index h = 0; h < std::ssize(heads); ++h) scores.push_back(leverage(h, heads[static_cast<std::size_t>(h)]));
    detail::to_z_scores(scores);
    for (std::size_t h = 0; h < heads.size(); ++h) {
      std::fill(out[h].begin(), out[h].end(), 0.0f);
      std::size_t i = 0;
      for (const Index slot : detail::middle(heads[h].positions, options_.num_sinks, options_.recent_window - 1)) out[h][static_cast<std::size_t>(slot)] = scores[h][i++];
    }
  }

  Index bytes() const {
    Index bytes = detail::heap_bytes(sketch_);
    for (const Eigen::MatrixXf& sketch : sketch_) bytes += sketch.size() * static_cast<Index>(sizeof(float));
    return bytes;
  }

 private:
  /// diag(X (X'X + 0.01)^-1 X'), X = (keys less their mean) x sketch.
  std::vector<float> leverage(Index kv_head, const SlotsView& slots) const {
    detail::require_vectors("LeverageScore", slots);
    const std::vector<Index> list = detail::middle(slots.positions, options_.num_sinks, options_.recent_window - 1);
    const Index dim = slots.head_dim();
    Eigen::MatrixXf keys(dim, std::ssize(list));
    for (Index i = 0; i < keys.cols(); ++i) {
      const Index slot = list[static_cast<std::size_t>(i)];
      const std::span<float> key(keys.col(i).data(), static_cast<std::size_t>(dim));
      slots.read_key(slot, key);
      slots.rope->rotate(key, -slots.positions[static_cast<std::size_t>(slot)]);
    }
    if (keys.cols() == 0) return {};
    keys.colwise() -= keys.rowwise().mean().eval();
    const Eigen::MatrixXf sketched = sketch(kv_head, dim).transpose() * keys;  // (sketch_dimension, slots)
    Eigen::MatrixXd gram = (sketched * sketched.transpose()).cast<double>();
    gram.diagonal().array() += 0.01;
    const Eigen::MatrixXd solved = gram.llt().matrixL().solve(sketched.cast<double>());
    std::vector<float> result(list.size());
    Eigen::Map<Eigen::RowVectorXf>(result.data(), std::ssize(result)) = solved.colwise().squaredNorm().cast<float>();
    return result;
  }
  /// (head_dim, sketch_dimension) Normal, variance 1 / sketch_dimension.
  Eigen::MatrixXf sketch(Index kv_head, Index head_dim) const {
    if (!sketch_.empty()) {
      detail::require_state(kv_head < std::ssize(sketch_) && sketch_[static_cast<std::size_t>(kv_head)].rows() == head_dim,
                            "LeverageScore: sketch must have head_dim = ", head_dim, " rows for each kv_head, not so for kv_head ", kv_head);
      return sketch_[static_cast<std::size_t>(kv_head)];
    }
    const std::uint64_t stream = detail::mix(detail::mix(static_cast<std::uint64_t>(options_.seed)) + static_cast<std::uint64_t>(kv_head));
    const auto uniform = [&](Index i) { return (static_cast<double>(detail::mix(stream + static_cast<std::uint64_t>(i)) >> 40) + 0.5) * 0x1p-24; };
    return Eigen::MatrixXf::NullaryExpr(head_dim, options_.sketch_dimension, [&](Index row, Index column) {  // Box and Muller
      const Index i = 2 * (column * head_dim + row);
      return static_cast<float>(std::sqrt(-2 * std::log(uniform(i)) / static_cast<double>(options_.sketch_dimension)) * std::cos(2 * std::numbers::pi * uniform(i + 1)));
    });
  }

  LeverageScoreOptions options_;
  std::vector<Eigen::MatrixXf> sketch_;  // by kv_head; empty: random
};
static_assert(Policy<LeverageScore> && ScoresLayers<LeverageScore> && ChoosesPhases<LeverageScore> && MayNeedRope<LeverageScore> && ProtectsSlots<LeverageScore>);

}  // namespace kvsnip
