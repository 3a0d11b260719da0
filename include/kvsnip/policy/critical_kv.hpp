// CriticalKV<P>: half of the budget by P's scores, the other half by scores times what the value does to the layer's output.
//
// Feng et al., "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective", arXiv:2502.03805,
// algorithm 1. P may be an AdaKV: the shares come from P's own scores.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/decorator.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct CriticalKVOptions {
  double first_stage = 0.5;  ///< share of the budget that P's scores alone decide, in [0, 1]; the paper uses 0.5
  float epsilon = 1e-4f;     ///< added to P's scores before they are multiplied, >= 0 (kvpress)

  static void each(auto& options, auto visit) {
    visit("first_stage", options.first_stage);
    visit("epsilon", options.epsilon);
  }
};

/// Of prompts; while decoding P's scores stand.
template <Policy P>
class CriticalKV : public detail::Decorator<P> {
 public:
  using Options = CriticalKVOptions;
  /// query_head -> (hidden, head_dim), the part of the layer's output projection that its output goes through.
  using OutputProjection = std::function<Eigen::Ref<const Eigen::MatrixXf>(Index query_head)>;

  /// @param projection  of the layer that the cache belongs to; called when slots are chosen
  CriticalKV(P inner, OutputProjection projection, const CriticalKVOptions& options = {})
      : detail::Decorator<P>(std::move(inner)), projection_(std::move(projection)), options_(options) {
    detail::require(projection_ != nullptr, "CriticalKV: projection must be callable");
    detail::require(options.first_stage >= 0 && options.first_stage <= 1, "CriticalKV: first_stage must be in [0, 1], got ", options.first_stage);
    detail::require(options.epsilon >= 0, "CriticalKV: epsilon must be >= 0, got ", options.epsilon);
  }

  const CriticalKVOptions& options() const { return options_; }
  void reset(const Shape& shape) {
    detail::Decorator<P>::reset(shape);
    group_size_ = shape.group_size();
  }
  bool refines(Phase phase) const { return phase != Phase::decode || detail::Decorator<P>::refines(phase); }
  void refine(Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) {
    detail::Decorator<P>::refine(kv_head, slots, choice, scores);
    if (slots.phase == Phase::decode) return;
    const auto score = [&](Index slot) -> float& { return scores[static_cast<std::size_t>(slot)]; };
    std::vector<Index> order(choice.candidates.begin(), choice.candidates.end());
    const auto end = order.begin() + static_cast<Index>(static_cast<double>(choice.num_kept) * options_.first_stage);
    std::nth_element(order.begin(), end, order.end(), [&](Index a, Index b) { return score(a) != score(b) ? score(a) > score(b) : a > b; });
    const std::vector<float> norms = projected_norms(kv_head, slots, {end, order.end()});
    for (auto slot = order.begin(); slot != end; ++slot) score(*slot) = std::numeric_limits<float>::max();
    for (auto slot = end; slot != order.end(); ++slot) score(*slot) = (score(*slot) + options_.epsilon) * norms[static_cast<std::size_t>(slot - end)];
  }

 private:
  /// Of each slot the L1 norm of its projected value, mean over the query group.
  std::vector<float> projected_norms(Index kv_head, const SlotsView& slots, std::span<const Index> wanted) const {
    detail::require_vectors("CriticalKV", slots);
    constexpr Index block = 64;  // values: so that what they are projected to stays small
    std::vector<float> norms(wanted.size());
    Eigen::MatrixXf values(slots.head_dim(), block);
    for (Index first = 0; first < std::ssize(wanted); first += block) {
      const Index count = std::min(block, std::ssize(wanted) - first);
      for (Index i = 0; i < count; ++i)
        slots.read_value(wanted[static_cast<std::size_t>(first + i)], {values.col(i).data(), static_cast<std::size_t>(values.rows())});
      Eigen::Map<Eigen::RowVectorXf> of_block(norms.data() + first, count);
      for (Index g = 0; g < group_size_; ++g)
        of_block += (projection_(kv_head * group_size_ + g) * values.leftCols(count)).cwiseAbs().colwise().sum() / static_cast<float>(group_size_);
    }
    return norms;
  }

  OutputProjection projection_;
  CriticalKVOptions options_;
  Index group_size_ = 1;
};

}  // namespace kvsnip
