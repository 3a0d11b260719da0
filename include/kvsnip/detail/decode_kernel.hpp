// The decode kernel of one kv_head: a pass over the keys, exact softmax, a pass over the values. Keys and values are read
// from memory once for all queries of the group, in two streams, half of the slots apart: one keeps too few of the memory's
// lines in flight.
//
// Keys. A register tile is 2 keys x 4 queries (4 x 2 or 8 x 1 for small groups): 8 sums in registers while the head_dim
// goes by, one load of each key packet for 4 multiply-adds.
//
//        q0 q1 q2 q3
//   k_i   +  +  +  +     first stream
//   k_j   +  +  +  +     second stream
//
// Softmax is exact, in parts of the slots whose bounds depend on their number alone.
//
// Values. A register tile is 4 queries x 2 packets of head_dim (2 x 4, 1 x 8), over a block of slots small enough for its
// values to stay in the first-level cache while the tiles of head_dim go by.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <type_traits>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/packet.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

inline constexpr Index tile_columns = 4;      // queries of a register tile
inline constexpr Index streams = 2;
inline constexpr Index block_bytes = 8192;  // of keys or values: stay in the first-level cache while the queries, or the tiles of head_dim, go by
inline constexpr Index prefetch_bytes = 2048;  // ahead of the reader
/// Slots of a block, in each stream.
template <class T>
constexpr Index block_slots_of(Index dim) {
  return std::max<Index>(block_bytes / (streams * dim * static_cast<Index>(sizeof(T))), 4);
}

/// Call fn(first, constant) for the columns in tiles of 4 and a last one of 1 to 3.
template <class Fn>
void for_column_tiles(Index columns, Fn fn) {
  Index first = 0;
  for (; first + tile_columns <= columns; first += tile_columns) fn(first, std::integral_constant<int, 4>{});
  if (columns - first == 3) fn(first, std::integral_constant<int, 3>{});
  if (columns - first == 2) fn(first, std::integral_constant<int, 2>{});
  if (columns - first == 1) fn(first, std::integral_constant<int, 1>{});
}

/// sums (Keys, Columns row by row) = keys' q. @param q (head_dim, Columns)
template <int Keys, int Columns, class T>
inline void logits_tile(const T* const (&keys)[Keys], const float* q, Index dim, float* sums) {
  namespace ei = Eigen::internal;
  Packet sum[Keys * Columns];
  for (Packet& s : sum) s = ei::pset1<Packet>(0.0f);
  Index d = 0;
  for (; d + packet_size <= dim; d += packet_size) {
    Packet key[Keys];
    for (int k = 0; k < Keys; ++k) key[k] = pinned(load(keys[k] + d));
    for (int c = 0; c < Columns; ++c) {
      const Packet query = pinned(ei::ploadu<Packet>(q + c * dim + d));
      for (int k = 0; k < Keys; ++k) sum[k * Columns + c] = ei::pmadd(key[k], query, sum[k * Columns + c]);
    }
  }
  add_lanes(sum, sums);
  for (; d < dim; ++d)
    for (int k = 0; k < Keys; ++k)
      for (int c = 0; c < Columns; ++c) sums[k * Columns + c] += to_float(keys[k][d]) * q[c * dim + d];
}

/// Logits of `count` keys of each stream, `apart` slots apart. out (slots, Columns), columns `stride` apart.
template <int Columns, class T>
void logits_of_streams(const T* keys, Index count, Index apart, Index dim, const float* q, float* out, Index stride) {
  constexpr int tile_keys = Columns >= 3 ? 2 : Columns == 2 ? 4 : 8, per_stream = tile_keys / streams;
  for (Index i = 0; i < count; i += per_stream) {
    const T* tile[tile_keys];
    Index slots[tile_keys];
    for (int k = 0; k < tile_keys; ++k) {
      slots[k] = k / per_stream * apart + std::min(i + k % per_stream, count - 1);  // the last tile may repeat a key
      tile[k] = keys + slots[k] * dim;
      for (Index byte = 0; byte < dim * static_cast<Index>(sizeof(T)); byte += 64)
        Eigen::internal::prefetch(reinterpret_cast<const char*>(tile[k]) + prefetch_bytes + byte);
    }
    alignas(64) float sums[tile_keys * Columns];
    logits_tile<tile_keys, Columns>(tile, q, dim, sums);
    for (int k = 0; k < tile_keys; ++k)
      for (int c = 0; c < Columns; ++c) out[c * stride + slots[k]] = sums[k * Columns + c];
  }
}

/// out (slots, columns), columns `stride` apart, = keys' q.
/// @param keys  (head_dim, slots)
/// @param q     (head_dim, columns), scaled
template <class T>
void logits(const T* keys, Index slots, Index head_dim, const float* q, Index columns, float* out, Index stride) {
  const Index part = slots / streams, block = block_slots_of<T>(head_dim);
  const auto add = [&](Index first, Index count, Index apart) {
    for_column_tiles(columns, [&](Index column, auto width) {
      logits_of_streams<width>(keys + first * head_dim, count, apart, head_dim, q + column * head_dim, out + column * stride + first, stride);
    });
  };
  for (Index first = 0; first < part; first += block) add(first, std::min(block, part - first), part);
  for (Index slot = part * streams; slot < slots; ++slot) add(slot, 1, 0);  // by the same tiles: equal keys get equal logits to the bit
}

/// The logit of a slot that a query cannot see. Finite: builds with -ffast-math have no infinity.
inline constexpr float hidden = -std::numeric_limits<float>::max();

/// Replace logits by 2^(logit - max), the weights but for a common factor. @return the largest logit, and the weights' sum;
/// with nothing visible all weights are 0
struct Softmax {
  float max = hidden, total = 0.0f;
};
inline Softmax unnormalised_softmax(float* logits, Index slots) {
  namespace ei = Eigen::internal;
  const Index whole = slots - slots % packet_size, rest = slots - whole;
  alignas(64) float tail[packet_size];  // the last slots, filled up with hidden ones
  std::fill_n(tail, packet_size, hidden);
  std::copy_n(logits + whole, rest, tail);

  Packet most = ei::pload<Packet>(tail);
  for (Index i = 0; i < whole; i += packet_size) most = ei::pmax(most, ei::ploadu<Packet>(logits + i));
  const float max = ei::predux_max(most);
  if (max == hidden) {
    std::fill_n(logits, slots, 0.0f);
    return {};
  }
  const Packet shift = ei::pset1<Packet>(max);
  Packet sum = ei::pset1<Packet>(0.0f);
  const auto exponential = [&](float* x) {
    const Packet e = exp2_nonpositive(ei::psub(ei::ploadu<Packet>(x), shift));
    ei::pstoreu(x, e);
    sum = ei::padd(sum, e);
  };
  for (Index i = 0; i < whole; i += packet_size) exponential(logits + i);
  exponential(tail);
  std::copy_n(tail, rest, logits + whole);
  return {max, ei::predux(sum)};
}

/// out += values weights, for `count` slots of each stream and `Packets` packets of head_dim from d on. Meanwhile the tile's
/// share of the next block's bytes is asked for: the strides defeat the hardware's own prefetching.
template <int Columns, int Packets, int Streams, class T>
inline void values_tile(const T* values, Index count, Index apart, Index dim, const float* weights, Index stride, Index d, float* out) {
  namespace ei = Eigen::internal;
  constexpr Index share = Packets * packet_size * static_cast<Index>(sizeof(T));
  const char* next = reinterpret_cast<const char*>(values + count * dim + d * count);
  Packet sum[Columns * Packets];
  for (int c = 0; c < Columns; ++c)
    for (int p = 0; p < Packets; ++p) sum[c * Packets + p] = ei::ploadu<Packet>(out + c * dim + d + p * packet_size);
  for (Index i = 0; i < count; ++i)
    for (int stream = 0; stream < Streams; ++stream) {
      const Index slot = stream * apart + i;
      for (Index byte = 0; byte < share; byte += 64) ei::prefetch(next + stream * apart * dim * static_cast<Index>(sizeof(T)) + i * share + byte);
      Packet value[Packets];
      for (int p = 0; p < Packets; ++p) value[p] = pinned(load(values + slot * dim + d + p * packet_size));
      for (int c = 0; c < Columns; ++c) {
        const Packet weight = ei::pset1<Packet>(weights[c * stride + slot]);
        for (int p = 0; p < Packets; ++p) sum[c * Packets + p] = ei::pmadd(weight, value[p], sum[c * Packets + p]);
      }
    }
  for (int c = 0; c < Columns; ++c)
    for (int p = 0; p < Packets; ++p) ei::pstoreu(out + c * dim + d + p * packet_size, sum[c * Packets + p]);
}

/// The same for all of head_dim.
template <int Columns, int Streams, class T>
void values_block(const T* values, Index count, Index apart, Index dim, const float* weights, Index stride, float* out) {
  constexpr int wide = Columns >= 3 ? 2 : Columns == 2 ? 4 : 8;
  Index d = 0;
  for (; d + wide * packet_size <= dim; d += wide * packet_size) values_tile<Columns, wide, Streams>(values, count, apart, dim, weights, stride, d, out);
  for (; d + packet_size <= dim; d += packet_size) values_tile<Columns, 1, Streams>(values, count, apart, dim, weights, stride, d, out);
  for (; d < dim; ++d)
    for (int c = 0; c < Columns; ++c)
      for (Index i = 0; i < count; ++i)
        for (int stream = 0; stream < Streams; ++stream)
          out[c * dim + d] += weights[c * stride + stream * apart + i] * to_float(values[(stream * apart + i) * dim + d]);
}

/// out (head_dim, columns) = values weights.
/// @param values   (head_dim, slots)
/// @param weights  (slots, columns), columns `stride` apart
template <class T>
void weighted_values(const T* values, Index slots, Index head_dim, const float* weights, Index stride, Index columns, float* out) {
  std::fill_n(out, head_dim * columns, 0.0f);
  const Index part = slots / streams, block = block_slots_of<T>(head_dim);
  for (Index first = 0; first < part; first += block)
    for_column_tiles(columns, [&](Index column, auto width) {
      values_block<width, streams>(values + first * head_dim, std::min(block, part - first), part, head_dim, weights + column * stride + first, stride,
                                   out + column * head_dim);
    });
  for (Index column = 0; column < columns && part * streams < slots; ++column)  // the one beyond the streams
    values_block<1, 1>(values + part * streams * head_dim, slots % streams, 0, head_dim, weights + column * stride + part * streams, stride, out + column * head_dim);
}

/// What a kernel reads of one kv_head.
template <class T>
struct StoredHead {
  const T* keys = nullptr;    ///< (head_dim, slots)
  const T* values = nullptr;  ///< (head_dim, slots), or none: weights only
  Index slots = 0, head_dim = 0, group_size = 1;
};

/// A few queries of one kv_head against all its slots, in parts of part_slots that may run on different threads and are
/// merged in order.
template <class T>
class DecodeTile {
 public:
  static constexpr Index part_slots = 2048;
  static Index num_parts(Index slots) { return (slots + part_slots - 1) / part_slots; }
  /// Floats of scratch, a multiple of 16.
  static Index scratch_size(const StoredHead<T>& head, Index queries) {
    const Index columns = queries * head.group_size, parts = num_parts(head.slots);
    return Scratch::rounded(head.head_dim * columns) + Scratch::rounded(head.slots * columns) + Scratch::rounded(parts * columns * head.head_dim) +
           2 * Scratch::rounded(parts * columns);
  }
  /// A view of work in progress: any number may be made over the same scratch.
  /// @param later_slots  slots of the tokens after the first query, in order: query j does not see those from the j-th on
  /// @param scratch      scratch_size() floats, 64-byte aligned
  DecodeTile(const StoredHead<T>& head, Index queries, std::span<const Index> later_slots, float* scratch)
      : head_(head), later_(later_slots), columns_(queries * head.group_size), parts_(num_parts(head.slots)), q_(scratch),
        weights_(q_ + Scratch::rounded(head.head_dim * columns_)), sums_(weights_ + Scratch::rounded(head.slots * columns_)),
        max_(sums_ + Scratch::rounded(parts_ * columns_ * head.head_dim)), factor_(max_ + Scratch::rounded(parts_ * columns_)) {}

  /// First, once. @param q  (head_dim, group_size), columns `stride` apart, after RoPE, unscaled
  void set_query(Index j, const float* q, Index stride) {
    const float scale = log2_e / std::sqrt(static_cast<float>(head_.head_dim));
    float* to = q_ + j * head_.group_size * head_.head_dim;
    for (Index g = 0; g < head_.group_size; ++g)
      for (Index d = 0; d < head_.head_dim; ++d) *to++ = q[g * stride + d] * scale;
  }
  /// Then all parts, in any order, on any threads.
  void run(Index part) {
    const Index first = part * part_slots, slots = std::min(part_slots, head_.slots - first);
    logits(head_.keys + first * head_.head_dim, slots, head_.head_dim, q_, columns_, weights_ + first, head_.slots);
    for (Index column = 0; column < columns_; ++column) {
      float* weights = weights_ + column * head_.slots;
      for (const Index slot : later_.subspan(static_cast<std::size_t>(column / head_.group_size)))
        if (slot >= first && slot < first + slots) weights[slot] = hidden;
      const Softmax softmax = unnormalised_softmax(weights + first, slots);
      max_[part * columns_ + column] = softmax.max, factor_[part * columns_ + column] = softmax.total;
    }
    if (head_.values != nullptr)
      weighted_values(head_.values + first * head_.head_dim, slots, head_.head_dim, weights_ + first, head_.slots, columns_, sums_ + part * columns_ * head_.head_dim);
  }
  /// Then, once: a common maximum and total.
  void merge() {
    const auto exponential = [](float x) { return Eigen::internal::pfirst(exp2_nonpositive(Eigen::internal::pset1<Packet>(x))); };
    for (Index column = 0; column < columns_; ++column) {
      float max = hidden, total = 0.0f;
      for (Index i = column; i < parts_ * columns_; i += columns_) max = std::max(max, max_[i]);
      for (Index i = column; i < parts_ * columns_; i += columns_) total += factor_[i] * exponential(max_[i] - max);
      for (Index i = column; i < parts_ * columns_; i += columns_) factor_[i] = total == 0.0f ? 0.0f : exponential(max_[i] - max) / total;
    }
  }
  /// The outputs of query j, zeros if it sees nothing. @param out  (head_dim * group_size)
  void output(Index j, float* out) const {
    for (Index column = j * head_.group_size; column < (j + 1) * head_.group_size; ++column, out += head_.head_dim) {
      std::fill_n(out, head_.head_dim, 0.0f);
      for (Index i = column; i < parts_ * columns_; i += columns_)
        for (Index d = 0; d < head_.head_dim; ++d) out[d] += factor_[i] * sums_[i * head_.head_dim + d];
    }
  }
  /// Last: the weights of the queries from `first` on, (slots, queries * group_size), or their means over the group,
  /// (slots, queries). In place.
  const float* rows(Index first, bool mean) {
    const Index heads = mean ? head_.group_size : 1, begin = first * head_.group_size;
    const float share = 1.0f / static_cast<float>(heads);
    for (Index row = 0; row < (columns_ - begin) / heads; ++row)
      for (Index part = 0; part < parts_; ++part) {
        const Index column = begin + row * heads;
        const float* weights = weights_ + column * head_.slots;
        float* out = weights_ + (begin + row) * head_.slots;  // at or before what is read
        const float* factor = factor_ + part * columns_ + column;
        for (Index slot = part * part_slots; slot < std::min(head_.slots, (part + 1) * part_slots); ++slot) {
          float sum = weights[slot] * factor[0];
          for (Index g = 1; g < heads; ++g) sum += weights[g * head_.slots + slot] * factor[g];
          out[slot] = sum * share;
        }
      }
    return weights_ + begin * head_.slots;
  }

 private:
  StoredHead<T> head_;
  std::span<const Index> later_;
  Index columns_, parts_;
  float* q_;        // (head_dim, columns), scaled
  float* weights_;  // (slots, columns), of each part unnormalised
  float* sums_;     // [part] (head_dim, columns), unnormalised
  float* max_;      // [part] (columns) largest logit
  float* factor_;   // [part] (columns) sum of weights; once merged, what the part's weights and sums must be multiplied by
};

}  // namespace kvsnip::detail
