// QFilter: keys that point along their head's filter go; the filters come from you.
//
// Godey et al., "Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression", arXiv:2503.02812. Queries of a
// head lean one way, whatever the text: the first right singular vector of a calibration set of them, turned against them,
// is the head's filter. The more a key has of it, the less attention the key will get.
// Needs keys alone, each once: a decode step reads the new token's. State: 4 bytes per slot and kv_head.
// Differs from the paper: sinks and recents are protected by default. For a query group, give the mean of its filters,
// as the paper does. No spec can carry filters, so the registry does not know this policy: hand it over as an object.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "kvsnip/detail/convert.hpp"
#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct QFilterOptions {
  Index num_sinks = 4;        ///< first positions, never evicted [tokens], >= 0
  Index recent_window = 10;   ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) { detail::each_usual(options, visit); }
};

class QFilter : public detail::UsualOptions<QFilterOptions>, public detail::SlotNumbers<1> {
 public:
  /// @param filters  (head_dim, kv_heads), finite; after RoPE, as the keys are. Copied. There is no default: a cache
  ///                 refuses a policy without them.
  /// @throws std::invalid_argument  here a filter that is not finite; from the cache's constructor one of another shape
  explicit QFilter(const Eigen::Ref<const Eigen::MatrixXf>& filters = Eigen::MatrixXf(), const QFilterOptions& options = {})
      : UsualOptions("QFilter", options), head_dim_(filters.rows()) {
    for (Index h = 0; h < filters.cols(); ++h) {
      detail::require(detail::all_within(filters.col(h).data(), head_dim_, std::numeric_limits<float>::max()),
                      "QFilter: filters must be finite, not so for kv_head ", h);
      filters_.insert(filters_.end(), filters.col(h).data(), filters.col(h).data() + head_dim_);
    }
  }

  /// In double, and no further than float32 goes: the largest products overflow it.
  void on_insert(Index kv_head, Index slot, const SlotsView& slots) {
    constexpr double limit = std::numeric_limits<float>::max();
    const Column filter(filters_.data() + kv_head * head_dim_, head_dim_);
    *enter(kv_head, slot) = static_cast<float>(std::clamp(-filter.cast<double>().dot(key(kv_head, slots, slot).cast<double>()), -limit, limit));
  }
  /// Minus the product of the slot's key and the filter.
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    detail::require_vectors("QFilter", slots);
    std::copy_n(numbers(kv_head), slots.size(), out.begin());
  }
  void reset(const Shape& shape) {
    const Index kv_heads = head_dim_ == 0 ? 0 : static_cast<Index>(filters_.size()) / head_dim_;
    detail::require(head_dim_ == shape.head_dim && kv_heads == shape.kv_heads, "QFilter: filters must be head_dim x kv_heads = ", shape.head_dim,
                    " x ", shape.kv_heads, ", got ", head_dim_, " x ", kv_heads);
    SlotNumbers::reset(shape);
  }
  Index bytes() const { return SlotNumbers::bytes() + detail::heap_bytes(filters_); }

 private:
  Index head_dim_;
  std::vector<float> filters_;  // (head_dim, kv_heads)
};
static_assert(Policy<QFilter> && ScoresSlots<QFilter> && TracksInserts<QFilter> && TracksGathers<QFilter> && HasReset<QFilter> && CountsBytes<QFilter>);

}  // namespace kvsnip
