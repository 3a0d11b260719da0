// A circular history of one bit per slot and row, with running counts: which of the last `window` rows marked a slot.
//
// Bits are packed in 16-bit words [ceil(window / 16)][slot]: row t is bit t mod window of every slot's word column. The
// bit that leaves the window is the one about to be overwritten, so one pass over one contiguous row of words records a
// row and updates the counts: O(slots), never O(slots x window). A slot that is taken again keeps its old bits until their
// word's turn comes: clearing them at once would touch a cache line per word.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

class BitHistory {
 public:
  explicit BitHistory(Index window) : window_(window), num_words_((window + 15) / 16) {}

  /// use(slot, marked, seen): of the rows of the window that a slot has seen, those since its token came, how many marked it.
  template <class Use>
  void for_each(Index num_slots, Use use) const {
    const std::uint16_t* marked = marked_.data();
    const Index* born = born_.data();
    for (Index slot = 0; slot < num_slots; ++slot) {
      const auto seen = static_cast<std::int32_t>(std::min(window_, num_rows_ - born[slot]));
      use(slot, static_cast<float>(marked[slot]), static_cast<float>(seen));
    }
  }

  /// Room for so many slots; geometric.
  void reserve(Index num_slots) {
    if (num_slots > capacity_) resize(std::max(num_slots, capacity_ + capacity_ / 2));
  }
  /// A new token is in `slot`: it has seen nothing. Its predecessor's bits stay in the words that are not being written, until
  /// they are.
  void clear(Index slot) {
    num_slots_ = std::max(num_slots_, slot + 1);
    reserve(num_slots_);
    words_[at(num_rows_ % window_ / 16 * capacity_ + slot)] = 0;
    marked_[at(slot)] = 0;
    born_[at(slot)] = num_rows_;
  }
  /// Record a row. @param mark  (slot) whether the row marks it
  template <class Mark>
  void record(Index num_slots, Mark mark) {
    const Index turn = num_rows_ % window_;
    std::uint16_t* words = words_.data() + (turn / 16) * capacity_;
    if (turn % 16 == 0) forget_predecessors(words, std::min<Index>(window_ - turn, 16), num_slots);
    std::uint16_t* counts = marked_.data();
    const auto bit = static_cast<std::uint16_t>(1u << (turn % 16)), others = static_cast<std::uint16_t>(~bit);
    constexpr Index block = 256;
    std::uint16_t ones[block];  // all bits of it, where marked: what follows needs no shifts and vectorises in 16 bits
    for (Index first = 0; first < num_slots; first += block) {
      const Index count = std::min(block, num_slots - first);
      for (Index i = 0; i < count; ++i) ones[i] = mark(first + i) ? 0xffff : 0;
      for (Index i = 0; i < count; ++i) {
        const std::uint16_t word = words[first + i], leaving = (word & bit) != 0 ? 0xffff : 0;
        counts[first + i] = static_cast<std::uint16_t>(counts[first + i] - ones[i] + leaving);  // 0xffff is -1
        words[first + i] = static_cast<std::uint16_t>((word & others) | (ones[i] & bit));
      }
    }
    ++num_rows_;
  }
  /// The row just recorded, unmarked there, does not count for `slot`: its token came later.
  void unsee(Index slot) { born_[at(slot)] = num_rows_; }

  /// Slot i was slot kept[i]. The memory stays.
  void gather(std::span<const Index> kept) {
    for (Index w = 0; w < num_words_; ++w) gather_in_place(words_.data() + w * capacity_, kept);
    gather_in_place(marked_.data(), kept);
    gather_in_place(born_.data(), kept);
    num_slots_ = static_cast<Index>(kept.size());
  }
  /// Give back the memory of slots no longer in use.
  void shrink() {
    if (num_slots_ < capacity_) resize(num_slots_);
  }
  Index bytes() const { return heap_bytes(words_) + heap_bytes(marked_) + heap_bytes(born_); }

 private:
  /// A word is about to be written again, bit by bit: one that was full before the slot's token came is not the token's.
  void forget_predecessors(std::uint16_t* words, Index bits, Index num_slots) {
    const Index was_full = num_rows_ - window_ + bits;
    for (Index slot = 0; slot < num_slots; ++slot) words[slot] = born_[at(slot)] >= was_full ? std::uint16_t{0} : words[slot];
  }
  static std::size_t at(Index i) { return static_cast<std::size_t>(i); }
  void resize(Index capacity) {
    std::vector<std::uint16_t> words(at(num_words_ * capacity));
    for (Index w = 0; w < num_words_; ++w)
      std::copy_n(words_.begin() + w * capacity_, std::min(capacity, capacity_), words.begin() + w * capacity);
    words_.swap(words);
    marked_.resize(at(capacity)), marked_.shrink_to_fit();
    born_.resize(at(capacity)), born_.shrink_to_fit();
    capacity_ = capacity;
  }

  Index window_, num_words_, num_slots_ = 0, capacity_ = 0, num_rows_ = 0;
  std::vector<std::uint16_t> words_;   // (num_words, capacity)
  std::vector<std::uint16_t> marked_;  // (capacity) set bits of each slot
  std::vector<Index> born_;            // (capacity) rows recorded before the slot's token came
};

}  // namespace kvsnip::detail
