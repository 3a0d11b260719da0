// KVCache<T, Policy>: one layer's keys and values of one sequence, cut to a budget by a policy. Read this page first.
//
//   auto step = cache.update(k, v);      append; a full cache evicts here, before the new token attends
//   attend(step, q, out);                our kernel (attention.hpp): attends, then calls back
//
// or, with the engine's own kernel, for every kv_head: read step.keys(h) and step.values(h), attend, then tell the policy
// with step.on_attention(h, weights), or step.on_queries(h, q) if the kernel yields no weights, or step.done(h) if
// nothing is wanted. The last head's call ends the step; an over-long prompt is compacted there.
//
// Memory: per kv_head one contiguous (head_dim, capacity) block of keys and one of values, 64-byte aligned, column-major:
// a slot is one contiguous column. No global state: different caches, and different kv_heads of one step, may be used
// from different threads. A cache is a value: copy it between steps; do not move it while a step is open.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/detail/convert.hpp"
#include "kvsnip/detail/step_attention.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"
#include "kvsnip/slot_planner.hpp"

namespace kvsnip {

/// What a cache can store.
template <class T>
concept StorageScalar = std::same_as<T, float> || std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

/// Heap bytes of a cache, exactly what is allocated.
struct Bytes {
  Index keys = 0, values = 0;
  Index positions = 0;  ///< which position is in which slot, and the eviction queue
  Index policy = 0;     ///< the policy's state
  Index scratch = 0;
  constexpr Index total() const { return keys + values + positions + policy + scratch; }
  constexpr Bytes& operator+=(const Bytes& other) {
    keys += other.keys, values += other.values, positions += other.positions, policy += other.policy, scratch += other.scratch;
    return *this;
  }
};

template <StorageScalar T, Policy P>
class KVCache {
 public:
  using Scalar = T;
  using Matrix = Eigen::Matrix<T, Eigen::Dynamic, Eigen::Dynamic>;
  using ConstColumns = Eigen::Map<const Matrix>;
  class Step;

  /// @param budget  slots a kv_head may keep, sinks and windows included [tokens]; >= 1
  /// @param rope    the model's, for policies that look at keys or queries as they were before it
  /// @throws std::invalid_argument  bad shape, a budget that cannot hold what the policy protects, a Rope that is missing
  KVCache(const Shape& shape, Index budget, P policy = P{}, Rope rope = {})
      : planner_(shape, budget, std::move(policy), std::move(rope)), memory_(static_cast<std::size_t>(shape.kv_heads)) {}

  KVCache(const KVCache&) = default;
  KVCache(KVCache&&) noexcept = default;
  KVCache& operator=(const KVCache& other) { return *this = KVCache(other); }
  KVCache& operator=(KVCache&&) noexcept = default;
  ~KVCache() = default;

  /// Append tokens: kv_head h's keys (after RoPE) and values are in rows [h * head_dim, (h + 1) * head_dim), one column
  /// per token. Float input is converted to T. Columns must be contiguous, or Eigen makes a copy. No column at all is
  /// allowed and closes a `more` series.
  /// @throws std::invalid_argument  shapes; positions that go back; a value that is not finite or above what T (and
  ///                                float products) can hold; a kept prompt that leaves no room. The cache is unchanged.
  /// @throws std::logic_error       the previous step still waits for a callback
  Step update(const Eigen::Ref<const Eigen::MatrixXf>& k, const Eigen::Ref<const Eigen::MatrixXf>& v, const UpdateOptions& options = {}) {
    return append(k, v, options);
  }
  Step update(const Eigen::Ref<const Matrix>& k, const Eigen::Ref<const Matrix>& v, const UpdateOptions& options = {})
    requires(!std::same_as<T, float>)
  {
    return append(k, v, options);
  }
  /// Forget the sequence; options and memory stay. A step that is open becomes stale.
  void reset() { planner_.reset(); }

  const Shape& shape() const { return planner_.shape(); }
  Index budget() const { return planner_.budget(); }
  /// What this kv_head may keep: budget(), unless the policy shares it out unevenly; unlimited_budget if it may grow.
  Index budget(Index kv_head) const { return planner_.budget(kv_head); }
  const P& policy() const { return planner_.policy(); }
  /// Tokens appended since the last reset, whatever became of them.
  Index tokens_seen() const { return planner_.tokens_seen(); }
  /// Where the sequence ended: the default position of the next token.
  Index next_position() const { return planner_.next_position(); }
  /// Slots in use, and allocated.
  Index size(Index kv_head) const { return planner_.size(kv_head); }
  Index capacity(Index kv_head) const { return checked_memory(kv_head).keys.size() / shape().head_dim; }
  /// Positions by slot: ascending after a compaction, in no particular order once tokens were overwritten.
  std::span<const Index> positions(Index kv_head) const { return planner_.positions(kv_head); }
  /// (head_dim, size); valid until the next update or the end of its step.
  ConstColumns keys(Index kv_head) const { return ConstColumns(checked_memory(kv_head).keys.data(), shape().head_dim, size(kv_head)); }
  ConstColumns values(Index kv_head) const { return ConstColumns(checked_memory(kv_head).values.data(), shape().head_dim, size(kv_head)); }

  Bytes bytes() const {
    Bytes bytes{.positions = planner_.position_bytes() + detail::heap_bytes(memory_), .policy = planner_.policy_bytes(), .scratch = planner_.scratch_bytes()};
    for (const Memory& m : memory_) {
      bytes.keys += m.keys.bytes(), bytes.values += m.values.bytes();
      bytes.scratch += detail::heap_bytes(m.displaced) + detail::heap_bytes(m.victims) + detail::heap_bytes(m.survivors);
    }
    return bytes;
  }

 private:
  struct Memory {
    detail::AlignedArray<T> keys, values;  // (head_dim, capacity)
    std::vector<T> displaced;              // (head_dim, 2 * overwritten): keys and values that the open step overwrote
    std::vector<Leaving::Columns> victims, survivors;  // of the open step, for on_evict
  };
  /// Takes the plan back unless the update got through.
  struct Rollback {
    SlotPlanner<P>* planner;
    ~Rollback() {
      if (planner != nullptr) planner->abandon();
    }
  };

  Memory& memory(Index kv_head) { return memory_[static_cast<std::size_t>(kv_head)]; }
  const Memory& memory(Index kv_head) const { return memory_[static_cast<std::size_t>(kv_head)]; }

  const Memory& checked_memory(Index kv_head) const {
    (void)planner_.size(kv_head);
    return memory(kv_head);
  }

  template <class Input>
  Step append(const Input& k, const Input& v, const UpdateOptions& options) {
    for (Index h = 0; h < shape().kv_heads; ++h) prefetch(h);
    check(k, v, options);
    publish_vectors();
    planner_.plan(k.cols(), options);
    Rollback rollback{&planner_};
    for (Index h = 0; h < shape().kv_heads; ++h) {
      reserve(h);
      memory(h).displaced.resize(static_cast<std::size_t>(2 * shape().head_dim * num_overwritten(h)));
      if (planner_.handles_evictions()) memory(h).victims.reserve(slots_touched(h)), memory(h).survivors.reserve(slots_touched(h));
    }
    rollback.planner = nullptr;  // nothing below throws
    publish_vectors();
    for (Index h = 0; h < shape().kv_heads; ++h) write(h, k, v);
    return Step(*this, planner_.step_id());
  }
  /// Ask for what the next token will touch if nothing goes: the other layers have pushed it out of the caches, and it had
  /// better come all at once.
  void prefetch(Index kv_head) const {
    const Index slot = size(kv_head), dim = shape().head_dim;
    Eigen::internal::prefetch(planner_.positions(kv_head).data() + slot);
    Eigen::internal::prefetch(planner_.new_slots(kv_head).data());
    if (slot == capacity(kv_head)) return;
    for (Index d = 0; d < dim; d += 64 / static_cast<Index>(sizeof(T)))
      for (const auto* columns : {&memory(kv_head).keys, &memory(kv_head).values}) Eigen::internal::prefetch(columns->data() + slot * dim + d);
  }
  template <class Input>
  void check(const Input& k, const Input& v, const UpdateOptions& options) const {
    const Index rows = shape().kv_heads * shape().head_dim;
    detail::require(k.rows() == rows, "update: k must have kv_heads * head_dim = ", rows, " rows, got ", k.rows());
    detail::require(v.rows() == rows, "update: v must have kv_heads * head_dim = ", rows, " rows, got ", v.rows());
    detail::require(k.cols() == v.cols(), "update: k and v must have one column per token, got ", k.cols(), " and ", v.cols());
    const Index first = options.first_position >= 0 ? std::min(options.first_position, unlimited_budget) : planner_.next_position();
    for (Index t = 0; t < k.cols(); ++t) {
      check_column(k.col(t).data(), rows, first + t, "k");
      check_column(v.col(t).data(), rows, first + t, "v");
    }
  }
  template <class S>
  void check_column(const S* column, Index rows, Index position, const char* name) const {
    if (detail::all_within(column, rows, detail::max_magnitude<T>())) [[likely]]
      return;
    Index row = 0;
    while (detail::all_within(column + row, 1, detail::max_magnitude<T>())) ++row;
    detail::fail<std::invalid_argument>("update: ", name, " must be finite and at most ", detail::max_magnitude<T>(), " in magnitude, got ",
                                        static_cast<float>(column[row]), " for kv_head ", row / shape().head_dim, ", position ", position);
  }
  void publish_vectors() {
    for (Index h = 0; h < shape().kv_heads; ++h)
      planner_.set_vectors(h, memory(h).keys.data(), memory(h).values.data(), &detail::read_column<T>);
  }
  /// Slots that hold what the open step must be able to bring back.
  Index num_overwritten(Index kv_head) const {
    Index n = 0;
    for (const Index slot : planner_.new_slots(kv_head)) n += slot < planner_.old_size(kv_head);
    return n;
  }
  std::size_t slots_touched(Index kv_head) const { return static_cast<std::size_t>(std::max(size(kv_head), planner_.old_size(kv_head))); }
  /// Room for the planned slots. Geometric, and not past the budget unless the slots are.
  void reserve(Index kv_head) {
    const Index wanted = size(kv_head), now = capacity(kv_head);
    if (wanted <= now) return;
    const Index limit = hooks::evicts(policy(), Phase::decode) && wanted <= budget(kv_head) ? budget(kv_head) : unlimited_budget;
    Memory& m = memory(kv_head);
    const Index elements = std::max(wanted, std::min(limit, now + now / 2)) * shape().head_dim;
    detail::AlignedArray<T> keys(elements), values(elements);
    std::copy_n(m.keys.data(), planner_.old_size(kv_head) * shape().head_dim, keys.data());
    std::copy_n(m.values.data(), planner_.old_size(kv_head) * shape().head_dim, values.data());
    m.keys.swap(keys), m.values.swap(values);
  }
  template <class Input>
  void write(Index kv_head, const Input& k, const Input& v) {
    const Index dim = shape().head_dim;
    Memory& m = memory(kv_head);
    detail::permute_columns(m.keys.data(), dim, planner_.order(kv_head));
    detail::permute_columns(m.values.data(), dim, planner_.order(kv_head));
    T* displaced = m.displaced.data();
    Index t = 0;
    for (const Index slot : planner_.new_slots(kv_head)) {
      if (slot < planner_.old_size(kv_head)) {
        displaced = std::copy_n(m.keys.data() + slot * dim, dim, displaced);
        displaced = std::copy_n(m.values.data() + slot * dim, dim, displaced);
      }
      detail::convert(k.col(t).data() + kv_head * dim, dim, m.keys.data() + slot * dim);
      detail::convert(v.col(t).data() + kv_head * dim, dim, m.values.data() + slot * dim);
      ++t;
    }
  }
  void take_back(Index kv_head) {
    const Index dim = shape().head_dim;
    Memory& m = memory(kv_head);
    const T* displaced = m.displaced.data();
    for (const Index slot : planner_.new_slots(kv_head)) {
      if (slot >= planner_.old_size(kv_head)) continue;
      std::copy_n(displaced, dim, m.keys.data() + slot * dim);
      std::copy_n(displaced + dim, dim, m.values.data() + slot * dim);
      displaced += 2 * dim;
    }
    detail::unpermute_columns(m.keys.data(), dim, planner_.order(kv_head));
    detail::unpermute_columns(m.values.data(), dim, planner_.order(kv_head));
  }
  /// The last head of the step has ended. All that may throw comes before anything changes.
  void finish() {
    planner_.choose_kept();
    std::vector<Memory> compacted(planner_.compacts() ? memory_.size() : 0);
    for (std::size_t h = 0; h < compacted.size(); ++h) gather(static_cast<Index>(h), compacted[h]);
    for (Index h = 0; h < shape().kv_heads && planner_.handles_evictions(); ++h)
      show_evicted(h, planner_.kept(h).empty() ? memory(h) : compacted[static_cast<std::size_t>(h)]);
    planner_.commit();
    for (std::size_t h = 0; h < compacted.size(); ++h)
      if (compacted[h].keys.size() > 0) std::swap(memory_[h], compacted[h]);
  }
  /// What the planner keeps of a head; nothing if that is all.
  void gather(Index kv_head, Memory& out) const {
    const std::span<const Index> kept = planner_.kept(kv_head);
    if (kept.empty()) return;
    const Index dim = shape().head_dim;
    const Memory& m = memory(kv_head);
    const Index capacity = planner_.next_budget(kv_head);
    out.keys = detail::AlignedArray<T>(capacity * dim), out.values = detail::AlignedArray<T>(capacity * dim);
    for (Index i = 0; i < static_cast<Index>(kept.size()); ++i) {
      const Index slot = kept[static_cast<std::size_t>(i)];
      std::copy_n(m.keys.data() + slot * dim, dim, out.keys.data() + i * dim);
      std::copy_n(m.values.data() + slot * dim, dim, out.values.data() + i * dim);
    }
  }

  /// What goes and what stays, to the policy. @param survivors  where those are: a compaction has moved them already
  void show_evicted(Index kv_head, Memory& survivors) {
    const Index dim = shape().head_dim, old_size = planner_.old_size(kv_head);
    const std::span<const Index> kept = planner_.kept(kv_head), new_slots = planner_.new_slots(kv_head), order = planner_.order(kv_head);
    Memory& m = memory(kv_head);
    const auto columns = [dim](Memory& of, Index slot) { return Leaving::Columns{of.keys.data() + slot * dim, of.values.data() + slot * dim}; };
    m.victims.clear(), m.survivors.clear();
    if (!kept.empty()) {
      for (Index i = 0; i < std::ssize(kept); ++i) m.survivors.push_back(columns(survivors, i));
      std::vector<bool> stays(slots_touched(kv_head));
      for (const Index slot : kept) stays[static_cast<std::size_t>(slot)] = true;
      for (Index slot = 0; slot < size(kv_head); ++slot)
        if (!stays[static_cast<std::size_t>(slot)]) m.victims.push_back(columns(m, slot));
    } else {
      T* displaced = m.displaced.data();
      for (const Index slot : new_slots)
        if (slot < old_size) m.victims.push_back({displaced, displaced + dim}), displaced += 2 * dim;
      const Index num_kept = order.empty() ? old_size : new_slots.empty() ? std::ssize(order) : new_slots.front();  // a bulk drop leaves these
      for (Index slot = num_kept + (order.empty() ? 0 : std::ssize(m.victims)); slot < old_size; ++slot) m.victims.push_back(columns(m, slot));
      for (Index slot = 0; slot < num_kept; ++slot)
        if (std::find(new_slots.begin(), new_slots.end(), slot) == new_slots.end()) m.survivors.push_back(columns(survivors, slot));
    }
    if (!m.victims.empty()) planner_.on_evict(kv_head, Leaving(m.victims, m.survivors, dim, &detail::read_column<T>, &detail::write_column<T>));
  }

  SlotPlanner<P> planner_;
  std::vector<Memory> memory_;
};

/// What to attend to after an update, and the attention callback. A cheap handle; the views it gives are valid until the
/// step's last head has ended (or, if nothing is wanted, until the next update).
template <StorageScalar T, Policy P>
class KVCache<T, P>::Step {
 public:
  using Scalar = T;

  const Shape& shape() const { return cache_->shape(); }
  /// What the update was; num_queries new tokens from first_position on.
  Phase phase() const { return info().phase; }
  Index num_queries() const { return info().num_queries; }
  Index first_position() const { return info().first_position; }
  /// Slots to attend to.
  Index size(Index kv_head) const { return open().size(kv_head); }
  /// (head_dim, size), contiguous columns; the first is 64-byte aligned.
  ConstColumns keys(Index kv_head) const { return check().keys(kv_head); }
  ConstColumns values(Index kv_head) const { return check().values(kv_head); }
  /// (size) A query at position p sees the slots with positions <= p. In a prompt the new tokens are the last slots, in order.
  std::span<const Index> positions(Index kv_head) const { return open().positions(kv_head); }
  /// (num_queries) The slot of each new token.
  std::span<const Index> new_slots(Index kv_head) const { return open().new_slots(kv_head); }

  /// The policy wants the weights of the last so many queries of the step, of every kv_head.
  Index wanted_rows() const { return open().wanted_rows(); }
  bool wants_attention() const { return wanted_rows() > 0; }
  /// The policy wants the last so many queries themselves: end every kv_head with on_queries (or attend).
  Index wanted_queries() const { return open().wanted_queries(); }
  /// The policy wants the sums over all of a prompt's queries as well: on_column_sums.
  bool wants_column_sums() const { return open().wants_column_sums(); }

  /// End a kv_head: its attention has run, these are the weights.
  /// @param weights  (size, queries * group_size), post-softmax, >= 0, finite; column j * group_size + g is query j, g-th
  ///                 query head of the group; a slot that the query cannot see has weight 0. In one or several in-order
  ///                 pieces that together are the last wanted_rows() queries; the last piece ends the head. If no rows are
  ///                 wanted they are not looked at: an engine may hand them over at every step.
  /// @throws std::invalid_argument  a wrong shape; a weight that is not finite or negative: nothing was recorded
  /// @throws std::logic_error       a stale step, a head that has ended
  void on_attention(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& weights) {
    (void)open();
    finish_if(cache_->planner_.on_attention(kv_head, {weights.data(), weights.rows(), weights.cols(), Eigen::OuterStride<>(weights.outerStride())}));
  }
  /// The weights of a kv_head summed over all of the step's queries, before or after its rows; the last of what is wanted
  /// ends the head. @param sums  (size, group_size), one column a query head of the group
  void on_column_sums(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& sums) {
    (void)open();
    finish_if(cache_->planner_.on_column_sums(kv_head, {sums.data(), sums.rows(), sums.cols(), Eigen::OuterStride<>(sums.outerStride())}));
  }
  /// End a kv_head whose kernel yields no weights, or whose queries the policy wants: weights are computed again from the
  /// queries and the stored keys.
  /// @param q  (head_dim, queries * group_size), after RoPE, unscaled, columns ordered as in on_attention: the last
  ///           max(wanted_rows(), wanted_queries()) queries, or all if column sums are wanted
  void on_queries(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& q) {
    const Index group = shape().group_size(), dim = shape().head_dim;
    const Index queries = wants_column_sums() ? num_queries() : std::max(wanted_rows(), wanted_queries());
    if (queries == 0) return done(kv_head);
    detail::require_state(open().is_untouched(kv_head), "on_queries: kv_head ", kv_head, " has had some of its rows, or its column sums, already");
    detail::require(q.rows() == dim && q.cols() == queries * group, "on_queries: q of kv_head ", kv_head, " must be head_dim x wanted queries * group_size = ",
                    dim, " x ", queries * group, ", got ", q.rows(), " x ", q.cols());
    for (Index j = 0; j < q.cols(); ++j)
      detail::require(detail::all_within(q.col(j).data(), dim, detail::max_magnitude<float>()), "on_queries: q must be finite and at most ",
                      detail::max_magnitude<float>(), " in magnitude, not so for kv_head ", kv_head, ", query at position ",
                      first_position() + num_queries() - queries + j / group);
    if (wanted_queries() > 0) {
      const Eigen::MatrixXf wanted = q.rightCols(wanted_queries() * group);
      accept_queries(kv_head, wanted.data(), wanted_queries());
    }
    const Index rows = wants_column_sums() ? num_queries() : wanted_rows();
    if (rows > 0) detail::weigh_queries(*this, kv_head, q.rightCols(rows * group));
    else done(kv_head);
  }
  /// End a kv_head of which nothing is wanted. May be left out, unless the step is an over-long prompt.
  void done(Index kv_head) {
    (void)open();
    finish_if(cache_->planner_.done(kv_head));
  }
  /// Take the step back, the new tokens too: the cache is as before the update.
  void abandon() {
    (void)open();
    for (Index h = 0; h < shape().kv_heads; ++h) cache_->take_back(h);
    cache_->planner_.abandon();
  }
  /// No head has been told anything yet.
  bool is_untouched() const { return open().is_untouched(); }
  /// The wanted queries of a kv_head; they do not end it. @param queries  (head_dim, num_wanted * group_size), contiguous
  void accept_queries(Index kv_head, const float* queries, Index num_wanted) {
    (void)open();
    cache_->planner_.accept_queries(kv_head, {queries, shape().head_dim, num_wanted * shape().group_size()});
  }
  /// on_attention for our own kernels, whose weights need no checks. (size, columns), contiguous.
  void accept(Index kv_head, const float* weights, Index columns) {
    const Index slots = size(kv_head);
    finish_if(cache_->planner_.accept(kv_head, {weights, slots, columns, Eigen::OuterStride<>(slots)}));
  }
  /// Likewise, of a policy that looks at the mean over the group alone. @param mean  (size, queries), contiguous
  void accept_mean(Index kv_head, const float* mean, Index queries) {
    const Index slots = size(kv_head);
    finish_if(cache_->planner_.accept_mean(kv_head, {mean, slots, queries, Eigen::OuterStride<>(slots)}));
  }
  bool wants_query_heads() const { return open().wants_query_heads(); }
  /// Likewise. @param mean  (size) over the group
  void accept_column_sums(Index kv_head, const float* mean) { finish_if(cache_->planner_.accept_column_sums(kv_head, mean)); }

 private:
  friend class KVCache;
  Step(KVCache& cache, std::uint64_t id) : cache_(&cache), id_(id) {}

  const KVCache& check() const {
    detail::require_state(cache_->planner_.step_id() == id_, "Step: this step is over");
    return *cache_;
  }
  const SlotPlanner<P>& open() const { return check().planner_; }
  const StepInfo& info() const { return open().step(); }
  void finish_if(bool last_head) {
    if (last_head) cache_->finish();
  }

  KVCache* cache_;
  std::uint64_t id_;
};

}  // namespace kvsnip
