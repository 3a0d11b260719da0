// What a policy is: the words it is written in, the hooks it may provide, and the concepts that ask for them.
//
// A policy makes one decision: it scores the slots of a kv_head, and the lowest evictable ones go. Everything else
// (protection of sinks and recents, ties, top-k, the eviction queue, moving memory) is SlotPlanner's and KVCache's.
//
//   hook                                               called
//   score(kv_head, slots, out)                         when victims or a kept set must be chosen; higher is kept
//   evicts(phase) -> bool                              default: whatever the phase, if there is a score
//   protection(phase) -> Protection                    default: nothing is protected
//   eviction(budget) -> Eviction                       default: one victim at a time
//   wanted_rows(step) -> Index                         default: all queries' rows if there is an observe, else none
//   observe(kv_head, rows)                             attention weights arrived, in order, any number of calls
//   wants_column_sums(step) -> bool                    default: no. Of a prompt: the sum over its queries, instead of rows
//   observe_column_sums(kv_head, sums)                 they arrived, once a prompt update
//   wants_query_heads() -> bool                        default: no, the rows' mean over the query group is enough
//   reserve(kv_head, num_slots)                        a kv_head will have so many slots: allocate now, so that the hooks
//                                                      below need not (they must not throw)
//   on_insert(kv_head, slot, slots)                    a token entered a slot; state of its predecessor is void
//   on_gather(kv_head, kept)                           slots were compacted: new slot i was slot kept[i]
//   on_prompt_end(kv_head)                             a prompt is over, compacted if it had to be: give memory back
//   reset(shape)                                       forget everything; size the state for these heads
//   bytes() -> Index                                   heap bytes of the state
//
// Hooks a policy does not need stay absent. State is per kv_head: hooks of different kv_heads of one step may run on
// different threads. A policy is a value: copying it copies its state (a prompt that is taken back is undone by a
// copy). observe sees decode steps only once they can no longer be taken back.
#pragma once

#include <Eigen/Core>
#include <concepts>
#include <cstdint>
#include <span>

namespace kvsnip {

/// All sizes, counts, slots and positions; 64-bit.
using Index = Eigen::Index;
static_assert(sizeof(Index) == 8, "kvsnip needs 64-bit sizes: do not set EIGEN_DEFAULT_DENSE_INDEX_TYPE to less");

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

template <class P>
concept ScoresSlots = requires(P& policy, Index kv_head, const SlotsView& slots, std::span<float> out) {
  policy.score(kv_head, slots, out);
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
concept Policy = std::copyable<P> && (!(ObservesAttention<P> || ObservesColumnSums<P>) || HasReset<P>) && (!ChoosesRows<P> || ObservesAttention<P>);

namespace hooks {

/// A member with a hook's name but another signature would silently be no hook: say so.
template <class P>
consteval bool all_recognised() {
  static_assert(!requires { &P::score; } || ScoresSlots<P>, "a hook must be: score(Index, const SlotsView&, std::span<float>)");
  static_assert(!requires { &P::observe; } || ObservesAttention<P>, "a hook must be: observe(Index, const AttentionRows&)");
  static_assert(!requires { &P::wants_column_sums; } || ObservesColumnSums<P>, "hooks must be: bool wants_column_sums(const StepInfo&) const, and observe_column_sums(Index, const ColumnSums&)");
  static_assert(!requires { &P::observe_column_sums; } || ObservesColumnSums<P>, "a hook needs another: bool wants_column_sums(const StepInfo&) const");
  static_assert(!requires { &P::wanted_rows; } || ChoosesRows<P>, "a hook must be: Index wanted_rows(const StepInfo&) const");
  static_assert(!requires { &P::wants_query_heads; } || WantsQueryHeads<P>, "a hook must be: bool wants_query_heads() const");
  static_assert(!requires { &P::evicts; } || ChoosesPhases<P>, "a hook must be: bool evicts(Phase) const");
  static_assert(!requires { &P::protection; } || ProtectsSlots<P>, "a hook must be: Protection protection(Phase) const");
  static_assert(!requires { &P::eviction; } || ChoosesEviction<P>, "a hook must be: Eviction eviction(Index) const");
  static_assert(!requires { &P::reserve; } || ReservesState<P>, "a hook must be: reserve(Index, Index)");
  static_assert(!requires { &P::on_insert; } || TracksInserts<P>, "a hook must be: on_insert(Index, Index, const SlotsView&)");
  static_assert(!requires { &P::on_gather; } || TracksGathers<P>, "a hook must be: on_gather(Index, std::span<const Index>)");
  static_assert(!requires { &P::on_prompt_end; } || TracksPrompts<P>, "a hook must be: on_prompt_end(Index)");
  static_assert(!requires { &P::reset; } || HasReset<P>, "a hook must be: reset(const Shape&)");
  static_assert(!requires { &P::bytes; } || CountsBytes<P>, "a hook must be: Index bytes() const");
  return true;
}

}  // namespace hooks

/// The hooks' defaults, so that callers need not ask. A policy with no score evicts nothing.
namespace hooks {

template <Policy P>
bool evicts(const P& policy, Phase phase) {
  if constexpr (ChoosesPhases<P>) return policy.evicts(phase);
  else return ScoresSlots<P>;
}
template <Policy P>
Protection protection(const P& policy, Phase phase) {
  if constexpr (ProtectsSlots<P>) return policy.protection(phase);
  else return {};
}
template <Policy P>
Eviction eviction(const P& policy, Index budget) {
  if constexpr (ChoosesEviction<P>) return policy.eviction(budget);
  else return {};
}
template <Policy P>
Index wanted_rows(const P& policy, const StepInfo& step) {
  if constexpr (ChoosesRows<P>) return policy.wanted_rows(step);
  else return ObservesAttention<P> ? step.num_queries : 0;
}
template <Policy P>
bool wants_column_sums(const P& policy, const StepInfo& step) {
  if constexpr (ObservesColumnSums<P>) return step.phase != Phase::decode && step.num_queries > 0 && policy.wants_column_sums(step);
  else return false;
}
template <Policy P>
void observe_column_sums(P& policy, Index kv_head, const ColumnSums& sums) {
  if constexpr (ObservesColumnSums<P>) policy.observe_column_sums(kv_head, sums);
}
template <Policy P>
bool wants_query_heads(const P& policy) {
  if constexpr (WantsQueryHeads<P>) return policy.wants_query_heads();
  else return false;
}
template <Policy P>
void score(P& policy, Index kv_head, const SlotsView& slots, std::span<float> out) {
  if constexpr (ScoresSlots<P>) policy.score(kv_head, slots, out);
}
template <Policy P>
void observe(P& policy, Index kv_head, const AttentionRows& rows) {
  if constexpr (ObservesAttention<P>) policy.observe(kv_head, rows);
}
template <Policy P>
void reserve(P& policy, Index kv_head, Index num_slots) {
  if constexpr (ReservesState<P>) policy.reserve(kv_head, num_slots);
}
template <Policy P>
void on_insert(P& policy, Index kv_head, Index slot, const SlotsView& slots) {
  if constexpr (TracksInserts<P>) policy.on_insert(kv_head, slot, slots);
}
template <Policy P>
void on_gather(P& policy, Index kv_head, std::span<const Index> kept) {
  if constexpr (TracksGathers<P>) policy.on_gather(kv_head, kept);
}
template <Policy P>
void on_prompt_end(P& policy, Index kv_head) {
  if constexpr (TracksPrompts<P>) policy.on_prompt_end(kv_head);
}
template <Policy P>
void reset(P& policy, const Shape& shape) {
  if constexpr (HasReset<P>) policy.reset(shape);
}
template <Policy P>
Index bytes(const P& policy) {
  if constexpr (CountsBytes<P>) return policy.bytes();
  else return 0;
}

}  // namespace hooks
}  // namespace kvsnip
