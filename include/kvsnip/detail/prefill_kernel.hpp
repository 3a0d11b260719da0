// The prefill kernel: a tile of consecutive queries of one kv_head against all the slots they see, block by block with
// online softmax (Milakov and Gimelshein, arXiv:1805.02867), so that no row of logits need be in memory.
//
// The columns of a tile are its queries' heads side by side (query * group_size + g), in panels of 2 packets. Nothing is
// transposed but the queries, once: the registers' lanes run over columns in the K pass and over head_dim in the V pass,
// and what is not in lanes is broadcast.
//
//   K pass: 6 keys x 1 panel      V pass: 6 (or 4) columns x 2 packets of head_dim
//
//        [c c c c][c c c c]            [d d d d][d d d d]
//   k0       +        +           c0       +        +
//   ...                           ...
//   k5       +        +           c5       +        +
//
// With 12 sums all of a tile fits in 16 registers. Weights stay unnormalised, relative to the maximum so far; a tile that
// is asked for its weights keeps every block's and corrects them at the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <type_traits>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/decode_kernel.hpp"
#include "kvsnip/detail/packet.hpp"

namespace kvsnip::detail {

inline constexpr Index panel_packets = 2, value_packets = 2;  // add_column_sums counts on the former
inline constexpr Index panel_columns = panel_packets * packet_size;
inline constexpr Index keys_per_tile = 6;
inline constexpr Index block_slots = 144;  // a multiple of keys_per_tile, packet_size and 8; a block stays in the second-level cache

/// logits (panel_columns, 6) of 6 keys. @param q  (panel_columns, head_dim)
inline void prefill_logits(const float* const (&keys)[keys_per_tile], const float* q, Index dim, float* logits) {
  namespace ei = Eigen::internal;
  Packet sum[keys_per_tile * panel_packets];
  for (Packet& s : sum) s = ei::pset1<Packet>(0.0f);
  for (Index d = 0; d < dim; ++d) {
    Packet query[panel_packets];
    for (Index p = 0; p < panel_packets; ++p) query[p] = pinned(ei::pload<Packet>(q + d * panel_columns + p * packet_size));
    for (Index k = 0; k < keys_per_tile; ++k) {
      const Packet key = ei::pset1<Packet>(keys[k][d]);
      for (Index p = 0; p < panel_packets; ++p) sum[k * panel_packets + p] = ei::pmadd(key, query[p], sum[k * panel_packets + p]);
    }
  }
  for (Index i = 0; i < keys_per_tile * panel_packets; ++i) ei::pstore(logits + i * packet_size, sum[i]);
}

/// out = out * corrections + values weights, for a few columns and 2 packets of head_dim.
/// @param values   (2 packets, slots)
/// @param weights  (panel_columns, slots), from the first of the columns
template <Index Columns>
inline void prefill_values(const float* values, const float* weights, Index slots, const float* corrections, float* out, Index stride) {
  namespace ei = Eigen::internal;
  Packet sum[Columns * value_packets];
  for (Index c = 0; c < Columns; ++c)
    for (Index p = 0; p < value_packets; ++p)
      sum[c * value_packets + p] = ei::pmul(ei::pload<Packet>(out + c * stride + p * packet_size), ei::pset1<Packet>(corrections[c]));
  for (Index slot = 0; slot < slots; ++slot) {
    Packet value[value_packets];
    for (Index p = 0; p < value_packets; ++p) value[p] = pinned(ei::pload<Packet>(values + (slot * value_packets + p) * packet_size));
    for (Index c = 0; c < Columns; ++c) {
      const Packet weight = ei::pset1<Packet>(weights[slot * panel_columns + c]);
      for (Index p = 0; p < value_packets; ++p) sum[c * value_packets + p] = ei::pmadd(weight, value[p], sum[c * value_packets + p]);
    }
  }
  for (Index c = 0; c < Columns; ++c)
    for (Index p = 0; p < value_packets; ++p) ei::pstore(out + c * stride + p * packet_size, sum[c * value_packets + p]);
}

/// What will be asked of a tile besides its outputs.
enum class Keep { nothing, sums, rows };

/// Consecutive queries, of which each sees one slot more than the one before.
template <class T>
class PrefillTile {
 public:
  /// @param visible  slots that the last query sees, >= num_queries
  /// @param keep     sums: add_column_sums() will be called; rows: rows() as well
  PrefillTile(const StoredHead<T>& head, Index num_queries, Index visible, Keep keep)
      : head_(head), queries_(num_queries), visible_(visible), panels_((num_queries * head.group_size + panel_columns - 1) / panel_columns),
        blocks_((visible + block_slots - 1) / block_slots), kept_blocks_(keep == Keep::nothing ? 1 : blocks_),
        value_panels_(head.values == nullptr ? 0 : (head.head_dim + value_panel - 1) / value_panel), keep_(keep), scratch_(scratch_size()) {
    q_ = scratch_.take(panels_ * head.head_dim * panel_columns);
    if constexpr (!std::same_as<T, float>) keys_ = scratch_.take(block_slots * head.head_dim);
    values_ = scratch_.take(block_slots * value_panels_ * value_panel), out_ = scratch_.take(columns() * value_panels_ * value_panel);
    weights_ = scratch_.take(kept_blocks_ * block_slots * columns());
    max_ = scratch_.take(kept_blocks_ * columns()), total_ = scratch_.take(columns()), correction_ = scratch_.take(columns());
    if (keep == Keep::rows) rows_ = scratch_.take(head.slots * num_queries * head.group_size);
    std::fill_n(q_, panels_ * head.head_dim * panel_columns, 0.0f);
    std::fill_n(out_, columns() * value_panels_ * value_panel, 0.0f);
  }

  /// Query j of the tile. @param q  (head_dim, group_size), columns `stride` apart, after RoPE, unscaled
  void set_query(Index j, const float* q, Index stride) {
    const float scale = log2_e / std::sqrt(static_cast<float>(head_.head_dim));
    for (Index g = 0; g < head_.group_size; ++g) {
      const Index column = j * head_.group_size + g;
      float* to = q_ + column / panel_columns * head_.head_dim * panel_columns + column % panel_columns;
      for (Index d = 0; d < head_.head_dim; ++d) to[d * panel_columns] = q[g * stride + d] * scale;
    }
  }
  void run() {
    for (Index block = 0; block < blocks_; ++block) {
      const Index first = block * block_slots, slots = std::min(block_slots, visible_ - first);
      const float* keys = load_keys(first, slots);
      for (Index panel = 0; panel < panels_; ++panel) weigh(block, panel, keys, slots);
      if (head_.values != nullptr) add_values(block, first, slots);
    }
  }
  /// Of query j. @param out  (head_dim * group_size)
  void output(Index j, float* out) const {
    for (Index g = 0; g < head_.group_size; ++g) {
      const Index column = j * head_.group_size + g;
      const float* sum = out_ + column * value_panels_ * value_panel;
      for (Index d = 0; d < head_.head_dim; ++d) out[g * head_.head_dim + d] = sum[d] / total_[column];
    }
  }
  /// Attention weights of the queries from `first` on: (slots, queries * group_size), or their means over the group,
  /// (slots, queries); valid until the next call.
  const float* rows(Index first, bool mean) {
    namespace ei = Eigen::internal;
    const Index heads = mean ? head_.group_size : 1, begin = first * head_.group_size, end = queries_ * head_.group_size, slots = head_.slots;
    for (Index block = 0; block < blocks_; ++block) {
      for (Index column = 0; column < columns(); column += packet_size) ei::pstore(correction_ + column, correction(block, column));
      for (Index panel = begin / panel_columns; panel * panel_columns < end; ++panel)  // a panel's weights are read as they lie in memory
        for (Index slot = block * block_slots; slot < std::min(visible_, (block + 1) * block_slots); slot += packet_size)
          for (Index column = std::max(panel * panel_columns, begin / packet_size * packet_size); column < std::min((panel + 1) * panel_columns, end); column += packet_size)
            emit(block, slot, column, begin, end, heads);
    }
    for (Index row = 0; row < (end - begin) / heads; ++row) std::fill(rows_ + row * slots + visible_, rows_ + (row + 1) * slots, 0.0f);
    return rows_;
  }
  /// sums (slots) += the queries' weights, mean over the group.
  void add_column_sums(float* sums) const {
    namespace ei = Eigen::internal;
    for (Index block = 0; block < blocks_; ++block)
      for (Index panel = 0; panel < panels_; ++panel) {
        const Packet first = correction(block, panel * panel_columns), second = correction(block, panel * panel_columns + packet_size);
        const Index num_keys = seen(block, panel);
        for (Index key = 0; key < num_keys; key += 8) {  // lanes are added up by eights: what comes past the last key is left
          Packet weighted[8];
          float of_key[8];
          for (Index k = 0; k < 8; ++k) {
            const float* weights = weights_of(block, panel) + (key + k) * panel_columns;
            weighted[k] = ei::pmadd(first, ei::pload<Packet>(weights), ei::pmul(second, ei::pload<Packet>(weights + packet_size)));
          }
          add_lanes(weighted, of_key);
          for (Index k = 0; k < std::min<Index>(8, num_keys - key); ++k) sums[block * block_slots + key + k] += of_key[k] / static_cast<float>(head_.group_size);
        }
      }
  }

 private:
  static constexpr Index value_panel = value_packets * packet_size;

  Index columns() const { return panels_ * panel_columns; }
  Index seen_by(Index query) const { return visible_ - (queries_ - 1 - std::min(query, queries_ - 1)); }
  Index seen_by_last(Index panel) const { return seen_by((panel * panel_columns + panel_columns - 1) / head_.group_size); }
  /// Slots of a block that some column of a panel sees.
  Index seen(Index block, Index panel) const { return std::clamp<Index>(seen_by_last(panel) - block * block_slots, 0, block_slots); }
  float* weights_of(Index block, Index panel) const { return weights_ + (block % kept_blocks_ * panels_ + panel) * block_slots * panel_columns; }
  float* max_of(Index block) const { return max_ + block % kept_blocks_ * columns(); }
  Index scratch_size() const {
    Index size = 0, value_dim = value_panels_ * value_panel;
    for (const Index part : {panels_ * head_.head_dim * panel_columns, std::same_as<T, float> ? 0 : block_slots * head_.head_dim, block_slots * value_dim,
                             columns() * value_dim, kept_blocks_ * block_slots * columns(), kept_blocks_ * columns(), columns(), columns(),
                             keep_ == Keep::rows ? head_.slots * queries_ * head_.group_size : 0})
      size += Scratch::rounded(part);
    return size;
  }
  const float* load_keys(Index first, Index slots) {
    if constexpr (std::same_as<T, float>) return head_.keys + first * head_.head_dim;
    convert(head_.keys + first * head_.head_dim, slots * head_.head_dim, keys_);
    return keys_;
  }
  /// A block's logits, then its weights, of one panel.
  void weigh(Index block, Index panel, const float* keys, Index slots) {
    namespace ei = Eigen::internal;
    const Index num_keys = seen(block, panel), first = block * block_slots;
    if (num_keys == 0) return;
    float* weights = weights_of(block, panel);
    const char* next = reinterpret_cast<const char*>(head_.keys + (first + block_slots) * head_.head_dim);  // this panel's share of it
    const Index share = block_slots * head_.head_dim * static_cast<Index>(sizeof(T)) / panels_;
    for (Index key = 0; key < num_keys; key += keys_per_tile) {
      for (Index byte = key * share / block_slots; byte < (key + keys_per_tile) * share / block_slots; byte += 64) ei::prefetch(next + panel * share + byte);
      const float* tile[keys_per_tile];
      for (Index k = 0; k < keys_per_tile; ++k) tile[k] = keys + std::min(key + k, slots - 1) * head_.head_dim;
      prefill_logits(tile, q_ + panel * head_.head_dim * panel_columns, head_.head_dim, weights + key * panel_columns);
    }
    hide(weights, first, panel, num_keys);

    float* max = max_of(block) + panel * panel_columns;
    const float* max_before = block == 0 ? nullptr : max_of(block - 1) + panel * panel_columns;
    for (Index p = 0; p < panel_packets; ++p) {
      float* column = weights + p * packet_size;
      const Index lane = panel * panel_columns + p * packet_size;
      const Packet before = block == 0 ? ei::pset1<Packet>(hidden) : ei::pload<Packet>(max_before + p * packet_size);
      Packet most = before;
      for (Index key = 0; key < num_keys; ++key) most = ei::pmax(most, ei::pload<Packet>(column + key * panel_columns));
      Packet sum = ei::pset1<Packet>(0.0f);
      for (Index key = 0; key < num_keys; ++key) {
        const Packet weight = exp2_nonpositive(ei::psub(ei::pload<Packet>(column + key * panel_columns), most));
        ei::pstore(column + key * panel_columns, weight);
        sum = ei::padd(sum, weight);
      }
      const Packet correction = exp2_nonpositive(ei::psub(before, most));
      if (block > 0) sum = ei::pmadd(ei::pload<Packet>(total_ + lane), correction, sum);
      ei::pstore(total_ + lane, sum);
      ei::pstore(correction_ + lane, correction);
      ei::pstore(max + p * packet_size, most);
    }
  }
  /// Logits of keys that a column does not see.
  void hide(float* logits, Index first, Index panel, Index num_keys) const {
    for (Index c = 0; c < panel_columns; ++c)
      for (Index key = std::max<Index>(seen_by((panel * panel_columns + c) / head_.group_size) - first, 0); key < num_keys; ++key)
        logits[key * panel_columns + c] = hidden;
  }
  void add_values(Index block, Index first, Index slots) {
    pack_values(first, slots);
    for (Index d = 0; d < value_panels_; ++d)
      for (Index panel = 0; panel < panels_; ++panel) {
        const auto add = [&](Index c, auto width) {
          const Index column = panel * panel_columns + c;
          prefill_values<width>(values_ + d * block_slots * value_panel, weights_of(block, panel) + c, seen(block, panel), correction_ + column,
                                out_ + (column * value_panels_ + d) * value_panel, value_panels_ * value_panel);
        };
        Index c = seen(block, panel) > 0 ? 0 : panel_columns;  // by sixes, but for 4 or 8 columns at the end
        for (; panel_columns - c >= 6 && panel_columns - c != 8; c += 6) add(c, std::integral_constant<Index, 6>{});
        for (; panel_columns - c >= 4; c += 4) add(c, std::integral_constant<Index, 4>{});
        for (; c < panel_columns; c += 2) add(c, std::integral_constant<Index, 2>{});
      }
  }
  /// A block's values as [2 packets of head_dim][slot], zeros past head_dim.
  void pack_values(Index first, Index slots) {
    const Index dim = head_.head_dim;
    for (Index slot = 0; slot < slots; ++slot) {
      const T* from = head_.values + (first + slot) * dim;
      for (Index d = 0; d < value_panels_; ++d) {
        float* to = values_ + (d * block_slots + slot) * value_panel;
        const Index whole = std::min(value_panel, dim - d * value_panel);
        if (whole == value_panel) {
          for (Index p = 0; p < value_packets; ++p) Eigen::internal::pstore(to + p * packet_size, load(from + d * value_panel + p * packet_size));
        } else {
          convert(from + d * value_panel, whole, to);
          std::fill(to + whole, to + value_panel, 0.0f);
        }
      }
    }
  }
  /// What the block's kept weights of a packet of columns must be multiplied by.
  Packet correction(Index block, Index column) const {
    namespace ei = Eigen::internal;
    const Index last = (seen_by_last(column / panel_columns) - 1) / block_slots;
    alignas(64) float inverse[packet_size];  // 0 past the last query
    for (Index c = 0; c < packet_size; ++c) inverse[c] = column + c < queries_ * head_.group_size ? 1.0f / total_[column + c] : 0.0f;
    return ei::pmul(exp2_nonpositive(ei::psub(ei::pload<Packet>(max_of(block) + column), ei::pload<Packet>(max_of(last) + column))),
                    ei::pload<Packet>(inverse));
  }
  /// A packet of slots of a packet of columns, turned so that the lanes run over slots, into its rows.
  void emit(Index block, Index first, Index column, Index begin, Index end, Index heads) {
    namespace ei = Eigen::internal;
    const Index panel = column / panel_columns, key = first - block * block_slots, seen_keys = seen(block, panel);
    const float* from = weights_of(block, panel) + key * panel_columns + column % panel_columns;
    const Packet factor = ei::pload<Packet>(correction_ + column);
    Packet turned[packet_size];
    for (Index k = 0; k < packet_size; ++k)
      turned[k] = key + k < seen_keys ? ei::pmul(factor, ei::pload<Packet>(from + k * panel_columns)) : ei::pset1<Packet>(0.0f);
    transpose(turned);
    const Index count = std::min(packet_size, visible_ - first);
    for (Index c = std::max<Index>(begin - column, 0); c < std::min(packet_size, end - column); ++c) {
      const Index part = (column + c - begin) % heads;
      float* out = rows_ + (column + c - begin) / heads * head_.slots + first;
      Packet sum = turned[c];
      if (part > 0) sum = ei::padd(load_first(out, count), sum);
      if (part == heads - 1 && heads > 1) sum = ei::pmul(sum, ei::pset1<Packet>(1.0f / static_cast<float>(heads)));
      store_first(out, count, sum);
    }
  }

  StoredHead<T> head_;
  Index queries_, visible_, panels_, blocks_, kept_blocks_, value_panels_;
  Keep keep_;
  Scratch scratch_;
  float* q_ = nullptr;           // [panel] (panel_columns, head_dim), scaled; zeros past the last query
  float* keys_ = nullptr;        // (head_dim, block_slots), a block's, unless they are stored as float
  float* values_ = nullptr;      // [value_panel] (value_panel, block_slots)
  float* out_ = nullptr;         // (value_panels * value_panel, columns), not yet divided by total
  float* weights_ = nullptr;     // [kept block][panel] (panel_columns, block_slots)
  float* max_ = nullptr;         // [kept block] (columns) the largest logit up to this block
  float* total_ = nullptr;       // (columns) sum of weights
  float* correction_ = nullptr;  // (columns) for what earlier blocks gave
  float* rows_ = nullptr;        // (slots, queries * group_size)
};

}  // namespace kvsnip::detail
