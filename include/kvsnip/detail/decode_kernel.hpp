// The decode kernel of one kv_head: a pass over the keys, exact softmax, a pass over the values. Keys and values are read
// from memory once for all queries of the group, in two streams, half of the slots apart: one keeps too few of the memory's
// lines in flight.
//
// Keys. A register tile is 2 keys x 4 queries (4 x 2 or 8 x 1 for small groups): 8 sums in registers while the head_dim
// goes by, one load of each key packet for 4 multiply-adds. 2 x 8, and 16 sums, where there are 32 registers.
//
//        q0 q1 q2 q3
//   k_i   +  +  +  +     first stream
//   k_j   +  +  +  +     second stream
//
// Softmax is exact, in parts of the slots whose bounds depend on their number alone.
//
// Values. A register tile is 4 queries x 2 packets of head_dim (2 x 4, 1 x 8; with 32 registers 8 x 2, 4 x 4, 2 x 8), over a
// block of slots small enough for its values to stay in the first-level cache while the tiles of head_dim go by.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <type_traits>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/packet.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

inline constexpr int tile_sums = EIGEN_ARCH_DEFAULT_NUMBER_OF_REGISTERS >= 32 ? 16 : 8;
inline constexpr int tile_columns = tile_sums / 2;  // queries of a register tile
inline constexpr Index streams = 2;
inline constexpr Index block_bytes = 8192;  // of keys or values: stay in the first-level cache while the queries, or the tiles of head_dim, go by
inline constexpr Index prefetch_bytes = 4096;  // ahead of the reader
/// Slots of a block, in each stream.
template <class T>
constexpr Index block_slots_of(Index dim) {
  return std::max<Index>(block_bytes / (streams * dim * static_cast<Index>(sizeof(T))), 4);
}

/// Call fn(first, count, width) for the columns in tiles of the width, a constant: 1, 2, 4 or 8. The last tile's count may be
/// less; it repeats its last column.
template <class Fn>
void for_column_tiles(Index columns, Fn fn) {
  for (Index first = 0; first < columns; first += tile_columns) {
    const Index count = std::min<Index>(tile_columns, columns - first);
    if (count > 4) fn(first, count, std::integral_constant<int, tile_columns>{});
    else if (count > 2) fn(first, count, std::integral_constant<int, 4>{});
    else if (count == 2) fn(first, count, std::integral_constant<int, 2>{});
    else fn(first, count, std::integral_constant<int, 1>{});
  }
}

/// sums (Keys, Columns row by row) = keys' queries.
template <int Keys, int Columns, class T>
inline void logits_tile(const T* const (&keys)[Keys], const float* const (&q)[Columns], Index dim, float* sums) {
  namespace ei = Eigen::internal;
  Packet sum[Keys * Columns];
  for (int k = 0; k < Keys; ++k)
    for (int c = 0; c < Columns; ++c) sum[k * Columns + c] = ei::pset1<Packet>(0.0f);
  Index d = 0;
  for (; d + packet_size <= dim; d += packet_size) {
    Packet key[Keys];
    for (int k = 0; k < Keys; ++k) key[k] = pinned(load(keys[k] + d));
    for (int c = 0; c < Columns; ++c) {
      const Packet query = pinned(ei::ploadu<Packet>(q[c] + d));
      for (int k = 0; k < Keys; ++k) sum[k * Columns + c] = ei::pmadd(key[k], query, sum[k * Columns + c]);
    }
  }
  add_lanes(sum, sums);
  for (; d < dim; ++d)
    for (int k = 0; k < Keys; ++k)
      for (int c = 0; c < Columns; ++c) sums[k * Columns + c] += to_float(keys[k][d]) * q[c][d];
}

/// Logits of `count` keys of each stream, `apart` slots apart. out (slots, columns), columns `stride` apart.
/// @param ahead  whether to ask for the keys that come next: once, if there are several tiles of columns
template <int Columns, class T>
void logits_of_streams(const T* keys, Index count, Index apart, Index dim, const float* q, Index columns, float* out, Index stride, bool ahead) {
  constexpr int tile_keys = tile_sums / Columns, per_stream = tile_keys / streams;
  const float* queries[Columns];
  for (int c = 0; c < Columns; ++c) queries[c] = q + std::min<Index>(c, columns - 1) * dim;
  for (Index i = 0; i < count; i += per_stream) {
    const T* tile[tile_keys];
    Index slots[tile_keys];
    for (int k = 0; k < tile_keys; ++k) {
      slots[k] = k / per_stream * apart + std::min(i + k % per_stream, count - 1);  // the last tile may repeat a key
      tile[k] = keys + slots[k] * dim;
      for (Index byte = 0; ahead && byte < dim * static_cast<Index>(sizeof(T)); byte += 64)
        Eigen::internal::prefetch(reinterpret_cast<const char*>(tile[k]) + prefetch_bytes + byte);
    }
    alignas(64) float sums[tile_keys * Columns];
    logits_tile<tile_keys, Columns>(tile, queries, dim, sums);
    for (int k = 0; k < tile_keys; ++k)
      for (Index c = 0; c < columns; ++c) out[c * stride + slots[k]] = sums[k * Columns + c];
  }
}

/// out (slots, columns), columns `stride` apart, = keys' q.
/// @param keys  (head_dim, slots)
/// @param q     (head_dim, columns), scaled
template <class T>
void logits(const T* keys, Index slots, Index head_dim, const float* q, Index columns, float* out, Index stride) {
  const Index part = slots / streams, block = block_slots_of<T>(head_dim);
  const auto add = [&](Index first, Index count, Index apart) {
    for_column_tiles(columns, [&](Index column, Index width_used, auto width) {
      logits_of_streams<width>(keys + first * head_dim, count, apart, head_dim, q + column * head_dim, width_used, out + column * stride + first, stride, column == 0);
    });
  };
  for (Index first = 0; first < part; first += block) add(first, std::min(block, part - first), part);
  for (Index slot = part * streams; slot < slots; ++slot) add(slot, 1, 0);  // by the same tiles: equal keys get equal logits to the bit
}

/// out += values weights, for `count` slots of each stream and `Packets` packets of head_dim from d on. Meanwhile the tile's
/// share of the next block's bytes is asked for: the strides defeat the hardware's own prefetching.
template <int Columns, int Packets, int Streams, class T>
inline void values_tile(const T* values, Index count, Index apart, Index dim, const float* weights, Index stride, Index columns, Index d, float* out) {
  namespace ei = Eigen::internal;
  const float* weights_of[Columns];
  float* outs[Columns];
  for (int c = 0; c < Columns; ++c) {
    weights_of[c] = weights + std::min<Index>(c, columns - 1) * stride;
    outs[c] = out + std::min<Index>(c, columns - 1) * dim + d;
  }
  constexpr Index share = Packets * packet_size * static_cast<Index>(sizeof(T));
  const char* next = reinterpret_cast<const char*>(values + count * dim + d * count);
  Packet sum[Columns * Packets];
  for (int c = 0; c < Columns; ++c)
    for (int p = 0; p < Packets; ++p) sum[c * Packets + p] = ei::ploadu<Packet>(outs[c] + p * packet_size);
  for (Index i = 0; i < count; ++i)
    for (int stream = 0; stream < Streams; ++stream) {
      const Index slot = stream * apart + i;
      for (Index byte = 0; byte < share; byte += 64) ei::prefetch(next + stream * apart * dim * static_cast<Index>(sizeof(T)) + i * share + byte);
      Packet value[Packets];
      for (int p = 0; p < Packets; ++p) value[p] = pinned(load(values + slot * dim + d + p * packet_size));
      for (int c = 0; c < Columns; ++c) {
        const Packet weight = ei::pset1<Packet>(weights_of[c][slot]);
        for (int p = 0; p < Packets; ++p) sum[c * Packets + p] = ei::pmadd(weight, value[p], sum[c * Packets + p]);
      }
    }
  for (int c = 0; c < Columns; ++c)
    for (int p = 0; p < Packets; ++p) ei::pstoreu(outs[c] + p * packet_size, sum[c * Packets + p]);
}

/// The same for all of head_dim.
template <int Columns, int Streams, class T>
void values_block(const T* values, Index count, Index apart, Index dim, const float* weights, Index stride, Index columns, float* out) {
  constexpr int wide = std::min(tile_sums / Columns, 8), narrow = std::min(wide, 2);
  Index d = 0;
  for (; d + wide * packet_size <= dim; d += wide * packet_size) values_tile<Columns, wide, Streams>(values, count, apart, dim, weights, stride, columns, d, out);
  for (; wide > narrow && d + narrow * packet_size <= dim; d += narrow * packet_size) values_tile<Columns, narrow, Streams>(values, count, apart, dim, weights, stride, columns, d, out);
  for (; d + packet_size <= dim; d += packet_size) values_tile<Columns, 1, Streams>(values, count, apart, dim, weights, stride, columns, d, out);
  for (; d < dim; ++d)
    for (Index c = 0; c < columns; ++c)
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
    for_column_tiles(columns, [&](Index column, Index width_used, auto width) {
      values_block<width, streams>(values + first * head_dim, std::min(block, part - first), part, head_dim, weights + column * stride + first, stride,
                                   width_used, out + column * head_dim);
    });
  for (Index column = 0; column < columns && part * streams < slots; ++column)  // the one beyond the streams
    values_block<1, 1>(values + part * streams * head_dim, slots % streams, 0, head_dim, weights + column * stride + part * streams, stride, 1,
                       out + column * head_dim);
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
