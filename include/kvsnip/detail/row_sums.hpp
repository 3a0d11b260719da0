// Sums of rows of one float per slot: over all rows since the slot's token came, or over the last `window` of them; earlier
// rows may fade.
//
// A window is a ring [row mod window][slot]. Nothing is ever subtracted, so no rounding error stays behind: when the ring
// has been filled once around (a lap), its rows become sums from their place to the lap's end, in place. A window is then
// what the present lap has added up plus one row of such sums, whose places the lap has not reached yet:
//
//   row of the ring      0 ... turn - 1              turn ... window - 1
//   holds                rows of this lap            sums of the last lap from here to its end
//
// One pass over the slots a row, and once a lap one over the ring. A slot that is taken again keeps its predecessor's rows:
// those before its first are left out.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

class RowSums {
 public:
  /// @param window  rows, 0: all
  /// @param decay   what every row multiplies the earlier ones by, in (0, 1]
  /// @param counts  whether divide() will be called; 4 bytes a slot more (which a window needs anyhow)
  explicit RowSums(Index window = 0, double decay = 1, bool counts = true)
      : window_(window), decay_(static_cast<float>(decay)), counts_(counts || window > 0) {}

  /// Slots that have held a token.
  Index num_slots() const { return num_slots_; }
  /// @param out  (slots) the sums
  void sums(std::span<float> out) const {
    std::copy_n(sums_.begin(), out.size(), out.begin());
    if (window_ == 0 || num_rows_ < window_) return;
    const float *seen = seen_.data(), *last_lap = ring_.data() + num_rows_ % window_ * capacity_;
    const auto turn = static_cast<float>(num_rows_ % window_), fade = std::pow(decay_, turn);
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] += seen[slot] > turn ? fade * last_lap[slot] : 0.0f;
  }
  /// Turns sums into means: by the rows of the window that a slot has seen, faded likewise; 0 if there are none.
  void divide(std::span<float> sums) const {
    const auto most = window_ > 0 ? static_cast<float>(window_) : 0x1p24f;
    for (std::size_t slot = 0; slot < sums.size(); ++slot) {
      const float seen = std::clamp(seen_[slot], 1.0f, most);
      sums[slot] /= decay_ == 1.0f ? seen : faded_rows(seen);
    }
  }

  /// Of one slot, without window and decay.
  float mean(Index slot) const { return sums_[at(slot)] / std::max(seen_[at(slot)], 1.0f); }

  /// Room for so many slots; geometric.
  void reserve(Index num_slots) {
    if (num_slots > capacity_) resize(std::max(num_slots, capacity_ + capacity_ / 2));
    ring_.reserve(at(window_ * capacity_));  // a copy has only what it uses
  }
  /// A new token is in `slot`: it has seen nothing.
  void clear(Index slot) {
    num_slots_ = std::max(num_slots_, slot + 1);
    sums_[at(slot)] = 0;
    if (counts_) seen_[at(slot)] = 0;
  }
  /// The next row. @param value  slot -> float
  template <class Value>
  void record(Index num_slots, Value value) {
    float* sums = sums_.data();
    const float decay = decay_;
    const auto faded = [=](float sum) { return decay * (sum > 1e-30f ? sum : 0.0f); };  // what fades on is denormal, and slow
    if (window_ == 0) {
      for (Index slot = 0; slot < num_slots; ++slot) sums[slot] = faded(sums[slot]) + value(slot);
    } else {
      const Index turn = num_rows_ % window_;
      ring_.resize(std::max(ring_.size(), at((turn + 1) * capacity_)));
      float* row = ring_.data() + turn * capacity_;
      for (Index slot = 0; slot < num_slots; ++slot) row[slot] = value(slot);
      for (Index slot = 0; slot < num_slots; ++slot) sums[slot] = faded(sums[slot]) + row[slot];
    }
    if (counts_) Eigen::Map<Eigen::ArrayXf>(seen_.data(), num_slots) += 1.0f;
    if (++num_rows_; window_ > 0 && num_rows_ % window_ == 0) end_lap(num_slots);
  }
  /// Rows that were added up before, of a slot that saw `rows` of them. No window, no decay.
  void add(Index slot, float sum, Index rows) {
    sums_[at(slot)] += sum;
    if (counts_) seen_[at(slot)] += static_cast<float>(rows);
  }

  /// Slot i was slot kept[i]. The memory stays.
  void gather(std::span<const Index> kept) {
    for (Index row = 0; row < rows_held(); ++row) gather_in_place(ring_.data() + row * capacity_, kept);
    gather_in_place(sums_.data(), kept);
    if (counts_) gather_in_place(seen_.data(), kept);
    num_slots_ = static_cast<Index>(kept.size());
  }
  /// Give back the memory of slots no longer in use.
  void shrink() {
    if (num_slots_ < capacity_) resize(num_slots_);
  }
  Index bytes() const { return heap_bytes(sums_) + heap_bytes(seen_) + heap_bytes(ring_); }

 private:
  static std::size_t at(Index i) { return static_cast<std::size_t>(i); }
  Index rows_held() const { return capacity_ == 0 ? 0 : static_cast<Index>(ring_.size()) / capacity_; }
  /// 1 + decay + decay^2 + ...: that many terms.
  float faded_rows(float terms) const {
    const auto decay = static_cast<double>(decay_);
    return static_cast<float>((1 - std::pow(decay, static_cast<double>(terms))) / (1 - decay));
  }
  /// The ring is full: its rows become sums from there to its end, without what a slot's predecessor saw.
  void end_lap(Index num_slots) {
    float *sums = sums_.data(), fade = 1;
    const float* seen = seen_.data();
    std::fill_n(sums, num_slots, 0.0f);
    for (Index age = 1; age <= window_; ++age, fade *= decay_) {
      float* row = ring_.data() + (window_ - age) * capacity_;
      const auto least = static_cast<float>(age);
      for (Index slot = 0; slot < num_slots; ++slot) {
        sums[slot] += seen[slot] >= least ? fade * row[slot] : 0.0f;
        row[slot] = sums[slot];
      }
    }
    std::fill_n(sums, num_slots, 0.0f);
  }
  void resize(Index capacity) {
    std::vector<float> ring;
    ring.reserve(at(window_ * capacity)), ring.resize(at(rows_held() * capacity));
    for (Index row = 0; row < rows_held(); ++row)
      std::copy_n(ring_.begin() + row * capacity_, std::min(capacity, capacity_), ring.begin() + row * capacity);
    sums_.resize(at(capacity)), sums_.shrink_to_fit();
    if (counts_) seen_.resize(at(capacity)), seen_.shrink_to_fit();
    ring_.swap(ring);
    capacity_ = capacity;
  }

  Index window_;
  float decay_;
  bool counts_;
  Index num_slots_ = 0, capacity_ = 0, num_rows_ = 0;
  std::vector<float> sums_;  // (capacity) without a window of all rows, with one of this lap's
  std::vector<float> seen_;  // (capacity) rows since the slot's token came, if they count; exact up to 2^24
  std::vector<float> ring_;  // (rows so far, at most window; capacity)
};

}  // namespace kvsnip::detail
