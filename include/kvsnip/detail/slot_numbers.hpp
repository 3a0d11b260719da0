// What a policy that looks at a token once, when it comes, remembers of it: a few floats per slot. A decode step then
// reads one key or value, not all of them.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// A policy that reads keys or values was given none.
inline void require_vectors(std::string_view policy, const SlotsView& slots) {
  require_state(slots.has_vectors(), policy, ": needs keys and values to read: give the SlotPlanner some with set_vectors");
}

/// A base for policies: N floats per slot, kept in step with the slots; and scratch that is there before it is needed.
/// @tparam Vectors  scratch vectors of head_dim floats for each kv_head
/// @tparam List     whether by_position() is needed
template <int N, int Vectors = 0, bool List = false>
class SlotNumbers {
 public:
  /// Geometric.
  void reserve(Index kv_head, Index num_slots) {
    std::vector<float>& numbers = head(kv_head).numbers;
    const auto wanted = static_cast<std::size_t>(N * num_slots);
    if (wanted > numbers.size()) {
      numbers.reserve(std::max(wanted, numbers.size() + numbers.size() / 2 / N * N));
      numbers.resize(numbers.capacity());
    }
    if constexpr (List) head(kv_head).list.reserve(numbers.size() / N);
  }
  void on_gather(Index kv_head, std::span<const Index> kept) {
    permute_columns(head(kv_head).numbers.data(), N, kept);  // kept is part of a permutation: the rest ends up behind
    head(kv_head).size = static_cast<Index>(kept.size());
  }
  void on_prompt_end(Index kv_head) {
    head(kv_head).numbers.resize(static_cast<std::size_t>(N * head(kv_head).size));
    head(kv_head).numbers.shrink_to_fit();
    head(kv_head).list = std::vector<Index>();
  }
  void reset(const Shape& shape) {
    heads_.assign(static_cast<std::size_t>(shape.kv_heads), {});
    for (Head& head : heads_) head.vectors.resize(static_cast<std::size_t>((1 + Vectors) * shape.head_dim));
  }
  Index bytes() const {
    Index bytes = heap_bytes(heads_);
    for (const Head& head : heads_) bytes += heap_bytes(head.numbers) + heap_bytes(head.vectors) + heap_bytes(head.list);
    return bytes;
  }

 protected:
  using Column = Eigen::Map<const Eigen::VectorXf>;
  using Vector = Eigen::Map<Eigen::VectorXf>;

  /// (N) Of a token that has just entered `slot`, to be written.
  float* enter(Index kv_head, Index slot) {
    head(kv_head).size = std::max(head(kv_head).size, slot + 1);
    return head(kv_head).numbers.data() + N * slot;
  }
  /// (N, slots) N numbers a slot, side by side.
  const float* numbers(Index kv_head) const { return heads_[static_cast<std::size_t>(kv_head)].numbers.data(); }
  float* numbers(Index kv_head) { return head(kv_head).numbers.data(); }

  /// (head_dim) The key or the value in `slot`, zeros if there are none to read; valid until the next call for this kv_head.
  Column key(Index kv_head, const SlotsView& slots, Index slot) { return read(kv_head, slots, slot, &SlotsView::read_key); }
  Column value(Index kv_head, const SlotsView& slots, Index slot) { return read(kv_head, slots, slot, &SlotsView::read_value); }

  /// (head_dim) Scratch.
  template <int I>
    requires(I < Vectors)
  Vector vector(Index kv_head) {
    const Index head_dim = static_cast<Index>(head(kv_head).vectors.size()) / (1 + Vectors);
    return Vector(head(kv_head).vectors.data() + (1 + I) * head_dim, head_dim);
  }
  /// The slots that are wanted, by ascending position; valid until the next call for this kv_head.
  template <class Wanted>
    requires List
  std::span<Index> by_position(Index kv_head, const SlotsView& slots, const Wanted& wanted) {
    std::vector<Index>& list = head(kv_head).list;
    list.clear();
    for (Index slot = 0; slot < slots.size(); ++slot)
      if (wanted(slot)) list.push_back(slot);
    std::sort(list.begin(), list.end(), [&](Index a, Index b) { return slots.positions[static_cast<std::size_t>(a)] < slots.positions[static_cast<std::size_t>(b)]; });
    return list;
  }

 private:
  struct Head {
    std::vector<float> numbers;  // (N, capacity)
    std::vector<float> vectors;  // scratch: (head_dim, 1 + Vectors), the first for a column that is read
    std::vector<Index> list;     // scratch: slots
    Index size = 0;              // slots in use
  };

  Head& head(Index kv_head) { return heads_[static_cast<std::size_t>(kv_head)]; }
  Column read(Index kv_head, const SlotsView& slots, Index slot, void (SlotsView::*read_column)(Index, std::span<float>) const) {
    const std::span<float> column(head(kv_head).vectors.data(), head(kv_head).vectors.size() / (1 + Vectors));
    if (slots.has_vectors()) (slots.*read_column)(slot, column);
    return Column(column.data(), static_cast<Index>(column.size()));
  }

  std::vector<Head> heads_;  // (kv_heads)
};

}  // namespace kvsnip::detail
