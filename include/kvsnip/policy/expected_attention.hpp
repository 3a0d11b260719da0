// ExpectedAttention: keys that queries yet to come are likely to attend to, with values that matter.
//
// Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
// arXiv:2510.00636, section 3. The prompt's queries, as they were before RoPE, are taken for samples of a normal distribution;
// turned by RoPE to the positions to come, on average, it gives every key its expected weight. Prompt only: alone it lets the
// cache grow while decoding; a Chain or Periodic bounds it.
#pragma once

#include <cmath>
#include <string_view>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/select.hpp"
#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct ExpectedAttentionOptions {
  Index num_future_positions = 512;  ///< that RoPE is averaged over [tokens], >= 1; as in kvpress
  bool use_covariance = true;        ///< else the mean query alone
  bool use_value_norm = true;        ///< multiply by the norm of the value
  float epsilon = 0;                 ///< added to the expected weight before that, >= 0
  Index num_sinks = 4;               ///< first positions: kept, and no sample [tokens], >= 0; as in kvpress
  Index recent_window = 1;           ///< newest positions kept, the next token included [tokens], >= 0

  static void each(auto& options, auto visit) {
    visit("num_future_positions", options.num_future_positions);
    visit("use_covariance", options.use_covariance);
    visit("use_value_norm", options.use_value_norm);
    visit("epsilon", options.epsilon);
    visit("num_sinks", options.num_sinks);
    visit("recent_window", options.recent_window);
  }
};

/// Needs all queries of a prompt that may exceed the budget, and the model's Rope. State while a prompt goes on:
/// 8 head_dim (head_dim + 1) bytes a query head.
class ExpectedAttention {
 public:
  static constexpr std::string_view name = "expected_attention";
  static constexpr std::string_view paper = "arXiv:2510.00636";
  static constexpr std::string_view needs = "a prompt's queries before RoPE, keys and values";
  using Options = ExpectedAttentionOptions;

  explicit ExpectedAttention(const ExpectedAttentionOptions& options = {}) : options_(options) {
    detail::require(options.num_future_positions >= 1, "ExpectedAttention: num_future_positions must be >= 1, got ", options.num_future_positions);
    detail::require(options.epsilon >= 0, "ExpectedAttention: epsilon must be >= 0, got ", options.epsilon);
    detail::require(options.num_sinks >= 0, "ExpectedAttention: num_sinks must be >= 0, got ", options.num_sinks);
    detail::require(options.recent_window >= 0, "ExpectedAttention: recent_window must be >= 0, got ", options.recent_window);
  }

  const ExpectedAttentionOptions& options() const { return options_; }
  bool evicts(Phase phase) const { return phase != Phase::decode; }
  bool needs_rope() const { return true; }
  Protection protection(Phase) const { return {.num_sinks = options_.num_sinks, .recent_window = options_.recent_window}; }
  Index wanted_queries(const StepInfo& step) const { return step.phase == Phase::long_prompt ? step.num_queries : 0; }
  void observe_queries(Index kv_head, const QueryRows& rows) {
    Head& head = heads_[static_cast<std::size_t>(kv_head)];
    const Index dim = rows.queries.rows(), group = rows.group_size, first_slot = rows.slots.size() - rows.num_queries();
    head.sums.resize(static_cast<std::size_t>(group * dim * (dim + 1)));
    for (Index first = std::max<Index>(options_.num_sinks - first_slot, 0); first < rows.num_queries(); first += block_size) {
      const Index count = std::min(block_size, rows.num_queries() - first);
      std::vector<Eigen::MatrixXf> by_head(static_cast<std::size_t>(group), Eigen::MatrixXf(dim, count));
      for (Index j = 0; j < count; ++j) {
        Eigen::MatrixXf block = rows.queries.middleCols((first + j) * group, group);
        rows.slots.rope->rotate(block, -(rows.first_position + first + j));
        for (Index g = 0; g < group; ++g) by_head[static_cast<std::size_t>(g)].col(j) = block.col(g);
      }
      for (Index g = 0; g < group; ++g) {
        const Eigen::MatrixXf& q = by_head[static_cast<std::size_t>(g)];
        head.of(g, dim).col(0) += q.rowwise().sum().cast<double>();
        if (options_.use_covariance) head.of(g, dim).rightCols(dim) += (q * q.transpose()).cast<double>();
      }
      head.num_samples += count;
    }
  }

  /// (expected weight + epsilon) x norm of the value; sinks get 0.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    detail::require_vectors("ExpectedAttention", slots);
    std::fill(out.begin(), out.end(), 0.0f);
    const std::vector<Index> list = detail::middle(slots.positions, options_.num_sinks, 0);
    const Eigen::ArrayXf expected = expected_weights(kv_head, slots, list);
    std::vector<float> value(static_cast<std::size_t>(slots.head_dim()));
    for (std::size_t i = 0; i < list.size(); ++i) {
      slots.read_value(list[i], value);
      const float norm = options_.use_value_norm ? Eigen::Map<const Eigen::VectorXf>(value.data(), std::ssize(value)).norm() : 1.0f;
      out[static_cast<std::size_t>(list[i])] = (expected[static_cast<Index>(i)] + options_.epsilon) * norm;
    }
  }

  void on_prompt_end(Index kv_head) { heads_[static_cast<std::size_t>(kv_head)] = {}; }
  void reset(const Shape& shape) { heads_.assign(static_cast<std::size_t>(shape.kv_heads), {}), group_size_ = shape.group_size(); }
  Index bytes() const {
    Index bytes = detail::heap_bytes(heads_);
    for (const Head& head : heads_) bytes += detail::heap_bytes(head.sums);
    return bytes;
  }

 private:
  static constexpr Index block_size = 128;  // queries or keys that are looked at together
  struct Head {
    std::vector<double> sums;  // by query head of the group: sum of the queries (dim), sum of their products (dim, dim)
    Index num_samples = 0;

    /// (dim, 1 + dim) Of query head g: the sum, and the products' sums.
    Eigen::Map<Eigen::MatrixXd> of(Index g, Index dim) { return {sums.data() + g * dim * (dim + 1), dim, 1 + dim}; }
    Eigen::Map<const Eigen::MatrixXd> of(Index g, Index dim) const { return {sums.data() + g * dim * (dim + 1), dim, 1 + dim}; }
  };

  /// (list) Mean over the query group of softmax(k.mu / sqrt(dim) + k'Ck / (2 dim)).
  Eigen::ArrayXf expected_weights(Index kv_head, const SlotsView& slots, const std::vector<Index>& list) const {
    const Index dim = slots.head_dim(), n = std::ssize(list);
    Eigen::ArrayXXf logits = Eigen::ArrayXXf::Zero(n, group_size_);
    const Head& head = heads_[static_cast<std::size_t>(kv_head)];
    if (head.num_samples > 0) {
      const Eigen::MatrixXd turn = slots.rope->mean_rotation(*std::max_element(slots.positions.begin(), slots.positions.end()) + 1, options_.num_future_positions, dim);
      Eigen::MatrixXf means(dim, group_size_);
      std::vector<Eigen::MatrixXf> covariances;
      for (Index g = 0; g < group_size_; ++g) {
        const Eigen::MatrixXd moments = head.of(g, dim) / static_cast<double>(head.num_samples);
        const auto mean = moments.col(0);
        means.col(g) = (turn * mean).cast<float>();
        if (options_.use_covariance) covariances.push_back((turn * (moments.rightCols(dim) - mean * mean.transpose()) * turn.transpose()).cast<float>());
      }
      Eigen::MatrixXf keys(dim, block_size);
      for (Index first = 0; first < n; first += block_size) {
        const Index count = std::min(block_size, n - first);
        for (Index i = 0; i < count; ++i) slots.read_key(list[static_cast<std::size_t>(first + i)], {keys.col(i).data(), static_cast<std::size_t>(dim)});
        const auto some = keys.leftCols(count);
        logits.middleRows(first, count) = (some.transpose() * means).array() / std::sqrt(static_cast<float>(dim));
        for (Index g = 0; g < std::ssize(covariances); ++g)
          logits.col(g).segment(first, count) += (covariances[static_cast<std::size_t>(g)] * some).cwiseProduct(some).colwise().sum().transpose().array() / (2.0f * static_cast<float>(dim));
      }
    }
    logits = (logits.rowwise() - logits.colwise().maxCoeff().eval()).exp().eval();
    return (logits.rowwise() / logits.colwise().sum().eval()).rowwise().mean();
  }
  ExpectedAttentionOptions options_;
  Index group_size_ = 1;
  std::vector<Head> heads_;
};
static_assert(Policy<ExpectedAttention> && ScoresSlots<ExpectedAttention> && ObservesQueries<ExpectedAttention> && MayNeedRope<ExpectedAttention> &&
              ChoosesPhases<ExpectedAttention> && ProtectsSlots<ExpectedAttention>);

}  // namespace kvsnip
