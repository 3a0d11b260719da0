// The decode kernel of one kv_head: a pass over the keys, exact softmax, a pass over the values. Keys and values are read
// from memory once for all queries of the group.
//
// Keys. A register tile is 2 keys x 4 queries (4 x 2 or 8 x 1 for small groups): 8 sums in registers while the head_dim
// goes by, one load of each key packet for 4 multiply-adds. The keys of a tile come from two streams, half the cache
// apart, which keeps more of the memory's lines in flight than one:
//
//        q0 q1 q2 q3
//   k_i   +  +  +  +     slots 0 ... half     first stream
//   k_j   +  +  +  +     slots half ... n     second stream, j = i + half
//
// Values. A register tile is 4 queries x 2 packets of head_dim (2 x 4, 1 x 8), over a block of slots small enough for its
// values to stay in the first-level cache while the tiles of head_dim go by.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/packet.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

inline constexpr Index tile_queries = 32;      // queries whose weights are in memory at once
inline constexpr Index tile_columns = 4;      // queries of a register tile
inline constexpr Index block_keys = 32;       // per stream: stay in cache while more than tile_columns queries go by
inline constexpr Index block_values = 64;     // likewise
inline constexpr Index prefetch_bytes = 4096;  // ahead of the reader

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
    for (int k = 0; k < Keys; ++k) pin(key[k] = load(keys[k] + d));
    for (int c = 0; c < Columns; ++c) {
      Packet query = ei::ploadu<Packet>(q + c * dim + d);
      pin(query);
      for (int k = 0; k < Keys; ++k) sum[k * Columns + c] = ei::pmadd(key[k], query, sum[k * Columns + c]);
    }
  }
  add_lanes(sum, sums);
  for (; d < dim; ++d)
    for (int k = 0; k < Keys; ++k)
      for (int c = 0; c < Columns; ++c) sums[k * Columns + c] += to_float(keys[k][d]) * q[c * dim + d];
}

/// Logits of `count` keys of each of two streams, `apart` slots apart. out (slots, Columns), columns `stride` apart.
template <int Columns, class T>
void logits_of_streams(const T* keys, Index count, Index apart, Index dim, const float* q, float* out, Index stride) {
  constexpr int per_stream = Columns >= 3 ? 1 : Columns == 2 ? 2 : 4;
  for (Index i = 0; i < count; i += per_stream) {
    const T* tile[2 * per_stream];
    for (int k = 0; k < per_stream; ++k) {
      const Index slot = std::min(i + k, count - 1);  // the last tile may repeat a key
      tile[k] = keys + slot * dim;
      tile[per_stream + k] = keys + (apart + slot) * dim;
    }
    for (const T* key : tile)
      for (Index byte = 0; byte < dim * static_cast<Index>(sizeof(T)); byte += 64)
        Eigen::internal::prefetch(reinterpret_cast<const char*>(key) + prefetch_bytes + byte);
    alignas(64) float sums[2 * per_stream * Columns];
    logits_tile<2 * per_stream, Columns>(tile, q, dim, sums);
    for (int k = 0; k < per_stream; ++k) {
      const Index slot = std::min(i + k, count - 1);
      for (int c = 0; c < Columns; ++c) {
        out[c * stride + slot] = sums[k * Columns + c];
        out[c * stride + apart + slot] = sums[(per_stream + k) * Columns + c];
      }
    }
  }
}

/// out (slots, columns) = keys' q.
/// @param keys  (head_dim, slots)
/// @param q     (head_dim, columns), scaled by 1 / sqrt(head_dim)
template <class T>
void logits(const T* keys, Index slots, Index head_dim, const float* q, Index columns, float* out) {
  const Index half = slots / 2;
  for (Index first = 0; first < half; first += block_keys)
    for_column_tiles(columns, [&](Index column, auto width) {
      logits_of_streams<decltype(width)::value>(keys + first * head_dim, std::min(block_keys, half - first), half, head_dim,
                                                q + column * head_dim, out + column * slots + first, slots);
    });
  if (slots % 2 == 1)  // the one beyond both streams, by the same tile: equal keys get equal logits to the bit
    for_column_tiles(columns, [&](Index column, auto width) {
      logits_of_streams<decltype(width)::value>(keys + (slots - 1) * head_dim, 1, 0, head_dim, q + column * head_dim,
                                                out + column * slots + slots - 1, slots);
    });
}

/// The logit of a slot that a query cannot see. Finite: builds with -ffast-math have no infinity.
inline constexpr float hidden = -std::numeric_limits<float>::max();

/// Softmax of one column in place. A column with nothing visible is all zeros; else hidden slots get next to 0.
inline void softmax(float* column, Index slots) {
  namespace ei = Eigen::internal;
  const Index whole = slots - slots % packet_size, rest = slots - whole;
  alignas(64) float tail[packet_size];  // the last slots, filled up with hidden ones
  std::fill_n(tail, packet_size, hidden);
  std::copy_n(column + whole, rest, tail);

  Packet most = ei::pload<Packet>(tail);
  for (Index i = 0; i < whole; i += packet_size) most = ei::pmax(most, ei::ploadu<Packet>(column + i));
  const float max = ei::predux_max(most);
  if (max == hidden) {
    std::fill_n(column, slots, 0.0f);
    return;
  }
  const Packet shift = ei::pset1<Packet>(max);
  Packet sum = ei::pset1<Packet>(0.0f);
  const auto exponential = [&](float* x) {
    const Packet e = ei::pexp(ei::psub(ei::ploadu<Packet>(x), shift));
    ei::pstoreu(x, e);
    sum = ei::padd(sum, e);
  };
  for (Index i = 0; i < whole; i += packet_size) exponential(column + i);
  exponential(tail);
  std::copy_n(tail, rest, column + whole);
  const float scale = 1.0f / ei::predux(sum);
  for (Index i = 0; i < slots; ++i) column[i] *= scale;
}

/// out += values weights, for `Packets` packets of head_dim from d on. Meanwhile the tile's share of the next block's bytes
/// is asked for: the strides defeat the hardware's own prefetching.
template <int Columns, int Packets, class T>
inline void values_tile(const T* values, Index slots, Index dim, const float* weights, Index stride, Index d, float* out) {
  namespace ei = Eigen::internal;
  constexpr Index share = Packets * packet_size * static_cast<Index>(sizeof(T));
  const char* next = reinterpret_cast<const char*>(values + block_values * dim + d * block_values);
  Packet sum[Columns * Packets];
  for (int c = 0; c < Columns; ++c)
    for (int p = 0; p < Packets; ++p) sum[c * Packets + p] = ei::ploadu<Packet>(out + c * dim + d + p * packet_size);
  for (Index slot = 0; slot < slots; ++slot) {
    for (Index byte = 0; byte < share; byte += 64) ei::prefetch(next + slot * share + byte);
    Packet value[Packets];
    for (int p = 0; p < Packets; ++p) pin(value[p] = load(values + slot * dim + d + p * packet_size));
    for (int c = 0; c < Columns; ++c) {
      const Packet weight = ei::pset1<Packet>(weights[c * stride + slot]);
      for (int p = 0; p < Packets; ++p) sum[c * Packets + p] = ei::pmadd(weight, value[p], sum[c * Packets + p]);
    }
  }
  for (int c = 0; c < Columns; ++c)
    for (int p = 0; p < Packets; ++p) ei::pstoreu(out + c * dim + d + p * packet_size, sum[c * Packets + p]);
}

/// The same for all of head_dim, a block of slots.
template <int Columns, class T>
void values_block(const T* values, Index slots, Index dim, const float* weights, Index stride, float* out) {
  constexpr int wide = Columns >= 3 ? 2 : Columns == 2 ? 4 : 8;
  Index d = 0;
  for (; d + wide * packet_size <= dim; d += wide * packet_size) values_tile<Columns, wide>(values, slots, dim, weights, stride, d, out);
  for (; d + packet_size <= dim; d += packet_size) values_tile<Columns, 1>(values, slots, dim, weights, stride, d, out);
  for (; d < dim; ++d)
    for (int c = 0; c < Columns; ++c)
      for (Index slot = 0; slot < slots; ++slot) out[c * dim + d] += weights[c * stride + slot] * to_float(values[slot * dim + d]);
}

/// out (head_dim, columns) = values weights.
/// @param values   (head_dim, slots)
/// @param weights  (slots, columns), columns `stride` apart
template <class T>
void weighted_values(const T* values, Index slots, Index head_dim, const float* weights, Index stride, Index columns, float* out) {
  std::fill_n(out, head_dim * columns, 0.0f);
  for (Index first = 0; first < slots; first += block_values)
    for_column_tiles(columns, [&](Index column, auto width) {
      values_block<decltype(width)::value>(values + first * head_dim, std::min(block_values, slots - first), head_dim,
                                           weights + column * stride + first, stride, out + column * head_dim);
    });
}

/// Attention weights of consecutive queries of one kv_head.
/// @param q            (head_dim, queries * group_size), a query's heads side by side, scaled
/// @param later_slots  slots of the tokens after the first query, in order: query j does not see those from the j-th on
/// @param out          (slots, queries * group_size)
template <class T>
void attention_weights(const T* keys, Index slots, Index head_dim, const float* q, Index queries, Index group_size,
                       std::span<const Index> later_slots, float* out) {
  logits(keys, slots, head_dim, q, queries * group_size, out);
  for (Index column = 0; column < queries * group_size; ++column) {
    const auto later = later_slots.subspan(static_cast<std::size_t>(column / group_size));
    for (const Index slot : later) out[column * slots + slot] = hidden;
    softmax(out + column * slots, slots);
    for (const Index slot : later) out[column * slots + slot] = 0.0f;
  }
}

/// A 64-byte aligned buffer of the calling thread; grows, and stays for the thread's next call.
inline float* thread_scratch(Index size) {
  thread_local AlignedArray<float> buffer;
  if (buffer.size() < size) buffer = AlignedArray<float>(size);
  return buffer.data();
}

}  // namespace kvsnip::detail
