// What a policy is: the words it is written in, the hooks it may provide, and the concepts that ask for them.
//
// A policy makes one decision: it scores the slots of a kv_head, and the lowest evictable ones go. Everything else
// (protection of sinks and recents, ties, top-k, the eviction queue, moving memory) is SlotPlanner's and KVCache's.
//
//   hook                                               called
//   score(kv_head, slots, out)                         when victims or a kept set must be chosen; higher is kept
//   score_layer(heads, out)                            in its place, of all kv_heads at once, where they depend on each other
//   refine(kv_head, slots, choice, scores)             change scores, knowing how many slots may stay
//   head_budgets(scores, total, out)                   at a compaction: share the layer's budget out between kv_heads
//   head_budget(kv_head, budget) -> Index              default: the cache's, for every kv_head; unlimited_budget is allowed
//   evicts(phase) -> bool                              default: whatever the phase, if there is a score
//   protection(phase) -> Protection                    default: nothing is protected
//   eviction(budget) -> Eviction                       default: one victim at a time
//   wanted_rows(step) -> Index                         default: all queries' rows if there is an observe, else none
//   observe(kv_head, rows)                             attention weights arrived, in order, any number of calls
//   wants_column_sums(step) -> bool                    default: no. Of a prompt: the sum over its queries, instead of rows
//   observe_column_sums(kv_head, sums)                 they arrived, once a prompt update
//   wanted_queries(step) -> Index                      default: none. The last so many queries; on_queries and attend bring them
//   observe_queries(kv_head, queries)                  they arrived, before the step's rows
//   needs_rope() -> bool                               default: no. The cache must be told the model's Rope
//   wants_query_heads() -> bool                        default: no, the rows' mean over the query group is enough
//   reserve(kv_head, num_slots)                        a kv_head will have so many slots: allocate now, so that the hooks
//                                                      below need not (they must not throw)
//   on_insert(kv_head, slot, slots)                    a token entered a slot; state of its predecessor is void
//   on_evict(kv_head, leaving)                         slots have gone, and can still be read; those that stay can be written
//   on_gather(kv_head, kept)                           slots were compacted: new slot i was slot kept[i]
//   on_prompt_end(kv_head)                             a prompt is over, compacted if it had to be: give memory back
//   reset(shape)                                       forget everything; size the state for these heads
//   bytes() -> Index                                   heap bytes of the state
//
// Hooks a policy does not need stay absent. State is per kv_head: hooks of different kv_heads of one step may run on
// different threads. A policy is a value: copying it copies its state (a prompt that is taken back is undone by a
// copy). observe and observe_queries see decode steps only once they can no longer be taken back.
//
// hooks.hpp has the defaults, as functions that call what there is: decorators and SlotPlanner ask those.
#pragma once

#include <Eigen/Core>
#include <concepts>
#include <cstdint>
#include <span>

#include "kvsnip/index.hpp"
#include "kvsnip/rope.hpp"

namespace kvsnip {

/// One attention layer's geometry. query_head h reads kv_head h / group_size().
struct Shape {
  Index query_heads = 0;  ///< a multiple of kv_heads
  Index kv_heads = 0;     ///< >= 1
  Index head_dim = 0;     ///< length of one key, value or query vector, >= 1

  constexpr Index group_size() const { return query_heads / kv_heads; }
  friend bool operator==(const Shape&, const Shape&) = default;
};

/// What an update is.
enum class Phase {
  decode,      ///< one or a few tokens; a full cache evicts before they attend
  prompt,      ///< a prompt that fits the budget: inserted, nothing is chosen
  long_prompt  ///< a prompt that exceeds the budget, or may as more of it follows: attends in full, then is compacted
};

/// An update as a policy sees it before its attention runs.
struct StepInfo {
  Phase phase = Phase::decode;
  Index first_position = 0;  ///< of the first new token; the others follow without a gap
  Index num_queries = 0;     ///< new tokens

  constexpr Index last_position() const { return first_position + num_queries - 1; }
};

/// Slots a policy wants kept whatever their score.
struct Protection {
  Index num_sinks = 0;           ///< first positions of the sequence [tokens]
  Index recent_window = 0;       ///< newest positions [tokens]; the incoming token is one of them
  Index observation_window = 0;  ///< newest positions kept whole when a prompt is compacted [tokens]
  bool keep_prompt = false;      ///< every position of the first prompt is a sink
};

/// How victims leave while decoding: `count` lowest slots are chosen at once, then go one at a time as tokens come
/// (the eviction queue), or all together (`bulk`).
struct Eviction {
  Index count = 1;  ///< victims chosen at once, >= 1; capped at the evictable slots
  bool bulk = false;
};

/// The slots of one kv_head, as score() and on_insert() see them.
class SlotsView {
 public:
  /// Converts one stored key or value column to float.
  using ReadColumn = void (*)(const void* columns, Index head_dim, Index slot, float* out);

  std::span<const Index> positions;  ///< (slots) positions, unique, in any order
  Phase phase = Phase::decode;       ///< what the slots are scored for
  const Rope* rope = nullptr;        ///< the model's; null if the cache was not told

  Index size() const { return static_cast<Index>(positions.size()); }
  /// False when a SlotPlanner is used alone and the engine gave it no memory to read.
  bool has_vectors() const { return read_ != nullptr; }
  Index head_dim() const { return head_dim_; }
  /// The key (after RoPE) in `slot` as float32. @param out (head_dim)
  void read_key(Index slot, std::span<float> out) const { read_(keys_, head_dim_, slot, out.data()); }
  /// The value in `slot` as float32. @param out (head_dim)
  void read_value(Index slot, std::span<float> out) const { read_(values_, head_dim_, slot, out.data()); }

  void set_vectors(const void* keys, const void* values, Index head_dim, ReadColumn read) {
    keys_ = keys, values_ = values, head_dim_ = head_dim, read_ = read;
  }

 private:
  const void* keys_ = nullptr;
  const void* values_ = nullptr;
  Index head_dim_ = 0;
  ReadColumn read_ = nullptr;
};

/// The keys and values of one kv_head that go, and of those that stay, as on_evict() sees them. Columns are float32.
class Leaving {
 public:
  using Read = SlotsView::ReadColumn;
  using Write = void (*)(void* columns, Index head_dim, Index slot, const float* in);
  /// Key and value columns, which lie anywhere.
  struct Columns {
    void* key;
    void* value;
  };

  Leaving(std::span<const Columns> victims, std::span<const Columns> survivors, Index head_dim, Read read_column, Write write_column)
      : victims_(victims), survivors_(survivors), head_dim_(head_dim), read_(read_column), write_(write_column) {}

  Index num_victims() const { return std::ssize(victims_); }
  Index num_survivors() const { return std::ssize(survivors_); }
  Index head_dim() const { return head_dim_; }
  /// @param out  (head_dim)
  void read_victim(Index i, float* key, float* value) const { read(victims_[static_cast<std::size_t>(i)], key, value); }
  void read_survivor(Index i, float* key, float* value) const { read(survivors_[static_cast<std::size_t>(i)], key, value); }
  void write_survivor(Index i, const float* key, const float* value) const {
    write_(survivors_[static_cast<std::size_t>(i)].key, head_dim_, 0, key);
    write_(survivors_[static_cast<std::size_t>(i)].value, head_dim_, 0, value);
  }

 private:
  /// A null pointer: not wanted.
  void read(const Columns& columns, float* key, float* value) const {
    if (key != nullptr) read_(columns.key, head_dim_, 0, key);
    if (value != nullptr) read_(columns.value, head_dim_, 0, value);
  }

  std::span<const Columns> victims_, survivors_;
  Index head_dim_;
  Read read_;
  Write write_;
};

/// Attention weights (post-softmax, float32) of consecutive queries of one kv_head: one contiguous column of weights
/// over the slots per query. A slot that a query cannot see (its token came later) has weight 0.
struct AttentionRows {
  using Weights = Eigen::Map<const Eigen::MatrixXf, 0, Eigen::OuterStride<>>;

  Weights mean;                      ///< (slots, queries), mean over the query group
  Weights per_query_head;            ///< (slots, queries * group_size), a query's heads side by side; may be empty, see above
  Index first_position;              ///< of the first query here; the others follow without a gap
  StepInfo step;                     ///< the update they belong to
  std::span<const Index> positions;  ///< (slots)

  Index num_queries() const { return mean.cols(); }
  /// Slots visible to query j of these rows: all but the tokens of the same update that come after it.
  Index num_visible(Index j) const { return mean.rows() - (step.last_position() - (first_position + j)); }
  /// These rows without the first `count` queries.
  AttentionRows without_first(Index count) const {
    const Index group = num_queries() == 0 ? 0 : per_query_head.cols() / num_queries();
    const Index left = num_queries() - count;
    return {Weights(mean.data() + count * mean.outerStride(), mean.rows(), left, Eigen::OuterStride<>(mean.outerStride())),
            Weights(per_query_head.data() + count * group * per_query_head.outerStride(), per_query_head.rows(),
                    left * group, Eigen::OuterStride<>(per_query_head.outerStride())),
            first_position + count, step, positions};
  }
};

/// What a prompt update's queries together gave each slot of one kv_head: the attention weights summed over the queries,
/// mean over the query group.
struct ColumnSums {
  std::span<const float> sums;       ///< (slots)
  StepInfo step;                     ///< the update they belong to
  std::span<const Index> positions;  ///< (slots)
};

/// Consecutive queries of one kv_head, after RoPE.
struct QueryRows {
  using Columns = Eigen::Map<const Eigen::MatrixXf>;

  Columns queries;       ///< (head_dim, queries * group_size), a query's heads side by side
  Index group_size;
  Index first_position;  ///< of the first query here; the others follow without a gap
  StepInfo step;         ///< the update they belong to
  SlotsView slots;       ///< of a prompt's tokens the last slots, in order

  Index num_queries() const { return queries.cols() / group_size; }
  /// These queries without the first `count`.
  QueryRows without_first(Index count) const {
    const Index skipped = count * group_size;
    return {Columns(queries.data() + skipped * queries.rows(), queries.rows(), queries.cols() - skipped), group_size, first_position + count, step, slots};
  }
};

/// A choice that scores are for: which slots may go, and how many of them may stay.
struct Choice {
  std::span<const Index> candidates;  ///< slots that nothing protects
  Index num_kept = 0;                 ///< of the candidates
};

template <class P>
concept ScoresSlots = requires(P& policy, Index kv_head, const SlotsView& slots, std::span<float> out) {
  policy.score(kv_head, slots, out);
};
template <class P>
concept ScoresLayers = requires(P& policy, std::span<const SlotsView> heads, std::span<const std::span<float>> out) { policy.score_layer(heads, out); };
template <class P>
concept RefinesScores = requires(P& policy, Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) {
  policy.refine(kv_head, slots, choice, scores);
};
template <class P>
concept SharesBudget = requires(P& policy, std::span<const std::span<const float>> scores, Index total, std::span<Index> out) {
  policy.head_budgets(scores, total, out);
};
template <class P>
concept FixesHeadBudgets = requires(const P& policy, Index kv_head, Index budget) {
  { policy.head_budget(kv_head, budget) } -> std::same_as<Index>;
};
template <class P>
concept ObservesQueries = requires(P& policy, Index kv_head, const StepInfo& step, const QueryRows& queries) {
  { policy.wanted_queries(step) } -> std::same_as<Index>;
  policy.observe_queries(kv_head, queries);
};
template <class P>
concept MayNeedRope = requires(const P& policy) {
  { policy.needs_rope() } -> std::same_as<bool>;
};
template <class P>
concept ObservesAttention = requires(P& policy, Index kv_head, const AttentionRows& rows) { policy.observe(kv_head, rows); };
template <class P>
concept ObservesColumnSums = requires(P& policy, Index kv_head, const StepInfo& step, const ColumnSums& sums) {
  { policy.wants_column_sums(step) } -> std::same_as<bool>;
  policy.observe_column_sums(kv_head, sums);
};
template <class P>
concept ChoosesRows = requires(const P& policy, const StepInfo& step) {
  { policy.wanted_rows(step) } -> std::same_as<Index>;
};
template <class P>
concept WantsQueryHeads = requires(const P& policy) {
  { policy.wants_query_heads() } -> std::same_as<bool>;
};
template <class P>
concept ChoosesPhases = requires(const P& policy, Phase phase) {
  { policy.evicts(phase) } -> std::same_as<bool>;
};
template <class P>
concept ProtectsSlots = requires(const P& policy, Phase phase) {
  { policy.protection(phase) } -> std::same_as<Protection>;
};
template <class P>
concept ChoosesEviction = requires(const P& policy, Index budget) {
  { policy.eviction(budget) } -> std::same_as<Eviction>;
};
template <class P>
concept ReservesState = requires(P& policy, Index kv_head, Index num_slots) { policy.reserve(kv_head, num_slots); };
template <class P>
concept TracksInserts = requires(P& policy, Index kv_head, Index slot, const SlotsView& slots) {
  policy.on_insert(kv_head, slot, slots);
};
template <class P>
concept HandlesEvictions = requires(P& policy, Index kv_head, const Leaving& leaving) { policy.on_evict(kv_head, leaving); };
template <class P>
concept TracksGathers = requires(P& policy, Index kv_head, std::span<const Index> kept) { policy.on_gather(kv_head, kept); };
template <class P>
concept TracksPrompts = requires(P& policy, Index kv_head) { policy.on_prompt_end(kv_head); };
template <class P>
concept HasReset = requires(P& policy, const Shape& shape) { policy.reset(shape); };
template <class P>
concept CountsBytes = requires(const P& policy) {
  { policy.bytes() } -> std::same_as<Index>;
};

/// A policy: copyable, and one that remembers attention can forget it.
template <class P>
concept Policy = std::copyable<P> && (!(ObservesAttention<P> || ObservesColumnSums<P> || ObservesQueries<P>) || HasReset<P>) && (!ChoosesRows<P> || ObservesAttention<P>);

}  // namespace kvsnip
