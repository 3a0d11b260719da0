// Choices among slots: a few victims by a heap, what a compaction keeps by nth_element, the newest positions.
#pragma once

#include <algorithm>
#include <functional>
#include <iterator>
#include <limits>
#include <span>
#include <vector>

#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// The `count` lowest of the eligible slots, first one first: by score, equal ones as the strict order `before` says.
/// Slots past the best so far are passed over a block at a time; nothing is allocated once `out` has the capacity.
template <class Eligible, class Before>
void select_lowest(std::span<const float> scores, Index count, Eligible eligible, Before before, std::vector<Index>& out) {
  out.clear();
  if (count <= 0) return;
  const auto num_slots = static_cast<Index>(scores.size());
  constexpr Index block = 64;
  bool full = false;
  float highest = 0.0f;  // of a full `out`
  const auto consider = [&](Index slot) {
    if (full && (scores[static_cast<std::size_t>(slot)] > highest || !before(slot, out.front()))) return;
    if (!eligible(slot)) return;
    if (full) std::pop_heap(out.begin(), out.end(), before), out.pop_back();
    out.push_back(slot);
    std::push_heap(out.begin(), out.end(), before);
    full = static_cast<Index>(out.size()) == count;
    highest = scores[static_cast<std::size_t>(out.front())];
  };
  for (Index first = 0; first < num_slots; first += block) {
    const Index end = std::min(first + block, num_slots);
    if (full && Eigen::Map<const Eigen::ArrayXf>(scores.data() + first, end - first).minCoeff() > highest) continue;
    for (Index slot = first; slot < end; ++slot) consider(slot);
  }
  std::sort_heap(out.begin(), out.end(), before);
}

/// What a compaction keeps, by ascending position: the protected slots (at most `budget`), and of the others the best.
/// @param better  a strict total order
template <class Protected, class Better>
void select_kept(std::span<const Index> positions, Index budget, Protected is_protected, Better better, std::vector<Index>& kept) {
  std::vector<Index> others;
  others.reserve(positions.size());
  kept.clear();
  for (Index slot = 0; slot < std::ssize(positions); ++slot) (is_protected(slot) ? kept : others).push_back(slot);
  const auto end = others.begin() + std::min(budget - std::ssize(kept), std::ssize(others));
  std::nth_element(others.begin(), end, others.end(), better);
  kept.insert(kept.end(), others.begin(), end);
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
