// SlotPlanner<Policy>: the books of one layer's cache, without a key or a value.
//
// It knows which position sits in which slot of which kv_head, and makes every choice that is not the policy's: sinks
// and recents are protected, ties keep the newer position, victims wait in the eviction queue, an over-long prompt is
// cut to the budget. KVCache is this plus memory; an engine with its own memory (paged, on a GPU) uses this alone:
//
//   planner.plan(tokens)            where do the new tokens go? order(h), then new_slots(h)
//   planner.on_attention(h, w)      the attention callback of each kv_head; true from the step's last one
//   planner.finish()                then: the step's end; kept(h) says what an over-long prompt leaves
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kvsnip/detail/check_budget.hpp"
#include "kvsnip/detail/head_books.hpp"
#include "kvsnip/detail/layer_scores.hpp"
#include "kvsnip/detail/step_state.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/row_intake.hpp"
#include "kvsnip/detail/select.hpp"
#include "kvsnip/detail/sequence.hpp"
#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct UpdateOptions {
  bool more = false;          ///< the prompt goes on in the next update (chunked prefill)
  Index first_position = -1;  ///< of the first new token: may skip ahead, never back; -1: where the sequence ended
};

template <Policy P>
class SlotPlanner {
  static_assert(hooks::all_recognised<P>());

 public:
  using Weights = AttentionRows::Weights;

  /// @param budget  slots a kv_head may keep, sinks and windows included; >= 1. Ignored by a policy that never evicts.
  /// @param rope    the model's, for policies that need it
  /// @throws std::invalid_argument  bad shape; a budget that cannot hold what the policy protects; a Rope that is missing
  SlotPlanner(const Shape& shape, Index budget, P policy = P{}, Rope rope = {})
      : shape_(shape), budget_(budget), policy_(std::move(policy)), rope_(std::move(rope)) {
    detail::check_shape(shape);
    detail::check_budget(policy_, budget);
    detail::check_rope(rope_, shape, hooks::needs_rope(policy_));
    heads_.resize(static_cast<std::size_t>(shape.kv_heads));
    begin_sequence();
  }

  /// A value: copied between steps. Assignment makes steps of what was here before stale.
  SlotPlanner(const SlotPlanner&) = default;
  SlotPlanner(SlotPlanner&&) noexcept = default;
  SlotPlanner& operator=(const SlotPlanner& other) { return *this = SlotPlanner(other); }
  SlotPlanner& operator=(SlotPlanner&&) noexcept = default;
  ~SlotPlanner() = default;

  const Shape& shape() const { return shape_; }
  /// What a kv_head may keep where nothing shares it out.
  Index budget() const { return budget_; }
  /// What this one may keep: unlimited_budget if the policy lets it grow.
  Index budget(Index kv_head) const { return head(kv_head).budget; }
  const P& policy() const { return policy_; }
  Index tokens_seen() const { return sequence_.tokens_seen; }
  /// Where the sequence ended: the default position of the next token.
  Index next_position() const { return sequence_.next_position; }
  Index size(Index kv_head) const { return head(kv_head).books.size(); }
  /// Positions by slot, in no particular order once tokens were overwritten.
  std::span<const Index> positions(Index kv_head) const { return head(kv_head).books.positions; }

  /// Decide where the next `num_tokens` tokens go (0 is allowed, and may close a `more` series): slots first move as
  /// order(h) says, then token t enters new_slots(h)[t].
  /// @throws std::invalid_argument  a position that goes back; a kept prompt that leaves no room for recent_window more
  /// @throws std::logic_error       the previous step still waits for a callback
  void plan(Index num_tokens, const UpdateOptions& options = {}) {
    detail::require_state(!state_.must_end(), "update: the previous step waits for ", state_.heads_left(),
                          " kv_head(s): call on_attention, on_queries or done for each, or abandon (and if it waits for none, its end failed: abandon)");
    detail::require(num_tokens >= 0, "update: tokens must be >= 0, got ", num_tokens);
    const Index first = options.first_position == -1 ? sequence_.next_position : options.first_position;
    detail::require(first >= sequence_.next_position, "update: first_position must be >= ", sequence_.next_position,
                    ", where the sequence ended, got ", options.first_position);
    detail::require(first <= unlimited_budget - num_tokens, "update: positions must stay below 2^61, got ", first, " + ", num_tokens);

    const StepInfo step{phase_of(num_tokens, options.more), first, num_tokens};
    const detail::Sequence next = sequence_.after(step, options.more);
    if (next.first_prompt_end != sequence_.first_prompt_end) require_room_for_kept_prompt(next);
    const bool compacts = step.phase == Phase::long_prompt && !options.more && over_budget(num_tokens);
    if (state_.is_open()) commit();  // a step that wanted nothing and was left without done
    const Index wanted_rows = std::clamp<Index>(hooks::wanted_rows(policy_, step), 0, num_tokens);
    const Index wanted_queries = std::clamp<Index>(hooks::wanted_queries(policy_, step), 0, num_tokens);
    const bool wants_sums = hooks::wants_column_sums(policy_, step);
    scores_.begin();
    for (Index h = 0; h < shape_.kv_heads; ++h) choose_victims(h, step);
    for (Index h = 0; h < shape_.kv_heads; ++h)
      hooks::reserve(policy_, h, size(h) + num_tokens - static_cast<Index>(head(h).books.victims.size()));
    if constexpr (ObservesAttention<P> || ObservesColumnSums<P> || ObservesQueries<P> || TracksInserts<P>)
      if (step.phase != Phase::decode) saved_policy_ = policy_;
    // Nothing below throws.
    step_ = step, before_ = sequence_, sequence_ = next, compacts_ = compacts;
    wants_ = {wanted_rows, wanted_queries, wants_sums};
    for (Head& head : heads_) {
      head.books.place(first, num_tokens);
      head.rows.begin(wants_);
      head.inserted = head.ended = false, head.next_budget = head.budget;
    }
    state_.open(shape_.kv_heads, compacts_ || wants_ != detail::Wants{} || handles_evictions());
  }

  // --- the open step; different kv_heads may be served from different threads
  const StepInfo& step() const { return step_; }
  /// No head has been told anything yet.
  bool is_untouched() const {
    return std::all_of(heads_.begin(), heads_.end(), [&](const Head& head) { return !head.ended && head.rows.is_untouched(wants_); });
  }
  /// The number of the open step; none is used twice.
  std::uint64_t step_id() const { return state_.id(); }
  bool is_open() const { return state_.is_open(); }
  /// Whether the step's end cuts a prompt to the budget.
  bool compacts() const { return compacts_; }
  /// The policy wants the weights of the last so many queries; of a prompt perhaps also the sums of all queries'.
  Index wanted_rows() const { return wants_.rows; }
  bool wants_column_sums() const { return wants_.column_sums; }
  /// The policy wants the last so many queries themselves.
  Index wanted_queries() const { return wants_.queries; }
  /// Nothing of what is wanted of a kv_head has come.
  bool is_untouched(Index kv_head) const { return open_head(kv_head).rows.is_untouched(wants_); }
  /// The slot of each new token, in order.
  std::span<const Index> new_slots(Index kv_head) const { return head(kv_head).books.new_slots; }
  /// Slots in use before the step.
  Index old_size(Index kv_head) const { return head(kv_head).books.old_size; }
  /// Empty, or, after a bulk drop, how slots are permuted before the new tokens go in: new slot i was slot order[i]; the
  /// dropped ones come last.
  std::span<const Index> order(Index kv_head) const { return head(kv_head).books.order; }

  /// The attention callback: weights of one kv_head, (size, queries * group_size), a query's heads side by side; one or
  /// several in-order pieces that together are the last wanted_rows() queries. If none are wanted it is the same as done().
  /// @return whether the step's last head ended
  bool on_attention(Index kv_head, const Weights& weights) {
    const Head& head = open_head(kv_head);
    const Index group = shape_.group_size(), left = head.rows.left();
    if (left == 0) return done(kv_head);
    require_queries_came(head, kv_head);
    detail::require(weights.rows() == head.books.size(), "on_attention: weights of kv_head ", kv_head, " must have ", head.books.size(),
                    " rows, one a slot, got ", weights.rows());
    detail::require(weights.cols() > 0 && weights.cols() % group == 0 && weights.cols() / group <= left, "on_attention: weights of kv_head ",
                    kv_head, " must have a multiple of group_size = ", group, " columns, at most ", left * group, ", got ", weights.cols());
    const Index bad = detail::first_bad_column(weights);
    detail::require(bad < 0, "on_attention: weights must be finite and >= 0, not so for kv_head ", kv_head, ", query at position ",
                    sequence_.next_position - left + bad / group);
    return accept(kv_head, weights);
  }
  /// on_attention without a look at the weights, for those that our own kernels computed.
  bool accept(Index kv_head, const Weights& weights) {
    const Index group = shape_.group_size();
    if (step_.phase != Phase::decode) return pass_on(kv_head, detail::mean_over_group(weights, group), weights);
    rows_to_come(kv_head, weights.cols() / group).keep(weights, group, wants_.rows, wants_query_heads());
    return end_if_complete(kv_head);
  }
  /// The same if !wants_query_heads(). @param mean  (size, queries) over the group
  bool accept_mean(Index kv_head, const Weights& mean) {
    if (step_.phase != Phase::decode) return pass_on(kv_head, mean, Weights(nullptr, mean.rows(), 0, Eigen::OuterStride<>(mean.rows())));
    rows_to_come(kv_head, mean.cols()).keep(mean, 1, wants_.rows, false);
    return end_if_complete(kv_head);
  }
  /// The policy wants to see what goes: a step must be ended even if nothing else is wanted.
  bool handles_evictions() const { return hooks::handles_evictions(policy_); }
  void on_evict(Index kv_head, const Leaving& leaving) { hooks::on_evict(policy_, kv_head, leaving); }
  bool wants_query_heads() const { return hooks::wants_query_heads(policy_); }
  /// The weights of one kv_head summed over all queries of the step: (size, group_size), a query head a column.
  /// @return whether the step's last head ended
  bool on_column_sums(Index kv_head, const Weights& sums) {
    const Index slots = open_head(kv_head).books.size(), group = shape_.group_size();
    detail::require(sums.rows() == slots && sums.cols() == group, "on_column_sums: sums of kv_head ", kv_head, " must be slots x group_size = ",
                    slots, " x ", group, ", got ", sums.rows(), " x ", sums.cols());
    require_queries_came(open_head(kv_head), kv_head);
    detail::require(detail::first_bad_column(sums) < 0, "on_column_sums: sums must be finite and >= 0, not so for kv_head ", kv_head);
    return accept_column_sums(kv_head, detail::mean_over_group(sums, group).data());
  }
  /// Likewise. @param mean  (size) over the group
  bool accept_column_sums(Index kv_head, const float* mean) {
    detail::require_state(open_head(kv_head).rows.sums_left(), "on_column_sums: no more are wanted of kv_head ", kv_head);
    Head& head = head_at(kv_head);
    insert_new(kv_head);
    hooks::observe_column_sums(policy_, kv_head, ColumnSums{{mean, head.books.positions.size()}, step_, head.books.positions});
    head.rows.sums_came();
    return end_if_complete(kv_head);
  }
  /// The last wanted_queries() queries of one kv_head, (head_dim, queries * group_size). They come before its rows and do not
  /// end it.
  void accept_queries(Index kv_head, const QueryRows::Columns& queries) {
    detail::require_state(open_head(kv_head).rows.queries_left(), "kv_head ", kv_head, " has had its queries");
    Head& head = head_at(kv_head);
    if (step_.phase == Phase::decode) {
      head.rows.keep_queries(queries);
    } else {
      insert_new(kv_head);
      observe_queries(kv_head, queries);
      head.rows.queries_came();
    }
  }
  /// End a kv_head of which nothing is wanted. @return whether the step's last head ended
  bool done(Index kv_head) {
    require_queries_came(open_head(kv_head), kv_head);
    detail::require_state(open_head(kv_head).rows.is_complete(), "done: the policy wants weights of kv_head ", kv_head, ": give them");
    if (step_.phase != Phase::decode) insert_new(kv_head);
    return end(head_at(kv_head));
  }
  /// The step's end, once every head has ended.
  /// @throws std::logic_error  no step is open, or a head has not ended
  void finish() {
    detail::require_state(state_.is_open() && state_.heads_left() == 0, "finish: every kv_head of an open step must have ended");
    choose_kept();
    commit();
  }
  /// finish() in two halves, for an owner whose memory moves in between: choose_kept() may throw and then has changed
  /// nothing, commit() tells the policy and closes the step.
  void choose_kept() {
    if (!compacts_) return;
    scores_.begin();
    if (hooks::shares_budget(policy_)) share_budget();
    for (Index h = 0; h < shape_.kv_heads; ++h)
      if (size(h) > head(h).next_budget) choose_kept(h);
  }
  /// After choose_kept(): what a kv_head may keep from the step's end on.
  Index next_budget(Index kv_head) const { return head(kv_head).next_budget; }
  /// Likewise: the slots an over-long prompt leaves, by ascending position; empty if all stay.
  std::span<const Index> kept(Index kv_head) const { return head(kv_head).books.kept; }
  void commit() {
    for (Index h = 0; h < shape_.kv_heads; ++h) tell_policy(h);
    for (Head& head : heads_) head.books.commit(), head.budget = head.next_budget;  // does not throw; if the policy did, a prompt can still be abandoned
    if (compacts_) scores_ = {};
    close();
  }
  /// Take the open step back: positions, queue, sequence and policy are as before plan().
  void abandon() {
    detail::require_state(state_.is_open(), "abandon: no step is open");
    for (Head& head : heads_) head.books.take_back();
    if (saved_policy_) policy_ = std::move(*saved_policy_);
    sequence_ = before_;
    close();
  }
  /// Forget the sequence; memory stays.
  void reset() {
    for (Head& head : heads_) head.books.positions.clear(), head.books.queue.clear(), head.books.queue_next = 0;
    begin_sequence();
    sequence_ = {};
    close();
  }

  /// Where a kv_head's keys and values are, for policies that read them. Set before plan() and finish().
  void set_vectors(Index kv_head, const void* keys, const void* values, SlotsView::ReadColumn read) {
    Head& head = head_at(kv_head);
    head.keys = keys, head.values = values, head.read = read;
  }

  /// Heap bytes of the books, of the policy's state, of scratch.
  Index position_bytes() const {
    Index bytes = detail::heap_bytes(heads_);
    for (const Head& head : heads_) bytes += head.books.bytes();
    return bytes;
  }
  Index policy_bytes() const { return hooks::bytes(policy_) + (saved_policy_ ? hooks::bytes(*saved_policy_) : 0); }
  Index scratch_bytes() const {
    Index bytes = scores_.bytes() + detail::heap_bytes(newest_) + detail::heap_bytes(rope_.inv_freq);
    for (const Head& head : heads_) bytes += head.books.scratch_bytes() + head.rows.bytes();
    return bytes;
  }

 private:
  struct Head {
    detail::HeadBooks books;
    detail::RowIntake rows;
    Index budget = 0, next_budget = 0;     // slots it may keep; from the step's end on
    bool inserted = false, ended = false;  // in the open step: the policy knows the new tokens; the head's call has come
    const void* keys = nullptr;
    const void* values = nullptr;
    SlotsView::ReadColumn read = nullptr;
  };

  Head& head_at(Index kv_head) {
    detail::require(kv_head >= 0 && kv_head < shape_.kv_heads, "kv_head must be in [0, ", shape_.kv_heads, "), got ", kv_head);
    return heads_[static_cast<std::size_t>(kv_head)];
  }
  const Head& head(Index kv_head) const { return const_cast<SlotPlanner*>(this)->head_at(kv_head); }
  const Head& open_head(Index kv_head) const {
    const Head& found = head(kv_head);
    detail::require_state(state_.is_open(), "no step is open");
    detail::require_state(!found.ended, "kv_head ", kv_head, " of this step has ended already");
    return found;
  }
  SlotsView slots_view(const Head& head, Phase phase) const {
    SlotsView slots;
    slots.positions = head.books.positions, slots.phase = phase, slots.rope = known_rope();
    slots.set_vectors(head.keys, head.values, shape_.head_dim, head.read);
    return slots;
  }

  // --- phases
  Phase phase_of(Index num_tokens, bool more) {
    const bool is_prompt = sequence_.tokens_seen == 0 || sequence_.in_series || more || !fits_by_evicting(num_tokens);
    if (!is_prompt) return Phase::decode;
    return hooks::evicts(policy_, Phase::long_prompt) && (more || over_budget(num_tokens)) ? Phase::long_prompt : Phase::prompt;
  }
  bool over_budget(Index num_new) const {
    return std::any_of(heads_.begin(), heads_.end(), [&](const Head& head) { return head.books.size() > head.budget - num_new; });
  }
  bool fits_by_evicting(Index num_tokens) {
    if (!hooks::evicts(policy_, Phase::decode)) return true;
    const Protection p = hooks::protection(policy_, Phase::decode);
    const Index sinks = p.keep_prompt ? std::max(p.num_sinks, sequence_.first_prompt_end - sequence_.start) : p.num_sinks;
    return std::all_of(heads_.begin(), heads_.end(), [&](const Head& head) {
      if (num_tokens <= head.budget - sinks - held_recents(p, num_tokens)) return true;  // whatever is held
      const Index recent = newest_from(head.books, held_recents(p, num_tokens));
      const Index evictable = std::count_if(head.books.positions.begin(), head.books.positions.end(),
                                            [&](Index position) { return position < recent && !sequence_.is_sink(position, p); });
      return num_tokens <= head.budget - head.books.size() + evictable;
    });
  }
  void require_room_for_kept_prompt(const detail::Sequence& next) const {
    for (const Phase phase : {Phase::decode, Phase::long_prompt}) {
      const Protection p = hooks::protection(policy_, phase);
      detail::require(!p.keep_prompt || next.tokens_seen <= budget_ - p.recent_window,
                      "update: keep_prompt needs budget >= prompt + recent_window = ", next.tokens_seen, " + ", p.recent_window, ", got ", budget_);
    }
  }

  // --- protection
  /// An update of c tokens protects those c and the newest recent_window - c held.
  static Index held_recents(const Protection& p, Index num_tokens) { return std::max<Index>(p.recent_window - num_tokens, 0); }
  Index newest_from(const detail::HeadBooks& books, Index count) { return detail::newest_from(books.positions, count, sequence_.next_position, newest_); }

  // --- choices
  std::span<float> score(Index kv_head, Phase phase) {
    return scores_.of(policy_, kv_head, shape_.kv_heads, phase, [&](Index h) { return slots_view(head(h), phase); });
  }
  template <class Candidate>
  void refine(Index kv_head, Phase phase, Index num_gone, Candidate is_candidate, std::span<float> scores) {
    scores_.refine(policy_, kv_head, slots_view(head(kv_head), phase), num_gone, is_candidate, scores);
  }
  /// Lowest score first; of equals the older position.
  static auto goes_before(std::span<const float> scores, std::span<const Index> positions) {
    return [=](Index a, Index b) {
      const auto i = static_cast<std::size_t>(a), j = static_cast<std::size_t>(b);
      return scores[i] != scores[j] ? scores[i] < scores[j] : positions[i] < positions[j];
    };
  }
  void choose_victims(Index kv_head, const StepInfo& step) {
    detail::HeadBooks& books = head_at(kv_head).books;
    books.begin();
    const Index budget = head(kv_head).budget, needed = books.size() - (budget - step.num_queries);
    if (step.phase == Phase::decode && needed > 0 && hooks::evicts(policy_, Phase::decode)) {
      const Eviction eviction = hooks::eviction(policy_, budget);
      if (!eviction.bulk) books.take_from_queue(needed);
      const Index missing = needed - static_cast<Index>(books.victims.size());
      if (missing > 0) {
        const std::span<float> scores = score(kv_head, Phase::decode);
        const Protection p = hooks::protection(policy_, Phase::decode);
        const Index recent = newest_from(books, held_recents(p, step.num_queries));
        const auto evictable = [&](Index slot) {
          const Index position = books.positions[static_cast<std::size_t>(slot)];
          return position < recent && !sequence_.is_sink(position, p) && std::find(books.victims.begin(), books.victims.end(), slot) == books.victims.end();
        };
        const Index count = std::max(eviction.count, missing);
        refine(kv_head, Phase::decode, count, evictable, scores);
        detail::select_lowest(scores, count, evictable, goes_before(scores, books.positions), books.refill);
        if (eviction.bulk) {
          books.victims.swap(books.refill);
          books.drop_in_bulk();
        } else {
          books.take_from_refill(missing);
        }
      }
    }
    books.reserve_for(step.num_queries);
  }
  /// Slot -> whether a compaction keeps it whatever its score: sinks and the newest positions.
  auto protected_by_compaction(Index kv_head) {
    const detail::HeadBooks& books = head(kv_head).books;
    const Protection p = hooks::protection(policy_, Phase::long_prompt);
    return [this, &books, p, recent = newest_from(books, std::max(p.recent_window - 1, p.observation_window))](Index slot) {
      const Index position = books.positions[static_cast<std::size_t>(slot)];
      return position >= recent || sequence_.is_sink(position, p);
    };
  }
  /// What a compaction keeps: what is protected, and of the rest the best.
  void choose_kept(Index kv_head) {
    detail::HeadBooks& books = head_at(kv_head).books;
    const Index budget = head(kv_head).next_budget;
    const auto is_protected = protected_by_compaction(kv_head);
    const std::span<float> scores = score(kv_head, Phase::long_prompt);
    refine(kv_head, Phase::long_prompt, books.size() - budget, [&](Index slot) { return !is_protected(slot); }, scores);
    const auto goes = goes_before(scores, books.positions);
    detail::select_kept(books.positions, budget, is_protected, [&](Index a, Index b) { return goes(b, a); }, books.kept);
    books.displaced.reserve(books.kept.size());  // for commit()
  }
  /// The policy shares the layer's places between kv_heads; each gets what decoding needs.
  void share_budget() {
    const Protection p = hooks::evicts(policy_, Phase::decode) ? hooks::protection(policy_, Phase::decode) : Protection{};
    std::vector<std::vector<float>> candidates(heads_.size());
    std::vector<Index> least, shares;
    Index total = 0;
    for (Index h = 0; h < shape_.kv_heads; ++h) {
      const auto is_protected = protected_by_compaction(h);
      const std::span<const float> scores = score(h, Phase::long_prompt);
      std::vector<float>& of_head = candidates[static_cast<std::size_t>(h)];
      for (Index slot = 0; slot < std::ssize(scores); ++slot)
        if (!is_protected(slot)) of_head.push_back(scores[static_cast<std::size_t>(slot)]);
      const Index num_protected = size(h) - std::ssize(of_head), places = std::min(budget_ - num_protected, std::ssize(of_head));
      least.push_back(std::max<Index>(p.num_sinks + p.recent_window - num_protected, num_protected == 0));
      shares.push_back(places), total += places;
    }
    const std::vector<std::span<const float>> views(candidates.begin(), candidates.end());
    hooks::head_budgets(policy_, std::span<const std::span<const float>>(views), total, std::span<Index>(shares));
    detail::raise_to_least(shares, least);
    for (std::size_t h = 0; h < heads_.size(); ++h) {
      const Index num_protected = heads_[h].books.size() - std::ssize(candidates[h]);
      heads_[h].next_budget = shares[h] >= unlimited_budget ? unlimited_budget : num_protected + shares[h];
    }
  }

  // --- the step's rows and end
  detail::RowIntake& rows_to_come(Index kv_head, Index queries) {
    detail::require_state(queries <= open_head(kv_head).rows.left(), "kv_head ", kv_head, " has had its rows");
    return head_at(kv_head).rows;
  }
  /// A prompt's rows go to the policy at once: they may be too many to keep, and saved_policy_ takes them back.
  bool pass_on(Index kv_head, const Eigen::Ref<const Eigen::MatrixXf>& mean, const Weights& query_heads) {
    detail::RowIntake& rows = rows_to_come(kv_head, mean.cols());
    insert_new(kv_head);
    const Weights means(mean.data(), mean.rows(), mean.cols(), Eigen::OuterStride<>(mean.outerStride()));
    hooks::observe(policy_, kv_head, AttentionRows{means, query_heads, sequence_.next_position - rows.left(), step_, positions(kv_head)});
    rows.skip(mean.cols());
    return end_if_complete(kv_head);
  }
  bool end_if_complete(Index kv_head) {
    Head& head = head_at(kv_head);
    return head.rows.is_complete() && end(head);
  }
  bool end(Head& head) {
    head.ended = true;
    return state_.end_head();
  }
  void require_queries_came(const Head& head, Index kv_head) const {
    detail::require_state(!head.rows.queries_left(), "the policy wants queries of kv_head ", kv_head, ": end it with on_queries, or with attend()");
  }
  void observe_queries(Index kv_head, const QueryRows::Columns& queries) {
    const Index group = shape_.group_size();
    hooks::observe_queries(policy_, kv_head, QueryRows{queries, group, sequence_.next_position - queries.cols() / group, step_, slots_view(head(kv_head), step_.phase)});
  }
  const Rope* known_rope() const { return rope_.is_known() ? &rope_ : nullptr; }
  /// Tell the policy, once, which slots the new tokens are in.
  void insert_new(Index kv_head) {
    Head& head = head_at(kv_head);
    if (!std::exchange(head.inserted, true))
      for (const Index slot : head.books.new_slots) hooks::on_insert(policy_, kv_head, slot, slots_view(head, step_.phase));
  }
  void tell_policy(Index kv_head) {
    Head& head = head_at(kv_head);
    const std::span<const Index> order = head.books.order;
    if (!order.empty()) hooks::on_gather(policy_, kv_head, order.first(order.size() - head.books.victims.size()));
    insert_new(kv_head);
    if (step_.phase == Phase::decode && wants_.queries > 0) observe_queries(kv_head, head.rows.kept_queries(shape_.head_dim));
    if (step_.phase == Phase::decode && wants_.rows > 0)
      hooks::observe(policy_, kv_head, head.rows.kept(head.books.positions, wants_.rows, step_));
    if (!head.books.kept.empty()) hooks::on_gather(policy_, kv_head, std::span<const Index>(head.books.kept));
    if (step_.phase != Phase::decode && !sequence_.in_series) hooks::on_prompt_end(policy_, kv_head);
  }
  void close() {
    saved_policy_.reset();
    state_.close();
  }

  void begin_sequence() {
    hooks::reset(policy_, shape_);
    for (Index h = 0; h < shape_.kv_heads; ++h) {
      const Index budget = hooks::head_budget(policy_, h, budget_);
      detail::check_head_budget(policy_, h, budget);
      head_at(h).budget = head_at(h).next_budget = budget;
    }
  }

  Shape shape_;
  Index budget_;
  P policy_;
  Rope rope_;
  std::vector<Head> heads_;
  detail::Sequence sequence_, before_;
  StepInfo step_;
  detail::Wants wants_;
  bool compacts_ = false;
  detail::StepState state_;
  std::optional<P> saved_policy_;  // of a prompt, to take it back
  detail::LayerScores scores_;     // scratch
  std::vector<Index> newest_;      // scratch: (slots)
};

}  // namespace kvsnip
