// The attention of one kv_head: logits, exact softmax in float32, weighted values.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

#include "kvsnip/detail/convert.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

inline constexpr Index block_slots = 64;  // converted to float at a time

/// Logits: out (slots, columns) = keys' q.
/// @param keys  (head_dim, slots)
/// @param q     (head_dim, columns), scaled by 1 / sqrt(head_dim)
template <class T>
void logits(const T* keys, Index slots, Index head_dim, const float* q, Index columns, float* block, float* out) {
  for (Index first = 0; first < slots; first += block_slots) {
    const Index count = std::min(block_slots, slots - first);
    convert(keys + first * head_dim, count * head_dim, block);
    for (Index j = 0; j < columns; ++j) {
      const Eigen::Map<const Eigen::VectorXf> query(q + j * head_dim, head_dim);
      for (Index i = 0; i < count; ++i)
        out[j * slots + first + i] = Eigen::Map<const Eigen::VectorXf>(block + i * head_dim, head_dim).dot(query);
    }
  }
}

/// Softmax of one column in place. Slots at -infinity get 0; a column with nothing visible is all zeros.
inline void softmax(float* column, Index slots) {
  Eigen::Map<Eigen::ArrayXf> x(column, slots);
  const float max = slots == 0 ? -std::numeric_limits<float>::infinity() : x.maxCoeff();
  if (max == -std::numeric_limits<float>::infinity()) {
    x.setZero();
    return;
  }
  x = (x - max).exp();
  x /= x.sum();
}

/// out (head_dim, columns) = values weights.
template <class T>
void weighted_values(const T* values, Index slots, Index head_dim, const float* weights, Index columns, float* block, float* out) {
  std::fill_n(out, head_dim * columns, 0.0f);
  for (Index first = 0; first < slots; first += block_slots) {
    const Index count = std::min(block_slots, slots - first);
    convert(values + first * head_dim, count * head_dim, block);
    for (Index j = 0; j < columns; ++j) {
      Eigen::Map<Eigen::VectorXf> sum(out + j * head_dim, head_dim);
      for (Index i = 0; i < count; ++i)
        sum += weights[j * slots + first + i] * Eigen::Map<const Eigen::VectorXf>(block + i * head_dim, head_dim);
    }
  }
}

/// Attention weights of consecutive queries of one kv_head.
/// @param q           (head_dim, queries * group_size), a query's heads side by side, scaled
/// @param new_slots   slots of the update's tokens; query i of the last `queries` does not see those after its own
/// @param out         (slots, queries * group_size)
template <class T>
void attention_weights(const T* keys, Index slots, Index head_dim, const float* q, Index queries, Index group_size,
                       std::span<const Index> later_slots, float* block, float* out) {
  logits(keys, slots, head_dim, q, queries * group_size, block, out);
  for (Index j = 0; j < queries; ++j)
    for (Index g = 0; g < group_size; ++g) {
      float* column = out + (j * group_size + g) * slots;
      for (const Index slot : later_slots.subspan(static_cast<std::size_t>(j))) column[slot] = -std::numeric_limits<float>::infinity();
      softmax(column, slots);
    }
}

/// A buffer of the calling thread; grows, and stays for the thread's next call.
inline float* thread_scratch(Index size) {
  thread_local std::vector<float> buffer;
  if (static_cast<Index>(buffer.size()) < size) buffer.resize(static_cast<std::size_t>(size));
  return buffer.data();
}

}  // namespace kvsnip::detail
