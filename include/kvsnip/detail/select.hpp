// Top-k over slots: the first k in an order, in one pass with a heap of k.
#pragma once

#include <algorithm>
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

}  // namespace kvsnip::detail
