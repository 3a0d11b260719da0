// Choices among slots: a few victims by a heap, what a compaction keeps by nth_element, the newest positions.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// The first `count` of the eligible slots in the strict total order `before`, first one first.
/// A slot past the k best so far costs one comparison; nothing is allocated once `out` has the capacity.
template <class Eligible, class Before>
void select_first(Index num_slots, Index count, Eligible eligible, Before before, std::vector<Index>& out) {
  out.clear();
  if (count <= 0) return;
  for (Index slot = 0; slot < num_slots; ++slot) {
    if (!eligible(slot)) continue;
    if (static_cast<Index>(out.size()) < count) {
      out.push_back(slot);
      std::push_heap(out.begin(), out.end(), before);
    } else if (before(slot, out.front())) {
      std::pop_heap(out.begin(), out.end(), before);
      out.back() = slot;
      std::push_heap(out.begin(), out.end(), before);
    }
  }
  std::sort_heap(out.begin(), out.end(), before);
}

/// What a compaction keeps, by ascending position: the protected slots (at most `budget`), and of the others the best.
/// @param better  a strict total order
template <class Protected, class Better>
void select_kept(std::span<const Index> positions, Index budget, Protected is_protected, Better better, std::vector<Index>& kept) {
  std::vector<Index> slots(positions.size());
  std::iota(slots.begin(), slots.end(), Index{0});
  const auto others = std::stable_partition(slots.begin(), slots.end(), is_protected);
  const auto end = slots.begin() + std::min<std::ptrdiff_t>(budget, std::ssize(slots));
  std::nth_element(others, end, slots.end(), better);
  kept.assign(slots.begin(), end);
  std::sort(kept.begin(), kept.end(), [&](Index a, Index b) { return positions[static_cast<std::size_t>(a)] < positions[static_cast<std::size_t>(b)]; });
}

/// The position from which on the `count` newest slots are. @param scratch  any
inline Index newest_from(std::span<const Index> positions, Index count, Index next_position, std::vector<Index>& scratch) {
  if (count <= 0) return std::numeric_limits<Index>::max();
  if (count >= static_cast<Index>(positions.size())) return std::numeric_limits<Index>::min();
  const Index guess = next_position - count;  // right if the newest positions have no gap: the usual case
  if (std::count_if(positions.begin(), positions.end(), [=](Index p) { return p >= guess; }) == count) return guess;
  scratch.assign(positions.begin(), positions.end());
  std::nth_element(scratch.begin(), scratch.begin() + (count - 1), scratch.end(), std::greater<>());
  return scratch[static_cast<std::size_t>(count - 1)];
}

}  // namespace kvsnip::detail
