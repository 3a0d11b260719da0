// The books of one kv_head: which position sits in which slot, the eviction queue, and how to take a step back.
// No policy here and no protection: SlotPlanner chooses the victims.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

struct HeadBooks {
  std::vector<Index> positions;  ///< by slot
  std::vector<Index> queue;      ///< slots chosen to go; the next one is at queue_next
  Index queue_next = 0;

  // The open step.
  std::vector<Index> new_slots;  ///< by new token
  std::vector<Index> victims;    ///< slots that go in this step: overwritten one by one, or dropped in bulk
  std::vector<Index> order;      ///< a bulk drop's permutation, dropped slots last; else empty
  std::vector<Index> refill;     ///< the next queue, if this step had to choose one
  std::vector<Index> displaced;  ///< the victims' positions
  std::vector<Index> kept;       ///< what a compaction leaves, by ascending position; else empty
  Index old_size = 0, taken_from_queue = 0, taken_from_refill = 0;

  Index size() const { return static_cast<Index>(positions.size()); }

  /// Forget the last step's choices.
  void begin() {
    victims.clear(), order.clear(), refill.clear(), kept.clear();
    old_size = size(), taken_from_queue = taken_from_refill = 0;
  }
  /// The queue's next slots become this step's victims, at most `count`.
  void take_from_queue(Index count) {
    taken_from_queue = std::min(count, static_cast<Index>(queue.size()) - queue_next);
    const auto first = queue.begin() + queue_next;
    victims.assign(first, first + taken_from_queue);
  }
  /// `refill` has just been chosen: its first `count` go in this step, the others wait.
  void take_from_refill(Index count) {
    taken_from_refill = count;
    victims.insert(victims.end(), refill.begin(), refill.begin() + count);
  }
  /// All `victims` go at once: survivors close ranks in ascending position, the dropped come after them.
  void drop_in_bulk() {
    std::sort(victims.begin(), victims.end());
    reserve(order, size());
    for (Index slot = 0, v = 0; slot < size(); ++slot) {
      if (v < static_cast<Index>(victims.size()) && victims[static_cast<std::size_t>(v)] == slot) ++v;
      else order.push_back(slot);
    }
    std::sort(order.begin(), order.end(), [this](Index a, Index b) { return position(a) < position(b); });
    order.insert(order.end(), victims.begin(), victims.end());
  }
  /// Room for everything that place() writes, so that it cannot throw.
  void reserve_for(Index num_tokens) {
    reserve(new_slots, num_tokens);
    reserve(displaced, static_cast<Index>(victims.size()));
    reserve(positions, size() + num_tokens - static_cast<Index>(victims.size()));
  }
  /// Enter the new tokens: into free slots first, the last ones over the victims (after a bulk drop all slots from the
  /// survivors on are free).
  void place(Index first_position, Index num_tokens) {
    displaced.clear(), new_slots.clear();
    for (const Index slot : victims) displaced.push_back(position(slot));
    if (!order.empty()) {
      permute_columns(positions.data(), 1, order);
      positions.resize(order.size() - victims.size());
    }
    const Index overwritten = order.empty() ? static_cast<Index>(victims.size()) : 0;
    for (Index t = 0; t < num_tokens - overwritten; ++t) {
      new_slots.push_back(size());
      positions.push_back(first_position + t);
    }
    for (Index i = 0; i < overwritten; ++i) {
      new_slots.push_back(victims[static_cast<std::size_t>(i)]);
      positions[static_cast<std::size_t>(new_slots.back())] = first_position + num_tokens - overwritten + i;
    }
  }
  /// Undo place().
  void take_back() {
    if (order.empty()) {
      for (std::size_t i = 0; i < victims.size(); ++i) positions[static_cast<std::size_t>(victims[i])] = displaced[i];
      positions.resize(static_cast<std::size_t>(old_size));
    } else {
      positions.resize(order.size() - victims.size());
      positions.insert(positions.end(), displaced.begin(), displaced.end());
      unpermute_columns(positions.data(), 1, order);
    }
    new_slots.clear();
  }
  /// The step stands: the queue moves on; a compaction leaves `kept` (`displaced` has its capacity) and voids the queue.
  void commit() noexcept {
    if (!kept.empty()) {
      displaced.clear();
      for (const Index slot : kept) displaced.push_back(position(slot));
      positions.swap(displaced);
      displaced = std::vector<Index>(), new_slots = std::vector<Index>();  // they were as large as the prompt
      queue.clear(), queue_next = 0;
    } else if (!order.empty()) {
      queue.clear(), queue_next = 0;  // slots moved
    } else if (taken_from_refill > 0) {
      queue.swap(refill);
      queue_next = taken_from_refill;
    } else {
      queue_next += taken_from_queue;
    }
  }

  Index bytes() const { return heap_bytes(positions) + heap_bytes(queue); }
  Index scratch_bytes() const {
    return heap_bytes(new_slots) + heap_bytes(victims) + heap_bytes(order) + heap_bytes(refill) + heap_bytes(displaced) + heap_bytes(kept);
  }

 private:
  Index position(Index slot) const { return positions[static_cast<std::size_t>(slot)]; }
  static void reserve(std::vector<Index>& vector, Index size) {
    const auto wanted = static_cast<std::size_t>(size);
    if (vector.capacity() < wanted) vector.reserve(std::max(wanted, vector.capacity() + vector.capacity() / 2));
  }
};

}  // namespace kvsnip::detail
