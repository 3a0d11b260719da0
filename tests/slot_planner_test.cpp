// SlotPlanner alone, as an engine with its own memory uses it, and the concepts that say what a policy is.

#include <kvsnip/registry.hpp>
#include <kvsnip/slot_planner.hpp>

#include "support/catch.hpp"
#include "support/layer.hpp"
#include "support/positions.hpp"
#include "support/thrown.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using kvsnip::AnyPolicy;
using kvsnip::AttentionRows;
using kvsnip::Eviction;
using kvsnip::Index;
using kvsnip::Phase;
using kvsnip::Policy;
using kvsnip::Protection;
using kvsnip::Shape;
using kvsnip::SlotPlanner;
using kvsnip::SlotsView;
using kvsnip::StepInfo;
using test::consecutive;
using test::make_layer;
using test::Random;
using test::sorted;

using Planner = SlotPlanner<AnyPolicy>;
using Positions = std::vector<Index>;
constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 1};

// --- What a policy is

struct Nothing {};
struct Scores {
  void score(Index, const SlotsView&, std::span<float>) {}
};
struct NoCopy : Scores {
  NoCopy(const NoCopy&) = delete;
};
struct ScoresDoubles {
  void score(Index, const SlotsView&, std::span<double>) {}
};
struct ScoresAndReturns {
  float score(const SlotsView&) { return 0; }
};
struct Observes {
  void observe(Index, const AttentionRows&) {}
};
struct ObservesAndForgets : Observes {
  void reset(const Shape&) {}
};
struct WantsRowsButDoesNotLook : Scores {
  Index wanted_rows(const StepInfo&) const { return 1; }
};
struct WantsInts : ObservesAndForgets {
  int wanted_rows(const StepInfo&) const { return 1; }
};
static_assert(Policy<Nothing> && !kvsnip::ScoresSlots<Nothing>);
static_assert(Policy<Scores> && kvsnip::ScoresSlots<Scores>);
static_assert(!Policy<NoCopy>, "a policy is a value");
static_assert(!kvsnip::ScoresSlots<ScoresDoubles> && !kvsnip::ScoresSlots<ScoresAndReturns>, "the scores' type and place are fixed");
static_assert(!Policy<Observes>, "what remembers can forget");
static_assert(Policy<ObservesAndForgets> && kvsnip::ObservesAttention<ObservesAndForgets>);
static_assert(!Policy<WantsRowsButDoesNotLook>, "rows are wanted by someone who looks at them");
static_assert(!kvsnip::ChoosesRows<WantsInts>, "a hook of the wrong type is no hook");
static_assert(!Policy<int&> && !Policy<void>);
static_assert(Policy<AnyPolicy> && Policy<kvsnip::Chain<AnyPolicy, AnyPolicy>>);
template <class P, class D>
concept Chains = requires { typename kvsnip::Chain<P, D>; };
static_assert(Chains<kvsnip::SnapKV, kvsnip::Scissorhands> && !Chains<kvsnip::Full, kvsnip::Scissorhands>, "the first of a chain must compress");
static_assert(!std::is_constructible_v<kvsnip::KVCache<float, kvsnip::Full>> && std::is_constructible_v<Planner, Shape, Index, AnyPolicy>);

TEST_CASE("A policy without hooks gets the defaults", "[slot_planner]") {
  const Nothing nothing;
  Scores scores;
  ObservesAndForgets observes;
  CHECK_FALSE(kvsnip::hooks::evicts(nothing, Phase::decode));
  CHECK(kvsnip::hooks::evicts(scores, Phase::decode));
  CHECK(kvsnip::hooks::evicts(scores, Phase::long_prompt));
  CHECK(kvsnip::hooks::wanted_rows(scores, {.num_queries = 7}) == 0);
  CHECK(kvsnip::hooks::wanted_rows(observes, {.num_queries = 7}) == 7);
  CHECK(kvsnip::hooks::protection(scores, Phase::decode).recent_window == 0);
  CHECK(kvsnip::hooks::eviction(scores, 100).count == 1);
  CHECK(kvsnip::hooks::bytes(scores) == 0);
}

// --- The engine's side

/// An engine's memory for one kv_head: which token is in which slot.
class Memory {
 public:
  /// Slots move, then the new tokens go in.
  void enter(std::span<const Index> order, std::span<const Index> new_slots, Index first_position) {
    if (!order.empty()) gather(order);
    for (const Index slot : new_slots) {
      if (slot >= std::ssize(tokens_)) tokens_.resize(static_cast<std::size_t>(slot + 1), -1);
      tokens_[static_cast<std::size_t>(slot)] = first_position++;
    }
  }
  void keep(std::span<const Index> kept) {
    if (!kept.empty()) gather(kept), tokens_.resize(kept.size());
  }
  void resize(Index size) { tokens_.resize(static_cast<std::size_t>(size)); }
  const Positions& tokens() const { return tokens_; }

 private:
  void gather(std::span<const Index> from) {
    Positions moved;
    for (const Index slot : from) moved.push_back(tokens_[static_cast<std::size_t>(slot)]);
    tokens_.swap(moved);
  }
  Positions tokens_;
};

Planner::Weights view(const Eigen::MatrixXf& weights) { return {weights.data(), weights.rows(), weights.cols(), Eigen::OuterStride<>(weights.outerStride())}; }
Positions list(std::span<const Index> positions) { return {positions.begin(), positions.end()}; }
Planner make_planner(const std::string& spec, Index budget) { return Planner(shape, budget, kvsnip::make_policy(spec)); }
/// Ends every kv_head of the open step, and the step.
void end(Planner& planner) {
  bool last = false;
  for (Index h = 0; h < shape.kv_heads; ++h)
    last = planner.on_attention(h, view(Eigen::MatrixXf::Constant(planner.size(h), planner.wanted_rows() * 2, 0.1f)));
  REQUIRE(last);
  planner.finish();
}

}  // namespace

TEST_CASE("An engine with its own memory holds what KVCache holds, in the same slots", "[slot_planner]") {
  const std::string spec = GENERATE("full", "streaming_llm(num_sinks=2)", "scissorhands(num_sinks=2, recent_window=3, history_window=9, drop=3)",
                                    "scissorhands(num_sinks=2, recent_window=3, history_window=9, mode=count)", "snapkv(observation_window=5)",
                                    "snapkv(observation_window=5)+scissorhands(recent_window=3, record_interval=2)");
  const auto seed = GENERATE(range<std::uint64_t>(0, 6));
  CAPTURE(spec, seed);
  Random random(seed);
  const auto cache = make_layer("float", spec, shape, 13);
  Planner planner = make_planner(spec, 13);
  std::vector<Memory> memory(2);
  Index first = 0;
  for (int update = 0; update < 60; ++update) {
    const Index count = update == 0 ? random.pick({1, 13, 40}) : random.pick({1, 1, 1, 1, 0, 2, 6, 25});
    if (random.one_in(10)) first += random.below(100);
    const kvsnip::UpdateOptions options{.more = random.one_in(8), .first_position = first};
    CAPTURE(update, first, count, options.more);
    // A key is its token's position: the cache's memory can be read as the engine's.
    Eigen::MatrixXf k(2, count);
    for (Index t = 0; t < count; ++t) k.col(t).setConstant(static_cast<float>(first + t));
    cache->update(k, -k, options);
    planner.plan(count, options);
    REQUIRE(planner.wanted_rows() == cache->wanted_rows());
    REQUIRE(planner.step().phase == cache->phase());
    bool last = false;
    for (Index h = 0; h < 2; ++h) {
      Memory& tokens = memory[static_cast<std::size_t>(h)];
      tokens.enter(planner.order(h), planner.new_slots(h), first);
      tokens.resize(planner.size(h));
      REQUIRE(tokens.tokens() == list(planner.positions(h)));
      REQUIRE(tokens.tokens() == cache->step_positions(h));
      const Eigen::MatrixXf weights = random.matrix(planner.size(h), planner.wanted_rows() * 2).cwiseAbs() / 10;
      if (planner.wanted_rows() == 0) last = planner.done(h), cache->done(h);
      else last = planner.on_attention(h, view(weights)), cache->on_attention(h, weights);
      REQUIRE(last == (h == 1));
    }
    planner.finish();
    for (Index h = 0; h < 2; ++h) {
      Memory& tokens = memory[static_cast<std::size_t>(h)];
      tokens.keep(planner.kept(h));
      REQUIRE(tokens.tokens() == list(planner.positions(h)));
      REQUIRE(tokens.tokens() == cache->positions(h));
      Index slot = 0;
      for (const Index token : tokens.tokens()) REQUIRE(cache->keys(h)(0, slot++) == static_cast<float>(token));
    }
    first += count;
  }
}

TEST_CASE("finish() in two halves is finish()", "[slot_planner]") {
  Planner whole = make_planner("streaming_llm(num_sinks=2)", 9), halves = whole;
  for (const Index count : {30, 1, 1, 20, 2}) {
    whole.plan(count), halves.plan(count);
    for (Index h = 0; h < 2; ++h) whole.done(h), halves.done(h);
    whole.finish();
    halves.choose_kept();
    const Positions kept = list(halves.kept(1));
    halves.commit();
    CHECK(kept == list(whole.kept(1)));
    CHECK(list(whole.positions(1)) == list(halves.positions(1)));
  }
}

TEST_CASE("A planner's step is taken back exactly", "[slot_planner]") {
  const std::string spec = GENERATE("streaming_llm(num_sinks=2)", "scissorhands(num_sinks=2, recent_window=3, mode=count)");
  Planner planner = make_planner(spec, 9), twin = planner;
  for (const Index count : {20, 1, 1, 1, 4, 1}) {
    for (const Index other : {1, 3, 30}) {
      planner.plan(other, {.more = other == 3});
      if (planner.wanted_rows() > 0) planner.on_attention(1, view(Eigen::MatrixXf::Constant(planner.size(1), 2, 0.3f)));
      planner.abandon();
      CHECK(list(planner.positions(1)) == list(twin.positions(1)));
      CHECK(planner.tokens_seen() == twin.tokens_seen());
    }
    planner.plan(count), twin.plan(count);
    end(planner), end(twin);
    CHECK(list(planner.positions(1)) == list(twin.positions(1)));
  }
}

TEST_CASE("A planner refuses calls that its step does not want", "[slot_planner]") {
  Planner planner = make_planner("scissorhands(num_sinks=2, recent_window=3)", 9);
  const Eigen::MatrixXf weights = Eigen::MatrixXf::Constant(4, 8, 0.1f);
  CHECK_THROWS_AS(planner.finish(), std::logic_error);  // no step is open
  CHECK_THROWS_AS(planner.abandon(), std::logic_error);
  CHECK_THROWS_AS(planner.done(0), std::logic_error);
  CHECK_THROWS_AS(planner.on_attention(0, view(weights)), std::logic_error);
  CHECK_THROWS_AS(planner.plan(-1), std::invalid_argument);
  planner.plan(4);
  CHECK_THROWS_AS(planner.plan(1), std::logic_error);
  CHECK_THROWS_AS(planner.finish(), std::logic_error);
  CHECK_THROWS_AS(planner.done(0), std::logic_error);
  CHECK_THROWS_AS(planner.on_attention(2, view(weights)), std::invalid_argument);
  CHECK_FALSE(planner.on_attention(0, view(weights)));
  CHECK_THROWS_AS(planner.on_attention(0, view(weights)), std::logic_error);
  CHECK_THROWS_AS(planner.finish(), std::logic_error);
  CHECK(planner.on_attention(1, view(weights)));
  planner.finish();
  CHECK_THROWS_AS(planner.finish(), std::logic_error);
  CHECK_THROWS_AS(planner.abandon(), std::logic_error);
  CHECK(list(planner.positions(0)) == consecutive(0, 4));
}

TEST_CASE("A planner that forgot its sequence starts anew, whatever was open", "[slot_planner]") {
  Planner planner = make_planner("scissorhands(num_sinks=2, recent_window=3, drop=4)", 9), fresh = planner;
  planner.plan(20), end(planner);
  planner.plan(1), end(planner);  // leaves a queue
  planner.plan(1);
  planner.reset();
  CHECK((planner.tokens_seen() == 0 && planner.size(0) == 0 && !planner.is_open()));
  for (const Index count : {12, 1, 1, 1, 1, 1, 1}) {
    planner.plan(count), fresh.plan(count);
    end(planner), end(fresh);
    CHECK(list(planner.positions(1)) == list(fresh.positions(1)));
  }
}

// --- What a policy is told

namespace {

/// Writes down the hooks' calls.
struct Witness {
  std::vector<std::string>* log;

  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    note("score", kv_head, slots.size());
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = static_cast<float>(slots.positions[slot]);
  }
  Eviction eviction(Index) const { return {.count = 2, .bulk = true}; }
  Index wanted_rows(const StepInfo& step) const { return std::min<Index>(step.num_queries, 2); }
  void observe(Index kv_head, const AttentionRows& rows) {
    note("observe", kv_head, rows.num_queries());
    CHECK(rows.first_position + rows.num_queries() <= rows.step.last_position() + 1);
    CHECK(rows.mean.rows() == std::ssize(rows.positions));
    CHECK(rows.num_visible(rows.num_queries() - 1) == rows.mean.rows() - (rows.step.last_position() - (rows.first_position + rows.num_queries() - 1)));
  }
  void on_insert(Index kv_head, Index slot, const SlotsView&) { note("insert", kv_head, slot); }
  void on_gather(Index kv_head, std::span<const Index> kept) { note("gather", kv_head, std::ssize(kept)); }
  void reset(const Shape&) {}
  void note(const char* hook, Index kv_head, Index number) {
    if (kv_head == 0) log->push_back(std::string(hook).append(" ").append(std::to_string(number)));
  }
};

}  // namespace

TEST_CASE("A policy hears of slots in the order in which things happen to them", "[slot_planner]") {
  std::vector<std::string> log;
  Planner planner(shape, 4, AnyPolicy(Witness{&log}));
  const auto heard = [&](Index count) {
    log.clear();
    planner.plan(count);
    end(planner);
    return log;
  };
  using Log = std::vector<std::string>;
  CHECK(heard(3) == Log{"insert 0", "insert 1", "insert 2", "observe 2"});
  CHECK(heard(1) == Log{"insert 3", "observe 1"});
  CHECK(heard(1) == Log{"score 4", "gather 2", "insert 2", "observe 1"});                       // a bulk drop first
  CHECK(heard(5) == Log{"insert 3", "insert 4", "insert 5", "insert 6", "insert 7", "observe 2", "score 8", "gather 4"});  // a long prompt
  log.clear();
  planner.plan(1);
  planner.abandon();
  CHECK(log == Log{"score 4"});  // of what is taken back it is told nothing
}

TEST_CASE("Rows that come in pieces reach a decode policy together, a prompt's as they come", "[slot_planner]") {
  std::vector<std::string> log;
  Planner planner(shape, 10, AnyPolicy(Witness{&log}));
  const auto in_pieces = [&] {
    log.clear();
    for (Index h = 0; h < 2; ++h)
      for (Index piece = 0; piece < 2; ++piece) planner.on_attention(h, view(Eigen::MatrixXf::Constant(planner.size(h), 2, 0.1f)));
    planner.finish();
    std::erase_if(log, [](const std::string& line) { return !line.starts_with("observe"); });
    return log;
  };
  planner.plan(5);
  CHECK(in_pieces() == std::vector<std::string>{"observe 1", "observe 1"});
  planner.plan(2);
  CHECK(in_pieces() == std::vector<std::string>{"observe 2"});
}

TEST_CASE("A policy that reads keys and values sees those of the slots it scores", "[slot_planner]") {
  struct ReadsVectors {  // the smallest key goes
    void score(Index, const SlotsView& slots, std::span<float> out) const {
      CHECK(slots.has_vectors());
      float key[2], value[2];
      for (Index slot = 0; slot < slots.size(); ++slot) {
        slots.read_key(slot, key), slots.read_value(slot, value);
        CHECK((key[0] == -value[0] && key[1] == static_cast<float>(slots.positions[static_cast<std::size_t>(slot)])));
        out[static_cast<std::size_t>(slot)] = key[0];
      }
    }
  };
  const std::string type = GENERATE("float", "half", "bfloat16");
  const Shape wide{.query_heads = 2, .kv_heads = 2, .head_dim = 2};
  const auto cache = make_layer(type, AnyPolicy(ReadsVectors{}), wide, 5);
  Index position = 0;
  for (const Index count : {4, 1, 1, 9, 1, 2, 20, 1}) {
    Eigen::MatrixXf k(4, count);
    for (Index t = 0; t < count; ++t, ++position) k.col(t) << static_cast<float>(position * 37 % 64), static_cast<float>(position), 1.0f, static_cast<float>(position);
    Eigen::MatrixXf v = -k;
    cache->update(k, v);
    for (Index h = 0; h < 2; ++h) cache->done(h);
  }
  // (4 1): 0 37 10 47 20. 5: 57, for the 0. 9 more, 30 3 40 13 50 23 60 33 6, and the five largest stay; and so on.
  const Eigen::MatrixXf keys = cache->keys(0);
  CHECK(cache->size(0) == 5);
  CHECK(keys.row(0).minCoeff() >= 50);
}

// --- The choice itself: victims are looked for by blocks of slots

TEST_CASE("Victims are those that sorting all slots would put first, also when equal scores lie blocks apart", "[slot_planner]") {
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const Index slots = random.pick({1, 63, 64, 65, 128, 300}), count = random.between(0, 12), kinds = random.pick({1, 2, 40});
    CAPTURE(seed, slots, count, kinds);
    std::vector<float> scores;
    for (Index slot = 0; slot < slots; ++slot) scores.push_back(static_cast<float>(random.below(kinds)));
    Positions positions = consecutive(0, slots);
    for (Index i = slots - 1; i > 0; --i) std::swap(positions[static_cast<std::size_t>(i)], positions[static_cast<std::size_t>(random.below(i + 1))]);
    const auto at = [&](const auto& list, Index slot) { return list[static_cast<std::size_t>(slot)]; };
    const auto before = [&](Index a, Index b) { return std::pair(at(scores, a), at(positions, a)) < std::pair(at(scores, b), at(positions, b)); };
    const auto eligible = [&](Index slot) { return at(positions, slot) % 5 != 0; };

    Positions found, expected;
    kvsnip::detail::select_lowest(scores, count, eligible, before, found);
    for (Index slot = 0; slot < slots; ++slot)
      if (eligible(slot)) expected.push_back(slot);
    std::sort(expected.begin(), expected.end(), before);
    expected.resize(static_cast<std::size_t>(std::min(count, static_cast<Index>(expected.size()))));
    CHECK(found == expected);
  }
}
