// LossEstimate<P>: P, and a running guess of the attention mass that its evictions lose, without a full cache beside it.
//
// Our own. It supposes that a token which has gone would go on drawing what it drew in the last row before, in proportion to
// the others: persistence of importance (Liu et al., "Scissorhands", arXiv:2305.17118, section 3). Tokens that would have
// become important again are what it misses; AttentionLoss (attention_loss.hpp) measures those.
#pragma once

#include <algorithm>
#include <concepts>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/decorator.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

/// Needs the last row of every step: 4 bytes a slot and kv_head.
template <Policy P>
class LossEstimate : public detail::Decorator<P> {
  using Base = detail::Decorator<P>;

 public:
  static constexpr std::string_view name = "loss_estimate";
  static constexpr std::string_view needs = "the last attention row, and what the policy inside needs";

  LossEstimate()
    requires std::default_initializable<P>
      : LossEstimate(P{}) {}
  explicit LossEstimate(P inner) : Base(std::move(inner)) {}

  /// The share of attention that would now go to tokens which this kv_head has evicted, in [0, 1).
  float lost(Index kv_head) const {
    const float gone = heads_[static_cast<std::size_t>(kv_head)].gone;
    return gone / (1.0f + gone);
  }

  Index wanted_rows(const StepInfo& step) const { return std::max(Base::wanted_rows(step), std::min<Index>(step.num_queries, 1)); }
  void observe(Index kv_head, const AttentionRows& rows) {
    const Index wanted = Base::wanted_rows(rows.step), first = rows.step.first_position + rows.step.num_queries - std::min(wanted, rows.step.num_queries);
    if (const AttentionRows inner = rows.without_first(std::clamp<Index>(first - rows.first_position, 0, rows.num_queries())); inner.num_queries() > 0)
      Base::observe(kv_head, inner);
    if (rows.first_position + rows.num_queries() - 1 != rows.step.last_position()) return;
    Head& head = heads_[static_cast<std::size_t>(kv_head)];
    const auto last = rows.mean.col(rows.num_queries() - 1);
    float of_new = 0;
    for (Index slot = 0; slot < last.size(); ++slot)
      if (rows.positions[static_cast<std::size_t>(slot)] >= rows.step.first_position) of_new += last[slot];
    head.gone *= 1.0f - std::min(of_new, 1.0f);  // the newcomers took their part of everything
    head.row.assign(last.data(), last.data() + last.size());
    head.held = last.sum();
  }

  void reserve(Index kv_head, Index num_slots) {
    Base::reserve(kv_head, num_slots);
    std::vector<float>& row = heads_[static_cast<std::size_t>(kv_head)].row;
    if (static_cast<std::size_t>(num_slots) > row.capacity()) row.reserve(std::max(static_cast<std::size_t>(num_slots), row.capacity() + row.capacity() / 2));
  }
  void on_insert(Index kv_head, Index slot, const SlotsView& slots) {
    Base::on_insert(kv_head, slot, slots);
    Head& head = heads_[static_cast<std::size_t>(kv_head)];
    if (slot < std::ssize(head.row)) head.lose(std::exchange(head.row[static_cast<std::size_t>(slot)], 0.0f));
  }
  void on_gather(Index kv_head, std::span<const Index> kept) {
    Base::on_gather(kv_head, kept);
    Head& head = heads_[static_cast<std::size_t>(kv_head)];
    head.row.resize(std::max(head.row.size(), kept.size()));  // no row may have come yet
    detail::gather_in_place(head.row.data(), kept);
    head.row.resize(kept.size());
    head.lose(head.held - std::accumulate(head.row.begin(), head.row.end(), 0.0f));
  }
  void on_prompt_end(Index kv_head) {
    Base::on_prompt_end(kv_head);
    heads_[static_cast<std::size_t>(kv_head)].row.shrink_to_fit();
  }
  void reset(const Shape& shape) {
    Base::reset(shape);
    heads_.assign(static_cast<std::size_t>(shape.kv_heads), {});
  }
  Index bytes() const {
    Index bytes = Base::bytes() + detail::heap_bytes(heads_);
    for (const Head& head : heads_) bytes += detail::heap_bytes(head.row);
    return bytes;
  }

 private:
  struct Head {
    std::vector<float> row;  // (slots) the last weights, less what has gone since
    float held = 0;          // their sum
    float gone = 0;          // what has gone, in units of what is held

    /// `weight` of what is held goes.
    void lose(float weight) {
      if (weight <= 0) return;
      const float left = std::max(held - weight, 1e-6f);
      gone = (gone * held + weight) / left;
      held = left;
    }
  };
  std::vector<Head> heads_;  // (kv_heads)
};

}  // namespace kvsnip
