// Choices among slots: a few victims by a heap, what a compaction keeps by nth_element, the newest positions.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// The `count` lowest of the eligible slots, first one first: by score, equal ones as the strict order `before` says.
/// Blocks of slots are passed over by their lowest score: past the highest of those found, and at first past a limit below
/// which there are probably enough. Nothing is allocated once `out` has the capacity.
/// @param scores  no NaN
template <class Eligible, class Before>
void select_lowest(std::span<const float> scores, Index count, Eligible eligible, Before before, std::vector<Index>& out) {
  out.clear();
  if (count <= 0 || scores.empty()) return;
  constexpr Index max_blocks = 64, min_block = 32;
  const Index num_slots = std::ssize(scores), block = std::max(min_block, (num_slots + max_blocks - 1) / max_blocks);
  const Index num_blocks = (num_slots + block - 1) / block;
  std::array<float, max_blocks> least, in_order;
  for (Index b = 0; b < num_blocks; ++b)
    least[static_cast<std::size_t>(b)] = Eigen::Map<const Eigen::ArrayXf>(scores.data() + b * block, std::min(block, num_slots - b * block)).minCoeff();
  const auto select = [&](bool bounded, float bound) {  // whether there are enough with no score above the bound
    const auto consider = [&](Index slot) {
      if ((bounded && scores[static_cast<std::size_t>(slot)] > bound) || !eligible(slot)) return;
      if (std::ssize(out) == count) {
        if (!before(slot, out.front())) return;
        std::pop_heap(out.begin(), out.end(), before), out.pop_back();
      }
      out.push_back(slot);
      std::push_heap(out.begin(), out.end(), before);
      if (std::ssize(out) == count) bounded = true, bound = scores[static_cast<std::size_t>(out.front())];
    };
    for (Index b = 0; b < num_blocks; ++b)
      for (Index slot = b * block; slot < std::min((b + 1) * block, num_slots) && !(bounded && least[static_cast<std::size_t>(b)] > bound); ++slot) consider(slot);
    return std::ssize(out) == count;
  };
  std::copy_n(least.begin(), num_blocks, in_order.begin());
  const auto limit = in_order.begin() + std::min(2 * count, num_blocks) - 1;  // some of the lowest may not be eligible
  std::nth_element(in_order.begin(), limit, in_order.begin() + num_blocks);
  const bool is_few = 2 * count < num_blocks;  // else the limit would hold too few, and the slots be looked at twice
  if (!is_few || !select(true, *limit)) out.clear(), select(false, 0.0f);
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

/// The slots but for the `first` and the `last` of them by position, in ascending position.
inline std::vector<Index> middle(std::span<const Index> positions, Index first, Index last) {
  std::vector<Index> slots(positions.size());
  std::iota(slots.begin(), slots.end(), Index{0});
  if (!std::is_sorted(positions.begin(), positions.end()))  // only where decoding has overwritten slots
    std::sort(slots.begin(), slots.end(), [&](Index a, Index b) { return positions[static_cast<std::size_t>(a)] < positions[static_cast<std::size_t>(b)]; });
  const Index size = std::ssize(slots), begin = std::clamp<Index>(first, 0, size);
  return {slots.begin() + begin, slots.end() - std::clamp<Index>(last, 0, size - begin)};
}

/// Shares that are below their least are raised to it; the largest ones pay, one place each in turn, if they can.
inline void raise_to_least(std::span<Index> shares, std::span<const Index> least) {
  Index owed = 0;
  for (std::size_t i = 0; i < shares.size(); ++i)
    if (shares[i] < least[i]) owed += least[i] - shares[i], shares[i] = least[i];
  for (; owed > 0; --owed) {
    std::size_t largest = shares.size();
    for (std::size_t i = 0; i < shares.size(); ++i)
      if (shares[i] > least[i] && (largest == shares.size() || shares[i] > shares[largest])) largest = i;
    if (largest == shares.size()) return;
    --shares[largest];
  }
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
