// Policies chosen at run time: AnyPolicy, make_policy("snapkv(observation_window=16)+scissorhands"), make_cache. Opt-in:
// the umbrella header does not include this.
//
// A spec is NAME or NAME(OPTION=VALUE, ...); a decorator's first argument is the spec of what it decorates; PROMPT+DECODE is
// Chain. Names are the policies' and their options' fields': "ada_kv(snapkv(observation_window=16), floor=0.3)+scissorhands".
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/kv_cache.hpp"
#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"
#include "kvsnip/policy/ada_kv.hpp"
#include "kvsnip/policy/chain.hpp"
#include "kvsnip/policy/chunk_kv.hpp"
#include "kvsnip/policy/compactor.hpp"
#include "kvsnip/policy/cur.hpp"
#include "kvsnip/policy/expected_attention.hpp"
#include "kvsnip/policy/finch.hpp"
#include "kvsnip/policy/full.hpp"
#include "kvsnip/policy/h2o.hpp"
#include "kvsnip/policy/keep_it_odd.hpp"
#include "kvsnip/policy/key_diff.hpp"
#include "kvsnip/policy/key_norm.hpp"
#include "kvsnip/policy/lag_kv.hpp"
#include "kvsnip/policy/leverage_score.hpp"
#include "kvsnip/policy/loss_estimate.hpp"
#include "kvsnip/policy/merging.hpp"
#include "kvsnip/policy/non_causal_attention.hpp"
#include "kvsnip/policy/periodic.hpp"
#include "kvsnip/policy/r_kv.hpp"
#include "kvsnip/policy/random.hpp"
#include "kvsnip/policy/scissorhands.hpp"
#include "kvsnip/policy/sim_layer_kv.hpp"
#include "kvsnip/policy/snapkv.hpp"
#include "kvsnip/policy/streaming_llm.hpp"
#include "kvsnip/policy/tova.hpp"

namespace kvsnip {

/// Every policy that a spec can name. A new policy is one more entry here; it has a `name`, says what it `needs`, may name a
/// `paper`, and if it has options, has an `Options` with each().
using RegisteredPolicies = std::tuple<Full, StreamingLLM, Scissorhands, SnapKV, H2O, TOVA,
                                      KeyNorm, Random, KeepItOdd, KeyDiff, CUR, LagKV, Finch,
                                      LeverageScore, NonCausalAttention, Compactor, ExpectedAttention, RKV, SimLayerKV>;

class AnyPolicy;
/// The spec that makes a policy: its name and the options that are not the default; "custom" for a user's own.
inline std::string to_string(const AnyPolicy& policy);

/// The policy that a spec describes, for example "snapkv(observation_window=16)+scissorhands".
/// @throws std::invalid_argument  an unknown word (naming the known ones and the nearest), a bad value
inline AnyPolicy make_policy(std::string_view spec);

namespace detail {
template <class P>
std::string spec_of(const P& policy);
}

/// Any policy behind one type: the hooks become virtual calls, a copy copies the state.
class AnyPolicy {
 public:
  AnyPolicy() : AnyPolicy(Full{}) {}
  template <class P>
    requires(!std::same_as<P, AnyPolicy>)
  explicit AnyPolicy(P policy) : policy_(std::make_unique<Model<P>>(std::move(policy))) {}
  AnyPolicy(const AnyPolicy& other) : policy_(other.policy_->clone()) {}
  AnyPolicy(AnyPolicy&&) noexcept = default;
  AnyPolicy& operator=(AnyPolicy other) noexcept {
    policy_.swap(other.policy_);
    return *this;
  }
  ~AnyPolicy() = default;

  bool evicts(Phase phase) const { return policy_->evicts(phase); }
  Protection protection(Phase phase) const { return policy_->protection(phase); }
  Eviction eviction(Index budget) const { return policy_->eviction(budget); }
  Index wanted_rows(const StepInfo& step) const { return policy_->wanted_rows(step); }
  bool wants_column_sums(const StepInfo& step) const { return policy_->wants_column_sums(step); }
  void observe_column_sums(Index kv_head, const ColumnSums& sums) { policy_->observe_column_sums(kv_head, sums); }
  bool wants_query_heads() const { return policy_->wants_query_heads(); }
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) { policy_->score(kv_head, slots, out); }
  bool scores_layer(Phase phase) const { return policy_->scores_layer(phase); }
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) { policy_->score_layer(heads, out); }
  bool refines(Phase phase) const { return policy_->refines(phase); }
  void refine(Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) { policy_->refine(kv_head, slots, choice, scores); }
  bool shares_budget() const { return policy_->shares_budget(); }
  void head_budgets(std::span<const std::span<const float>> scores, Index total, std::span<Index> out) { policy_->head_budgets(scores, total, out); }
  Index head_budget(Index kv_head, Index budget) const { return policy_->head_budget(kv_head, budget); }
  Index wanted_queries(const StepInfo& step) const { return policy_->wanted_queries(step); }
  void observe_queries(Index kv_head, const QueryRows& queries) { policy_->observe_queries(kv_head, queries); }
  bool needs_rope() const { return policy_->needs_rope(); }
  void observe(Index kv_head, const AttentionRows& rows) { policy_->observe(kv_head, rows); }
  void reserve(Index kv_head, Index num_slots) { policy_->reserve(kv_head, num_slots); }
  void on_insert(Index kv_head, Index slot, const SlotsView& slots) { policy_->on_insert(kv_head, slot, slots); }
  bool handles_evictions() const { return policy_->handles_evictions(); }
  void on_evict(Index kv_head, const Leaving& leaving) { policy_->on_evict(kv_head, leaving); }
  void on_gather(Index kv_head, std::span<const Index> kept) { policy_->on_gather(kv_head, kept); }
  void on_prompt_end(Index kv_head) { policy_->on_prompt_end(kv_head); }
  void reset(const Shape& shape) { policy_->reset(shape); }
  Index bytes() const { return policy_->bytes(); }

  /// The policy itself, or null if it is not a P.
  template <Policy P>
  const P* as() const {
    const auto* model = dynamic_cast<const Model<P>*>(policy_.get());
    return model == nullptr ? nullptr : &model->policy;
  }
  friend std::string to_string(const AnyPolicy& policy);

 private:
  struct Interface {
    virtual ~Interface() = default;
    virtual std::unique_ptr<Interface> clone() const = 0;
    virtual std::string spec() const = 0;
    virtual bool evicts(Phase) const = 0;
    virtual Protection protection(Phase) const = 0;
    virtual Eviction eviction(Index budget) const = 0;
    virtual Index wanted_rows(const StepInfo&) const = 0;
    virtual bool wants_column_sums(const StepInfo&) const = 0;
    virtual void observe_column_sums(Index kv_head, const ColumnSums&) = 0;
    virtual bool wants_query_heads() const = 0;
    virtual void score(Index kv_head, const SlotsView&, std::span<float> out) = 0;
    virtual bool scores_layer(Phase phase) const = 0;
    virtual void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) = 0;
    virtual bool refines(Phase phase) const = 0;
    virtual void refine(Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) = 0;
    virtual bool shares_budget() const = 0;
    virtual void head_budgets(std::span<const std::span<const float>> scores, Index total, std::span<Index> out) = 0;
    virtual Index head_budget(Index kv_head, Index budget) const = 0;
    virtual Index wanted_queries(const StepInfo& step) const = 0;
    virtual void observe_queries(Index kv_head, const QueryRows& queries) = 0;
    virtual bool needs_rope() const = 0;
    virtual void observe(Index kv_head, const AttentionRows&) = 0;
    virtual void reserve(Index kv_head, Index num_slots) = 0;
    virtual void on_insert(Index kv_head, Index slot, const SlotsView&) = 0;
    virtual bool handles_evictions() const = 0;
    virtual void on_evict(Index kv_head, const Leaving& leaving) = 0;
    virtual void on_gather(Index kv_head, std::span<const Index> kept) = 0;
    virtual void on_prompt_end(Index kv_head) = 0;
    virtual void reset(const Shape&) = 0;
    virtual Index bytes() const = 0;
  };
  template <Policy P>
  struct Model final : Interface {
    explicit Model(P p) : policy(std::move(p)) {}
    std::unique_ptr<Interface> clone() const override { return std::make_unique<Model>(*this); }
    std::string spec() const override { return detail::spec_of(policy); }
    bool evicts(Phase phase) const override { return hooks::evicts(policy, phase); }
    Protection protection(Phase phase) const override { return hooks::protection(policy, phase); }
    Eviction eviction(Index budget) const override { return hooks::eviction(policy, budget); }
    Index wanted_rows(const StepInfo& step) const override { return hooks::wanted_rows(policy, step); }
    bool wants_column_sums(const StepInfo& step) const override { return hooks::wants_column_sums(policy, step); }
    void observe_column_sums(Index kv_head, const ColumnSums& sums) override { hooks::observe_column_sums(policy, kv_head, sums); }
    bool wants_query_heads() const override { return hooks::wants_query_heads(policy); }
    void score(Index kv_head, const SlotsView& slots, std::span<float> out) override { hooks::score(policy, kv_head, slots, out); }
    bool scores_layer(Phase phase) const override { return hooks::scores_layer(policy, phase); }
    void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) override { hooks::score_layer(policy, heads, out); }
    bool refines(Phase phase) const override { return hooks::refines(policy, phase); }
    void refine(Index kv_head, const SlotsView& slots, const Choice& choice, std::span<float> scores) override { hooks::refine(policy, kv_head, slots, choice, scores); }
    bool shares_budget() const override { return hooks::shares_budget(policy); }
    void head_budgets(std::span<const std::span<const float>> scores, Index total, std::span<Index> out) override { hooks::head_budgets(policy, scores, total, out); }
    Index head_budget(Index kv_head, Index budget) const override { return hooks::head_budget(policy, kv_head, budget); }
    Index wanted_queries(const StepInfo& step) const override { return hooks::wanted_queries(policy, step); }
    void observe_queries(Index kv_head, const QueryRows& queries) override { hooks::observe_queries(policy, kv_head, queries); }
    bool needs_rope() const override { return hooks::needs_rope(policy); }
    void observe(Index kv_head, const AttentionRows& rows) override { hooks::observe(policy, kv_head, rows); }
    void reserve(Index kv_head, Index num_slots) override { hooks::reserve(policy, kv_head, num_slots); }
    void on_insert(Index kv_head, Index slot, const SlotsView& slots) override { hooks::on_insert(policy, kv_head, slot, slots); }
    bool handles_evictions() const override { return hooks::handles_evictions(policy); }
    void on_evict(Index kv_head, const Leaving& leaving) override { hooks::on_evict(policy, kv_head, leaving); }
    void on_gather(Index kv_head, std::span<const Index> kept) override { hooks::on_gather(policy, kv_head, kept); }
    void on_prompt_end(Index kv_head) override { hooks::on_prompt_end(policy, kv_head); }
    void reset(const Shape& shape) override { hooks::reset(policy, shape); }
    Index bytes() const override { return static_cast<Index>(sizeof(Model)) + hooks::bytes(policy); }

    P policy;
  };
  std::unique_ptr<Interface> policy_;
};
static_assert(Policy<AnyPolicy> && ScoresSlots<AnyPolicy> && ObservesAttention<AnyPolicy>);

inline std::string to_string(const AnyPolicy& policy) { return policy.policy_->spec(); }

/// Every decorator that a spec can name, around any policy.
using RegisteredDecorators = std::tuple<AdaKV<AnyPolicy>, ChunkKV<AnyPolicy>, LossEstimate<AnyPolicy>, Merging<AnyPolicy>, Periodic<AnyPolicy>>;

namespace detail {

/// The known word that takes the fewest edits, for "did you mean".
inline std::string_view nearest(std::string_view word, const std::vector<std::string_view>& known) {
  std::string_view best;
  std::size_t best_edits = std::string_view::npos;
  for (const std::string_view candidate : known) {
    std::vector<std::size_t> row(candidate.size() + 1);  // edits from word's first i letters to candidate's first j
    for (std::size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= word.size(); ++i) {
      std::size_t diagonal = std::exchange(row[0], i);
      for (std::size_t j = 1; j < row.size(); ++j)
        diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, diagonal + (word[i - 1] != candidate[j - 1])}));
    }
    if (row.back() < best_edits) best_edits = row.back(), best = candidate;
  }
  return best;
}
[[noreturn]] inline void unknown_word(const char* what, std::string_view word, const std::vector<std::string_view>& known) {
  std::string list;
  for (const std::string_view name : known) list.append(list.empty() ? "" : ", ").append(name);
  if (known.empty()) fail<std::invalid_argument>("make_policy: unknown ", what, " '", word, "': there are none");
  fail<std::invalid_argument>("make_policy: unknown ", what, " '", word, "', did you mean '", nearest(word, known), "'? Known: ", list);
}

template <class Value>
Value parse_value(std::string_view option, std::string_view text) {
  if constexpr (std::is_enum_v<Value>) {
    const auto names = enum_names(Value{});
    const auto found = std::find(names.begin(), names.end(), text);
    if (found == names.end()) unknown_word(std::string(option).append(" value").c_str(), text, {names.begin(), names.end()});
    return static_cast<Value>(found - names.begin());
  } else if constexpr (std::same_as<Value, bool>) {
    require(text == "true" || text == "1" || text == "false" || text == "0", "make_policy: ", option, " must be true or false, got '", text, "'");
    return text == "true" || text == "1";
  } else {
    Value value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    require(error == std::errc{} && end == text.data() + text.size(), "make_policy: ", option,
            std::floating_point<Value> ? " must be a number, got '" : " must be a whole number, got '", text, "'");
    return value;
  }
}
template <class Value>
std::string value_to_string(const Value& value) {
  if constexpr (std::is_enum_v<Value>) return std::string(enum_names(value)[static_cast<std::size_t>(value)]);
  else if constexpr (std::same_as<Value, bool>) return value ? "true" : "false";
  else if constexpr (std::floating_point<Value>) {
    std::array<char, 32> text;  // the shortest that reads back as the same number
    return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
  } else return std::to_string(value);
}

inline std::string_view trim(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}
/// Where the first `separator` is that no parenthesis holds; the end, if there is none.
inline std::size_t find_outside(std::string_view text, char separator) {
  Index depth = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == separator && depth == 0) return i;
    depth += (text[i] == '(') - (text[i] == ')');
  }
  return text.size();
}
/// The text up to the next `separator` (or all of it), taken off `rest`.
inline std::string_view take_until(std::string_view& rest, char separator) {
  const std::size_t end = find_outside(rest, separator);
  const std::string_view first = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return trim(first);
}

template <class Options>
Options parse_options(std::string_view text) {
  Options options;
  while (!trim(text).empty()) {
    std::string_view value = take_until(text, ',');
    const std::string_view name = take_until(value, '=');
    std::vector<std::string_view> known;
    bool found = false;
    Options::each(options, [&]<class Field>(std::string_view field, Field& target) {
      known.push_back(field);
      if (field == name) target = parse_value<Field>(field, trim(value)), found = true;
    });
    if (!found) unknown_word("option", name, known);
  }
  return options;
}
template <class P>
AnyPolicy parse_policy(std::string_view arguments) {
  if constexpr (requires(const P& policy) { policy.inner(); }) {
    require(!arguments.empty(), "make_policy: ", P::name, " needs a policy to decorate: ", P::name, "(snapkv)");
    AnyPolicy inner = make_policy(take_until(arguments, ','));
    if constexpr (requires { typename P::Options; }) return AnyPolicy(P(std::move(inner), parse_options<typename P::Options>(arguments)));
    if (!arguments.empty()) unknown_word("option", take_until(arguments, '='), {});
    return AnyPolicy(P(std::move(inner)));
  } else if constexpr (requires { typename P::Options; }) {
    return AnyPolicy(P(parse_options<typename P::Options>(arguments)));
  } else {
    if (!arguments.empty()) unknown_word("option", take_until(arguments, '='), {});
    return AnyPolicy(P{});
  }
}
/// visit(a null P*) for each registered P, decorators last.
template <class Visit>
void for_each_registered(Visit visit) {
  const auto each = [&]<class... P>(const std::tuple<P...>*) { (visit(static_cast<const P*>(nullptr)), ...); };
  each(static_cast<const RegisteredPolicies*>(nullptr));
  each(static_cast<const RegisteredDecorators*>(nullptr));
}
inline AnyPolicy parse_one(std::string_view spec) {
  const std::string_view whole = spec;
  const std::string_view name = take_until(spec, '(');
  const bool has_arguments = name.size() < trim(whole).size();
  require(!has_arguments || (spec.size() >= 1 && trim(spec).ends_with(')')), "make_policy: '(' without ')' at the end of '", whole, "'");
  const std::string_view arguments = has_arguments ? trim(trim(spec).substr(0, trim(spec).size() - 1)) : std::string_view{};
  std::vector<std::string_view> known;
  std::optional<AnyPolicy> made;
  for_each_registered([&]<class P>(const P*) {
    known.push_back(P::name);
    if (P::name == name) made = parse_policy<P>(arguments);
  });
  if (!made) unknown_word("policy", name, known);
  return *made;
}

template <class P>
std::string spec_of(const P& policy) {
  if constexpr (std::same_as<P, AnyPolicy>) {
    return to_string(policy);
  } else if constexpr (requires { policy.prompt(), policy.decode(); }) {
    return spec_of(policy.prompt()) + "+" + spec_of(policy.decode());
  } else if constexpr (requires { typename P::Options; P::name; }) {
    std::string list;
    typename P::Options options = policy.options(), standard;
    std::vector<std::string> defaults;
    P::Options::each(standard, [&](std::string_view, const auto& value) { defaults.push_back(value_to_string(value)); });
    P::Options::each(options, [&, i = std::size_t{0}](std::string_view field, const auto& value) mutable {
      if (const std::string text = value_to_string(value); text != defaults[i++])
        list.append(list.empty() ? "" : ", ").append(field).append("=").append(text);
    });
    if constexpr (requires { policy.inner(); }) list.insert(0, spec_of(policy.inner()) + (list.empty() ? "" : ", "));
    return std::string(P::name) + (list.empty() ? "" : "(" + list + ")");
  } else if constexpr (requires { P::name, policy.inner(); }) {
    return std::string(P::name) + "(" + spec_of(policy.inner()) + ")";
  } else if constexpr (requires { P::name; }) {
    return std::string(P::name);
  } else {
    return "custom";
  }
}

}  // namespace detail

inline AnyPolicy make_policy(std::string_view spec) {
  const std::string_view first = spec.substr(0, detail::find_outside(spec, '+'));
  if (first.size() == spec.size()) return detail::parse_one(detail::trim(spec));
  return AnyPolicy(Chain<AnyPolicy, AnyPolicy>(detail::parse_one(detail::trim(first)), make_policy(spec.substr(first.size() + 1))));
}

/// A policy or decorator that a spec can name.
struct PolicyInfo {
  std::string_view name;
  std::string_view paper;  ///< "arXiv:2404.14469", or empty
  std::string_view needs;  ///< what it looks at
  bool decorates = false;  ///< its first argument is a policy
  std::string defaults;    ///< its options with their default values, as a spec would write them: "num_sinks=4, recent_window=10"
};
inline std::vector<PolicyInfo> policies() {
  std::vector<PolicyInfo> result;
  detail::for_each_registered([&]<class P>(const P*) {
    PolicyInfo info{P::name, {}, P::needs, requires(const P& policy) { policy.inner(); }, {}};
    if constexpr (requires { P::paper; }) info.paper = P::paper;
    if constexpr (requires { typename P::Options; }) {
      typename P::Options options;
      P::Options::each(options, [&](std::string_view field, const auto& value) {
        info.defaults.append(info.defaults.empty() ? "" : ", ").append(field).append("=").append(detail::value_to_string(value));
      });
    }
    result.push_back(std::move(info));
  });
  return result;
}

/// A cache whose policy is chosen by name. @param rope  the model's, for policies that need it
template <StorageScalar T>
KVCache<T, AnyPolicy> make_cache(std::string_view spec, const Shape& shape, Index budget, Rope rope = {}) {
  return KVCache<T, AnyPolicy>(shape, budget, make_policy(spec), std::move(rope));
}

}  // namespace kvsnip
