// The kernels over a step: which one, in which tiles, on which threads, and what the policy gets of their weights.
#pragma once

#include <algorithm>
#include <vector>

#include "kvsnip/detail/decode_kernel.hpp"
#include "kvsnip/detail/prefill_kernel.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

// Queries of a tile. They bound the weights in memory where all of a row's are kept.
inline constexpr Index decode_tile_queries = 32;
inline Index prefill_tile_queries(Index group_size) { return std::max<Index>(12 * panel_columns / group_size, 1); }
inline Index kept_tile_queries(Index group_size) { return std::max<Index>(4 * panel_columns / group_size, 1); }

template <class Step>
StoredHead<typename Step::Scalar> stored_head(const Step& step, Index kv_head) {
  return {step.keys(kv_head).data(), step.values(kv_head).data(), step.size(kv_head), step.shape().head_dim, step.shape().group_size()};
}

/// Whether the prefill kernel serves the step: its queries are many, and in the last slots in order. What is wanted of them
/// does not matter: the outputs are the same bits whatever the policy, and so are weights from attend and from on_queries.
template <class Step>
bool is_prefill(const Step& step) {
  const Index queries = step.num_queries();
  if (queries * step.shape().group_size() <= panel_columns / 2) return false;
  for (Index h = 0; h < step.shape().kv_heads; ++h)
    for (Index j = 1; j <= queries; ++j)
      if (step.new_slots(h)[static_cast<std::size_t>(queries - j)] != step.size(h) - j) return false;
  return true;
}

/// A tile's rows from `first` on: to the policy, averaged over the group if that is all it looks at.
template <class Step, class Tile>
void hand_over(Step& step, Index kv_head, Tile&& tile, Index first, Index queries) {
  if (step.wants_query_heads()) step.accept(kv_head, tile.rows(first, false), (queries - first) * step.shape().group_size());
  else step.accept_mean(kv_head, tile.rows(first, true), queries - first);
}
/// Likewise of a prompt's only tile, and then the sums over all of its rows.
template <class Step, class Tile>
void hand_over_sums(Step& step, Index kv_head, Tile&& tile, Index first, Index queries) {
  const bool mean = !step.wants_query_heads();
  const Index slots = step.size(kv_head), columns = mean ? 1 : step.shape().group_size();
  const float* rows = tile.rows(0, mean);
  const Eigen::VectorXf sums = Eigen::Map<const Eigen::MatrixXf>(rows, slots, queries * columns).rowwise().sum() / static_cast<float>(columns);
  if (first < queries && mean) step.accept_mean(kv_head, rows + first * slots, queries - first);
  else if (first < queries) step.accept(kv_head, rows + first * columns * slots, (queries - first) * columns);
  step.accept_column_sums(kv_head, sums.data());
}

/// A tile of a prompt's queries [first, first + count). @param set_query  (tile, j, query) gives it query `query` as its j-th
template <class Step, class SetQuery>
PrefillTile<typename Step::Scalar> run_tile(const Step& step, const StoredHead<typename Step::Scalar>& head, Index first, Index count, Keep keep,
                                            SetQuery set_query) {
  PrefillTile<typename Step::Scalar> tile(head, count, head.slots - (step.num_queries() - first - count), keep);
  for (Index j = 0; j < count; ++j) set_query(tile, j, first + j);
  tile.run();
  return tile;
}

/// What the policy wants of one kv_head of a prompt, in order; ends the head. @param use  (tile, first, count) takes outputs
template <class Step, class SetQuery, class Use>
void run_wanted_tiles(Step& step, Index kv_head, const StoredHead<typename Step::Scalar>& head, SetQuery set_query, Use use) {
  const Index queries = step.num_queries(), first_wanted = queries - step.wanted_rows(), tile_queries = kept_tile_queries(head.group_size);
  const bool sums = step.wants_column_sums();
  std::vector<float> column_sums(sums ? static_cast<std::size_t>(head.slots) : 0);
  for (Index first = sums ? 0 : first_wanted; first < queries; first += tile_queries) {
    const Index count = std::min(tile_queries, queries - first), unwanted = std::max<Index>(first_wanted - first, 0);
    auto tile = run_tile(step, head, first, count, unwanted < count ? Keep::rows : Keep::sums, set_query);
    use(tile, first, count);
    if (sums) tile.add_column_sums(column_sums.data());
    if (unwanted < count) hand_over(step, kv_head, tile, unwanted, count);
  }
  if (sums) step.accept_column_sums(kv_head, column_sums.data());
}

/// Many new tokens. Tiles of which the policy wants nothing run at once; the others follow in order, a kv_head each.
template <class Step, class Q, class Out, class ParallelFor>
void attend_prompt(Step& step, const Q& q, Out& out, ParallelFor& parallel_for, bool end_heads) {
  const Shape shape = step.shape();
  const Index queries = step.num_queries(), rows = shape.group_size() * shape.head_dim;
  const Index free = !end_heads ? queries : step.wants_column_sums() ? 0 : queries - step.wanted_rows();
  const auto set_query_of = [&](Index h) {
    return [&, h](auto& tile, Index j, Index query) { tile.set_query(j, q.col(query).data() + h * rows, shape.head_dim); };
  };
  const auto take_outputs = [&](Index h, const auto& tile, Index first, Index count) {
    for (Index j = 0; j < count; ++j) tile.output(j, out.col(first + j).data() + h * rows);
  };
  const Index tile_queries = prefill_tile_queries(shape.group_size()), tiles = (free + tile_queries - 1) / tile_queries;
  if (free > 0) parallel_for(shape.kv_heads * tiles, [&](Index i) {
    const Index h = i % shape.kv_heads, first = (tiles - 1 - i / shape.kv_heads) * tile_queries;  // the longest first
    const Index count = std::min(tile_queries, free - first);
    take_outputs(h, run_tile(step, stored_head(step, h), first, count, Keep::nothing, set_query_of(h)), first, count);
  });
  if (free < queries)
    parallel_for(shape.kv_heads, [&](Index h) {
      run_wanted_tiles(step, h, stored_head(step, h), set_query_of(h), [&](const auto& tile, Index first, Index count) { take_outputs(h, tile, first, count); });
    });
}

/// A few new tokens, wherever their slots are: all kv_heads, and all parts of their slots, at once.
template <class Step, class Q, class Out, class ParallelFor>
void attend_tokens(Step& step, const Q& q, Out& out, ParallelFor& parallel_for, bool end_heads) {
  using Tile = DecodeTile<typename Step::Scalar>;
  const Shape shape = step.shape();
  const Index queries = step.num_queries(), first_wanted = queries - step.wanted_rows(), rows = shape.group_size() * shape.head_dim;
  const bool wants_sums = step.wants_column_sums();  // of a prompt so short that one tile has it
  for (Index first = 0; first < queries; first += decode_tile_queries) {
    const Index count = std::min(decode_tile_queries, queries - first);
    Index size = 0, parts = 1;
    for (Index h = 0; h < shape.kv_heads; ++h) {
      size = std::max(size, Tile::scratch_size(stored_head(step, h), count));
      parts = std::max(parts, Tile::num_parts(step.size(h)));
    }
    Scratch scratch(size * shape.kv_heads);
    const auto tile = [&](Index h) {
      return Tile(stored_head(step, h), count, step.new_slots(h).subspan(static_cast<std::size_t>(first + 1)), scratch.data() + h * size);
    };
    const auto begin = [&](Index h) {
      for (Index j = 0; j < count; ++j) tile(h).set_query(j, q.col(first + j).data() + h * rows, shape.head_dim);
    };
    const auto run = [&](Index h, Index part) {
      if (part < Tile::num_parts(step.size(h))) tile(h).run(part);
    };
    const auto end = [&](Index h) {
      tile(h).merge();
      for (Index j = 0; j < count; ++j) tile(h).output(j, out.col(first + j).data() + h * rows);
      const Index unwanted = std::max<Index>(first_wanted - first, 0);  // of this tile
      if (end_heads && wants_sums) hand_over_sums(step, h, tile(h), unwanted, count);
      else if (end_heads && unwanted < count) hand_over(step, h, tile(h), unwanted, count);
    };
    if (parts == 1) {
      parallel_for(shape.kv_heads, [&](Index h) { begin(h), run(h, 0), end(h); });
    } else {
      for (Index h = 0; h < shape.kv_heads; ++h) begin(h);
      parallel_for(shape.kv_heads * parts, [&](Index i) { run(i / parts, i % parts); });
      parallel_for(shape.kv_heads, end);
    }
  }
}

/// The queries that the policy wants, head by head.
template <class Step, class Q, class ParallelFor>
void hand_over_queries(Step& step, const Q& q, ParallelFor& parallel_for) {
  const Index wanted = step.wanted_queries(), dim = step.shape().head_dim, group = step.shape().group_size();
  if (wanted == 0) return;
  parallel_for(step.shape().kv_heads, [&](Index h) {
    Eigen::MatrixXf queries(dim, wanted * group);
    for (Index j = 0; j < wanted; ++j)
      queries.middleCols(j * group, group) = Eigen::Map<const Eigen::MatrixXf>(q.col(q.cols() - wanted + j).data() + h * group * dim, dim, group);
    step.accept_queries(h, queries.data(), wanted);
  });
}

/// @param end_heads  tell the policy; false leaves the step as it is, so that the kernels alone can be measured
template <class Step, class Q, class Out, class ParallelFor>
void attend_step(Step step, const Q& q, Out& out, ParallelFor& parallel_for, bool end_heads = true) {
  const bool wants_nothing = step.wanted_rows() == 0 && !step.wants_column_sums();
  if (end_heads) hand_over_queries(step, q, parallel_for);
  if (is_prefill(step)) attend_prompt(step, q, out, parallel_for, end_heads);
  else attend_tokens(step, q, out, parallel_for, end_heads);
  for (Index h = 0; end_heads && wants_nothing && h < step.shape().kv_heads; ++h) step.done(h);
}

/// The wanted weights of one kv_head from its queries and keys alone; ends the head.
/// @param q  (head_dim, queries * group_size): all of the step's queries if column sums are wanted, else the last wanted_rows()
template <class Step, class Q>
void weigh_queries(Step& step, Index kv_head, const Q& q) {
  const Index group = step.shape().group_size(), queries = q.cols() / group, end = step.num_queries(), first_query = end - queries;
  StoredHead<typename Step::Scalar> head = stored_head(step, kv_head);
  head.values = nullptr;
  const auto set_query = [&](auto& tile, Index j, Index query) { tile.set_query(j, q.col((query - first_query) * group).data(), q.outerStride()); };
  if (is_prefill(step)) return run_wanted_tiles(step, kv_head, head, set_query, [](const auto&...) {});
  for (Index first = first_query; first < end; first += decode_tile_queries) {
    const Index count = std::min(decode_tile_queries, end - first);
    Scratch scratch(DecodeTile<typename Step::Scalar>::scratch_size(head, count));
    DecodeTile<typename Step::Scalar> tile(head, count, step.new_slots(kv_head).subspan(static_cast<std::size_t>(first + 1)), scratch.data());
    for (Index j = 0; j < count; ++j) set_query(tile, j, first + j);
    for (Index part = 0; part < tile.num_parts(head.slots); ++part) tile.run(part);
    tile.merge();
    if (step.wants_column_sums()) return hand_over_sums(step, kv_head, tile, end - step.wanted_rows(), count);
    hand_over(step, kv_head, tile, 0, count);
  }
}

}  // namespace kvsnip::detail
