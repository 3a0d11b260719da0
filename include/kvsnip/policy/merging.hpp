// Merging<P>: what P gives up is folded into the nearest slot that stays, keys into keys and values into values.
//
// Wan et al., "LOOK-M: Look-Once Optimization in KV Cache for Efficient Multimodal Long-Context Inference",
// arXiv:2406.18139, section 3.2 (pivotal and weighted merging), as KVCache-Factory does it for text.
// Differs: it also merges what goes while decoding, at the step's end.
#pragma once

#include <algorithm>
#include <concepts>
#include <array>
#include <cmath>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/decorator.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

enum class MergingWeights { pivot, similarity };
constexpr std::array<std::string_view, 2> enum_names(MergingWeights) { return {"pivot", "similarity"}; }

struct MergingOptions {
  /// pivot: the mean of the survivor and of (victim + survivor) / 2 of each victim;
  /// similarity: the mean weighted by (cosine + 1) / 2 of the victims' keys, the survivor's weight being 1
  MergingWeights weights = MergingWeights::pivot;

  static void each(auto& options, auto visit) { visit("weights", options.weights); }
};

/// Every step must be ended, with done() if nothing else is wanted. The nearest is the one with the largest cosine of keys;
/// of equals the one in the lower slot. P's own numbers of a survivor (its norm, say) stay what they were.
template <Policy P>
class Merging : public detail::Decorator<P> {
  using Base = detail::Decorator<P>;

 public:
  static constexpr std::string_view name = "merging";
  static constexpr std::string_view paper = "arXiv:2406.18139";
  static constexpr std::string_view needs = "keys and values, and what the policy inside needs";
  using Options = MergingOptions;
  using Weights = MergingWeights;

  Merging()
    requires std::default_initializable<P>
      : Merging(P{}) {}
  explicit Merging(P inner, const MergingOptions& options = {}) : Base(std::move(inner)), options_(options) {}

  const MergingOptions& options() const { return options_; }
  bool handles_evictions() const { return true; }
  void on_evict(Index kv_head, const Leaving& leaving) {
    Base::on_evict(kv_head, leaving);
    if (leaving.num_survivors() == 0) return;
    Head& head = heads_[static_cast<std::size_t>(kv_head)];
    find_targets(head, leaving);
    std::sort(head.folds.begin(), head.folds.end(), [](const Fold& a, const Fold& b) { return a.target != b.target ? a.target < b.target : a.victim < b.victim; });
    for (auto first = head.folds.begin(); first != head.folds.end();) {
      const auto end = std::find_if(first, head.folds.end(), [=](const Fold& fold) { return fold.target != first->target; });
      fold({first, end}, leaving);
      first = end;
    }
  }
  void reserve(Index kv_head, Index num_slots) {
    Base::reserve(kv_head, num_slots);
    heads_[static_cast<std::size_t>(kv_head)].folds.reserve(static_cast<std::size_t>(num_slots));
  }
  void on_prompt_end(Index kv_head) {
    Base::on_prompt_end(kv_head);
    heads_[static_cast<std::size_t>(kv_head)].folds = {};
  }
  void reset(const Shape& shape) {
    Base::reset(shape);
    heads_.assign(static_cast<std::size_t>(shape.kv_heads), {});
    columns_.resize(static_cast<std::size_t>(shape.head_dim * 2 * block));
  }
  Index bytes() const {
    Index bytes = Base::bytes() + detail::heap_bytes(heads_) + detail::heap_bytes(columns_);
    for (const Head& head : heads_) bytes += detail::heap_bytes(head.folds);
    return bytes;
  }

 private:
  static constexpr Index block = 32;  // keys of each kind that are compared at a time
  using Columns = Eigen::Map<Eigen::MatrixXf>;
  struct Fold {
    Index victim, target;
    float cosine;
  };
  struct Head {
    std::vector<Fold> folds;  // scratch: (victims)
  };

  Columns scratch(Index which, Index head_dim) { return Columns(columns_.data() + which * block * head_dim, head_dim, block); }
  void find_targets(Head& head, const Leaving& leaving) {
    const Index dim = leaving.head_dim();
    Columns victims = scratch(0, dim), survivors = scratch(1, dim);
    const auto read = [](Columns& out, Index first, Index end, auto read_key) {
      for (Index i = first; i < end; ++i) {
        read_key(i, out.col(i - first).data());
        out.col(i - first) /= std::max(out.col(i - first).norm(), std::numeric_limits<float>::min());
      }
    };
    head.folds.clear();
    for (Index v = 0; v < leaving.num_victims(); v += block) {
      const Index v_end = std::min(v + block, leaving.num_victims());
      read(victims, v, v_end, [&](Index i, float* key) { leaving.read_victim(i, key, nullptr); });
      for (Index i = v; i < v_end; ++i) head.folds.push_back({i, 0, -std::numeric_limits<float>::infinity()});
      for (Index s = 0; s < leaving.num_survivors(); s += block) {
        const Index s_end = std::min(s + block, leaving.num_survivors());
        read(survivors, s, s_end, [&](Index i, float* key) { leaving.read_survivor(i, key, nullptr); });
        for (Index i = v; i < v_end; ++i)
          for (Index j = s; j < s_end; ++j) {
            Fold& fold = head.folds[static_cast<std::size_t>(i)];
            if (const float cosine = victims.col(i - v).dot(survivors.col(j - s)); cosine > fold.cosine) fold.target = j, fold.cosine = cosine;
          }
      }
    }
  }
  /// All victims of one survivor. @param folds  of one target
  void fold(std::span<const Fold> folds, const Leaving& leaving) {
    const Index target = folds.front().target;
    Columns columns = scratch(0, leaving.head_dim());
    enum { survivor_key, survivor_value, victim_key, victim_value, key, value };
    const auto column = [&](int which) { return columns.col(which).data(); };
    leaving.read_survivor(target, column(survivor_key), column(survivor_value));
    columns.col(key) = columns.col(survivor_key), columns.col(value) = columns.col(survivor_value);
    float total = 1.0f;
    for (const Fold& fold : folds) {
      leaving.read_victim(fold.victim, column(victim_key), column(victim_value));
      const bool pivot = options_.weights == Weights::pivot;
      const float weight = pivot ? 0.5f : std::max((fold.cosine + 1.0f) / 2.0f, 1e-6f), of_survivor = pivot ? 0.5f : 0.0f;
      columns.col(key) += weight * columns.col(victim_key) + of_survivor * columns.col(survivor_key);
      columns.col(value) += weight * columns.col(victim_value) + of_survivor * columns.col(survivor_value);
      total += weight + of_survivor;
    }
    columns.middleCols(key, 2) /= total;
    leaving.write_survivor(target, column(key), column(value));
  }

  MergingOptions options_;
  std::vector<Head> heads_;     // (kv_heads)
  std::vector<float> columns_;  // scratch: (head_dim, 2 * block)
};

}  // namespace kvsnip
