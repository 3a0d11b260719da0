// 64-byte aligned, uninitialised storage for the columns of one kv_head, and the moves that a compaction needs.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

/// An owning array of T, uninitialised; a value: copies are deep.
template <class T>
class AlignedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  AlignedArray() = default;
  explicit AlignedArray(Index size) : size_(size) {
    if (size > 0)
      data_ = static_cast<T*>(::operator new(static_cast<std::size_t>(size) * sizeof(T), std::align_val_t{64}));
  }
  AlignedArray(const AlignedArray& other) : AlignedArray(other.size_) {
    if (size_ > 0) std::memcpy(static_cast<void*>(data_), other.data_, static_cast<std::size_t>(size_) * sizeof(T));
  }
  AlignedArray(AlignedArray&& other) noexcept { swap(other); }
  AlignedArray& operator=(AlignedArray other) noexcept {
    swap(other);
    return *this;
  }
  ~AlignedArray() { ::operator delete(data_, std::align_val_t{64}); }

  T* data() { return data_; }
  const T* data() const { return data_; }
  Index size() const { return size_; }
  Index bytes() const { return size_ * static_cast<Index>(sizeof(T)); }
  void swap(AlignedArray& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

 private:
  T* data_ = nullptr;
  Index size_ = 0;
};

/// The calling thread's buffer of floats, for the length of a call; it grows geometrically and stays for the thread's next
/// call. One within the other (an executor may run other work while it waits) gets memory of its own.
class Scratch {
 public:
  explicit Scratch(Index size) {
    buffer_.swap(spare());
    if (buffer_.size() < size) buffer_ = AlignedArray<float>(std::max(size, buffer_.size() + buffer_.size() / 2));
  }
  Scratch(Scratch&&) noexcept = default;  // what was taken stays where it is
  ~Scratch() {
    if (spare().size() < buffer_.size()) spare().swap(buffer_);
  }
  float* data() { return buffer_.data(); }
  /// The next `size` floats, 64-byte aligned.
  float* take(Index size) {
    float* taken = buffer_.data() + used_;
    used_ += rounded(size);
    return taken;
  }
  /// What taking `size` floats uses up.
  static constexpr Index rounded(Index size) { return (size + 15) / 16 * 16; }

 private:
  static AlignedArray<float>& spare() {
    thread_local AlignedArray<float> buffer;
    return buffer;
  }
  AlignedArray<float> buffer_;
  Index used_ = 0;
};

/// Where the element that belongs at place i is now, while columns are permuted in place from place 0 up: an earlier
/// swap may have moved it on.
inline Index place_during_permutation(std::span<const Index> order, Index i) {
  Index j = order[static_cast<std::size_t>(i)];
  while (j < i) j = order[static_cast<std::size_t>(j)];
  return j;
}

/// In place, without scratch: new column i is old column order[i]. `order` is a permutation.
template <class T>
void permute_columns(T* columns, Index rows, std::span<const Index> order) {
  for (Index i = 0; i < static_cast<Index>(order.size()); ++i) {
    const Index j = place_during_permutation(order, i);
    if (j != i) std::swap_ranges(columns + i * rows, columns + (i + 1) * rows, columns + j * rows);
  }
}

/// The inverse of permute_columns with the same order: its swaps, last first.
template <class T>
void unpermute_columns(T* columns, Index rows, std::span<const Index> order) {
  for (Index i = static_cast<Index>(order.size()) - 1; i >= 0; --i) {
    const Index j = place_during_permutation(order, i);
    if (j != i) std::swap_ranges(columns + i * rows, columns + (i + 1) * rows, columns + j * rows);
  }
}

/// In place, without scratch: x[i] = x[kept[i]].
template <class T>
void gather_in_place(T* x, std::span<const Index> kept) {
  if (!std::is_sorted(kept.begin(), kept.end())) return permute_columns(x, 1, kept);  // part of a permutation: the rest ends up anywhere
  for (std::size_t i = 0; i < kept.size(); ++i) x[i] = x[kept[i]];
}

/// Heap bytes of a vector.
template <class Vector>
Index heap_bytes(const Vector& vector) {
  return static_cast<Index>(vector.capacity() * sizeof(typename Vector::value_type));
}

}  // namespace kvsnip::detail
