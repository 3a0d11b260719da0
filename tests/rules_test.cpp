// The library's thirteen rules of behaviour, by number, and the protocol of a step. (Rule 12, no allocation, is in
// allocation_test.cpp.) Storage is float and every policy is behind AnyPolicy, unless a test says otherwise; that the rules
// hold for every storage type and every policy's own type is policy_contract_test.cpp's.

#include <kvsnip/registry.hpp>

#include "reference/attention.hpp"
#include "reference/snapkv.hpp"
#include "support/catch.hpp"
#include "support/layer.hpp"
#include "support/positions.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using kvsnip::AnyPolicy;
using kvsnip::AttentionRows;
using kvsnip::Eviction;
using kvsnip::Index;
using kvsnip::Phase;
using kvsnip::Protection;
using kvsnip::Scissorhands;
using kvsnip::Shape;
using kvsnip::SlotsView;
using kvsnip::SnapKV;
using kvsnip::StepInfo;
using test::consecutive;
using test::Layer;
using test::make_layer;
using test::message_of;
using test::Random;
using test::same_bits;
using test::same_bytes;
using test::says;
using test::sorted;
using test::Tokens;

using Positions = std::vector<Index>;
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr Shape one_head{.query_heads = 1, .kv_heads = 1, .head_dim = 2};
constexpr Shape two_heads{.query_heads = 4, .kv_heads = 2, .head_dim = 3};

/// Ranks slots by a function of their position. Wants no attention.
struct ByPosition {
  std::function<float(Index)> rank;
  Protection protect{};
  Eviction evict{};

  Protection protection(Phase) const { return protect; }
  Eviction eviction(Index) const { return evict; }
  void score(Index, const SlotsView& slots, std::span<float> out) const {
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = rank(slots.positions[slot]);
  }
};
/// Evicts the newest that it may: what is protected, and nothing else, survives next to the oldest.
std::unique_ptr<Layer> newest_first(const Shape& shape, Index budget, const Protection& protection = {}, const Eviction& eviction = {}) {
  return make_layer("float", AnyPolicy(ByPosition{[](Index position) { return -static_cast<float>(position); }, protection, eviction}), shape, budget);
}
std::unique_ptr<Layer> oldest_first(const Shape& shape, Index budget, const Protection& protection = {}) {
  return make_layer("float", AnyPolicy(ByPosition{[](Index position) { return static_cast<float>(position); }, protection}), shape, budget);
}

/// `count` more tokens; the step is left open.
void append(Layer& layer, Index count, const test::UpdateOptions& options = {}) {
  const Index rows = layer.shape().kv_heads * layer.shape().head_dim;
  layer.update(Eigen::MatrixXf::Constant(rows, count, 1.0f), Eigen::MatrixXf::Constant(rows, count, 2.0f), options);
}
/// Ends a kv_head with a weight for every slot, by its position and the query's.
void end_head(Layer& layer, Index kv_head, const std::function<float(Index position, Index query)>& weight) {
  const Index wanted = layer.wanted_rows(), group = layer.shape().group_size();
  if (wanted == 0) return layer.done(kv_head);
  const Positions positions = layer.step_positions(kv_head);
  const Index newest = *std::max_element(positions.begin(), positions.end());
  Eigen::MatrixXf weights(std::ssize(positions), wanted * group);
  for (Index column = 0; column < weights.cols(); ++column)
    for (Index slot = 0; slot < weights.rows(); ++slot) {
      const Index position = positions.begin()[slot], query = newest - wanted + 1 + column / group;
      weights(slot, column) = position <= query ? weight(position, query) : 0.0f;
    }
  layer.on_attention(kv_head, weights);
}
/// `count` more tokens, and the whole step.
void give(Layer& layer, Index count, const test::UpdateOptions& options = {},
          const std::function<float(Index, Index)>& weight = [](Index, Index) { return 1.0f; }) {
  append(layer, count, options);
  for (Index h = 0; h < layer.num_heads(); ++h) end_head(layer, h, weight);
}
/// What a kv_head holds, ascending.
Positions held(const Layer& layer, Index kv_head = 0) { return sorted(layer.positions(kv_head)); }
Positions operator+(Positions a, const Positions& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

// --- 1

TEST_CASE("Rule 1: a budget that holds every token gives the full cache's bits, and evicts nothing", "[rules]") {
  const std::string spec = GENERATE("streaming_llm", "scissorhands(history_window=7)", "scissorhands(mode=count, record_interval=3)", "snapkv",
                                    "snapkv+scissorhands");
  const Index prompt = GENERATE(1, 31, 61, 90);
  const Tokens tokens(two_heads, 100, 1);
  const auto layer = make_layer("float", spec, two_heads, 100), full = make_layer("float", "full", two_heads, 1);
  CAPTURE(spec, prompt);
  CHECK(same_bits(layer->feed(tokens, 0, prompt), full->feed(tokens, 0, prompt)));
  for (Index first = prompt; first < 100; ++first) REQUIRE(same_bits(layer->feed(tokens, first, 1), full->feed(tokens, first, 1)));
  CHECK(same_bytes(*layer, *full));
}

TEST_CASE("Rule 1: a free slot is used before a victim is made", "[rules]") {
  const bool bulk = GENERATE(false, true);
  const auto layer = newest_first(two_heads, 10, {}, {.count = 4, .bulk = bulk});
  give(*layer, 4);
  for (Index size = 5; size <= 10; ++size) {
    give(*layer, 1);
    CHECK(held(*layer, 1) == consecutive(0, size));
  }
  give(*layer, 1);  // in bulk: the four newest go, and leave three free slots
  CHECK(layer->size(1) == (bulk ? 7 : 10));
  if (!bulk) return;
  give(*layer, 2), give(*layer, 1);
  CHECK(held(*layer, 1) == consecutive(0, 6) + consecutive(10, 14));
}

// --- 2

TEST_CASE("Rule 2: after an update and its callbacks no kv_head holds more than its budget", "[rules]") {
  const std::string spec = GENERATE("streaming_llm", "scissorhands(recent_window=3)", "scissorhands(recent_window=3, mode=count)",
                                    "snapkv(observation_window=5)+scissorhands(recent_window=3)");
  const auto layer = make_layer("float", spec, two_heads, 11);
  CAPTURE(spec);
  for (const Index count : {30, 1, 1, 2, 5, 1, 7, 40, 1, 0, 3, 11, 12, 1}) {
    give(*layer, count);
    for (Index h = 0; h < 2; ++h) REQUIRE(layer->size(h) <= 11);
  }
}

TEST_CASE("Rule 2: a `more` series may exceed the budget until it closes", "[rules]") {
  const auto layer = newest_first(two_heads, 10);
  give(*layer, 8, {.more = true});
  give(*layer, 9, {.more = true});
  CHECK(layer->size(1) == 17);
  give(*layer, 0);
  CHECK(held(*layer, 1) == consecutive(0, 10));
}

TEST_CASE("Rule 2: a full cache and a prompt-only policy grow while decoding", "[rules]") {
  const auto full = make_layer("float", "full", one_head, 5), snapkv = make_layer("float", "snapkv(observation_window=2)", one_head, 5);
  give(*full, 9), give(*snapkv, 9);
  CHECK(full->size(0) == 9);
  CHECK(snapkv->size(0) == 5);
  for (const Index count : {1, 1, 20, 1}) give(*full, count), give(*snapkv, count);
  CHECK(full->size(0) == 32);
  CHECK(snapkv->size(0) == 28);
  give(*snapkv, 1, {.more = true}), give(*snapkv, 1);  // a `more` series is a prompt again
  CHECK(snapkv->size(0) == 5);
}

// --- 3

TEST_CASE("Rule 3: a full cache evicts before the new token attends", "[rules]") {
  const auto layer = oldest_first(two_heads, 6);
  give(*layer, 6);
  for (Index position = 6; position < 20; ++position) {
    append(*layer, 1);
    CHECK(layer->phase() == Phase::decode);
    CHECK(layer->step_size(1) == 6);
    CHECK(sorted(layer->step_positions(1)) == consecutive(position - 5, position + 1));
    for (Index h = 0; h < 2; ++h) layer->done(h);
  }
}

TEST_CASE("Rule 3: a new token is never its own victim, and overwrites the slot of the one that is", "[rules]") {
  const auto layer = newest_first(one_head, 6);  // nothing is protected, and the new token ranks lowest
  give(*layer, 6);
  for (Index position = 6; position < 12; ++position) {
    const Positions before = layer->positions(0);
    append(*layer, 1);
    const Index slot = layer->new_slots(0).front();
    CHECK(before.begin()[slot] == position - 1);
    CHECK(layer->step_positions(0).begin()[slot] == position);
    layer->done(0);
  }
}

TEST_CASE("Rule 3: several new tokens spare each other", "[rules]") {
  const auto layer = newest_first(one_head, 6);
  give(*layer, 5);  // part full
  give(*layer, 3);
  CHECK(held(*layer) == consecutive(0, 3) + consecutive(5, 8));
  give(*layer, 4);  // full
  CHECK(held(*layer) == consecutive(0, 2) + consecutive(8, 12));
  give(*layer, 6);
  CHECK(held(*layer) == consecutive(12, 18));
}

// --- 4

TEST_CASE("Rule 4: sinks and the recent window, the incoming token included, survive every decode step", "[rules]") {
  const Index sinks = GENERATE(0, 1, 3), recents = GENERATE(0, 1, 2, 5);
  const auto newest = newest_first(one_head, 9, {.num_sinks = sinks, .recent_window = recents});
  const auto oldest = oldest_first(one_head, 9, {.num_sinks = sinks, .recent_window = recents});
  give(*newest, 9), give(*oldest, 9);
  CAPTURE(sinks, recents);
  for (Index position = 9; position < 30; ++position) {
    give(*newest, 1), give(*oldest, 1);
    CHECK(held(*oldest) == consecutive(0, sinks) + consecutive(position - 8 + sinks, position + 1));
    // The newest that may go is the one that has just left the recent window; what was older than that stays.
    const Index kept = std::max<Index>(recents, 1);
    CHECK(held(*newest) == consecutive(0, 9 - kept) + consecutive(position + 1 - kept, position + 1));
  }
}

TEST_CASE("Rule 4: several tokens at once protect themselves and the rest of the recent window", "[rules]") {
  const Index count = GENERATE(1, 2, 3, 4, 5, 7);
  const auto layer = newest_first(one_head, 10, {.num_sinks = 1, .recent_window = 4});
  give(*layer, 10);
  give(*layer, count);
  const Index recents = std::max<Index>(4, count);
  CHECK(held(*layer) == consecutive(0, 10 - recents) + consecutive(10 + count - recents, 10 + count));
}

TEST_CASE("Rule 4: a prompt's compaction counts the next token as one of the newest", "[rules]") {
  const Index recents = GENERATE(0, 1, 2, 5), sinks = GENERATE(0, 2);
  const auto newest = newest_first(one_head, 9, {.num_sinks = sinks, .recent_window = recents});
  const auto oldest = oldest_first(one_head, 9, {.num_sinks = sinks, .recent_window = recents});
  give(*newest, 25), give(*oldest, 25);
  const Index kept = std::max<Index>(recents - 1, 0);
  CHECK(held(*newest) == consecutive(0, 9 - kept) + consecutive(25 - kept, 25));
  CHECK(held(*oldest) == consecutive(0, sinks) + consecutive(16 + sinks, 25));
}

TEST_CASE("Rule 4: the recent window counts tokens, whatever gaps there are between their positions", "[rules]") {
  const auto layer = newest_first(one_head, 6, {.recent_window = 3});
  give(*layer, 6);
  give(*layer, 1, {.first_position = 100});
  CHECK(held(*layer) == Positions{0, 1, 2, 4, 5, 100});
  give(*layer, 1);
  CHECK(held(*layer) == Positions{0, 1, 2, 5, 100, 101});
  give(*layer, 8, {.first_position = 200});
  CHECK(held(*layer) == Positions{0, 1, 2, 5, 206, 207});  // a long prompt
}

TEST_CASE("Rule 4: the sinks are the first positions of the sequence, wherever it starts", "[rules]") {
  const auto layer = oldest_first(one_head, 6, {.num_sinks = 2});
  give(*layer, 4, {.first_position = 100});
  for (int step = 0; step < 20; ++step) give(*layer, 1);
  CHECK(held(*layer) == Positions{100, 101, 120, 121, 122, 123});
}

TEST_CASE("Rule 4: keep_prompt keeps the whole first prompt, chunks and all, and only it", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(keep_prompt=true, num_sinks=0, recent_window=2, drop=1)", one_head, 12);
  give(*layer, 3, {.more = true});
  give(*layer, 4);
  for (int step = 0; step < 30; ++step) give(*layer, 1, {}, [](Index position, Index) { return position < 7 ? 0.0f : 1.0f; });
  CHECK(held(*layer) == consecutive(0, 7) + consecutive(32, 37));
  give(*layer, 40);
  CHECK(held(*layer) == consecutive(0, 7) + consecutive(72, 77));
}

TEST_CASE("Rule 4: a kept prompt that leaves no room for the recent window is refused, and nothing changes", "[rules]") {
  const std::string spec = GENERATE("scissorhands(keep_prompt=true, num_sinks=0, recent_window=5)",
                                    "snapkv(observation_window=4)+scissorhands(keep_prompt=true, num_sinks=0, recent_window=5)");
  const auto layer = make_layer("float", spec, one_head, 12);
  CHECK_THROWS_AS(append(*layer, 8), std::invalid_argument);
  CHECK(layer->tokens_seen() == 0);
  give(*layer, 4, {.more = true});
  CHECK_THROWS_AS(append(*layer, 4), std::invalid_argument);
  CHECK_THROWS_AS(append(*layer, 4, {.more = true}), std::invalid_argument);
  CHECK(held(*layer) == consecutive(0, 4));
  give(*layer, 3);  // leaves exactly five
  give(*layer, 5);
  CHECK(held(*layer) == consecutive(0, 12));
}

TEST_CASE("Rule 4: a budget that cannot hold what is protected is refused at construction", "[rules]") {
  const auto construct = [](const std::string& spec, Index budget) { return make_layer("float", spec, one_head, budget); };
  CHECK_THROWS_AS(construct("streaming_llm(num_sinks=4)", 4), std::invalid_argument);  // and the new token
  CHECK_NOTHROW(construct("streaming_llm(num_sinks=4)", 5));
  CHECK_THROWS_AS(construct("scissorhands(num_sinks=3, recent_window=5)", 7), std::invalid_argument);
  CHECK_NOTHROW(construct("scissorhands(num_sinks=3, recent_window=5)", 8));
  CHECK_THROWS_AS(construct("snapkv(observation_window=8)", 8), std::invalid_argument);
  CHECK_NOTHROW(construct("snapkv(observation_window=8)", 9));
  CHECK_THROWS_AS(construct("snapkv(observation_window=8, num_sinks=3)", 10), std::invalid_argument);
  CHECK_NOTHROW(construct("snapkv(observation_window=8, num_sinks=3)", 11));
  CHECK_THROWS_AS(construct("snapkv(observation_window=8)+scissorhands(num_sinks=3, recent_window=7)", 9), std::invalid_argument);
  CHECK_NOTHROW(construct("snapkv(observation_window=8)+scissorhands(num_sinks=3, recent_window=7)", 10));
  CHECK(says(message_of([&] { construct("snapkv(observation_window=8)", 8); }), {"observation_window", "8"}));
}

TEST_CASE("Rule 4: SnapKV protects its window at the compaction only, Scissorhands its recents afterwards", "[rules]") {
  const auto layer = make_layer("float", "snapkv(observation_window=4, kernel_size=1)+scissorhands(num_sinks=1, recent_window=2, drop=1)", one_head, 6);
  give(*layer, 20, {}, [](Index position, Index) { return position < 2 || position > 15 ? 0.0f : position < 4 ? 0.9f : 0.1f; });
  CHECK(held(*layer) == Positions{2, 3, 16, 17, 18, 19});  // position 0 is no sink of SnapKV's
  for (int step = 0; step < 5; ++step) give(*layer, 1, {}, [](Index position, Index) { return position < 4 ? 0.9f : 0.0f; });
  CHECK(held(*layer) == Positions{2, 3, 21, 22, 23, 24});  // the window has gone
}

// --- 5

TEST_CASE("Rule 5: of equal scores the newer position is kept", "[rules]") {
  const auto layer = make_layer("float", AnyPolicy(ByPosition{[](Index) { return 1.0f; }, {.num_sinks = 1}}), one_head, 6);
  give(*layer, 20);
  CHECK(held(*layer) == Positions{0, 15, 16, 17, 18, 19});
  give(*layer, 1);
  CHECK(held(*layer) == Positions{0, 16, 17, 18, 19, 20});
  give(*layer, 2);
  CHECK(held(*layer) == Positions{0, 18, 19, 20, 21, 22});
}

TEST_CASE("Rule 5: what a compaction keeps is in ascending position, also after slots were overwritten", "[rules]") {
  const auto layer = newest_first(two_heads, 8, {.recent_window = 3});
  give(*layer, 8);
  for (int step = 0; step < 5; ++step) give(*layer, 1);
  CHECK(layer->positions(1) != held(*layer, 1));
  give(*layer, 20);
  for (Index h = 0; h < 2; ++h) CHECK(layer->positions(h) == held(*layer, h));
}

TEST_CASE("Rule 5: the same calls give the same bytes on any number of threads", "[rules]") {
  const Shape shape{.query_heads = 8, .kv_heads = 8, .head_dim = 16};
  const Tokens tokens(shape, 90, 2);
  const auto run = [&](const test::ParallelFor& parallel_for) {
    auto layer = make_layer("float", "snapkv(observation_window=7)+scissorhands(recent_window=3, history_window=20)", shape, 24);
    Eigen::MatrixXf out(tokens.q.rows(), 90);
    out.leftCols(70) = layer->feed(tokens, 0, 70, {}, parallel_for);
    for (Index first = 70; first < 90; ++first) out.col(first) = layer->feed(tokens, first, 1, {}, parallel_for);
    return std::pair(std::move(layer), out);
  };
  const auto [expected, out] = run(test::serially);
  for (const Index threads : {1, 2, 4, 8}) {
    const auto [layer, other] = run(test::on_threads(threads));
    CHECK(same_bits(other, out));
    CHECK(same_bytes(*layer, *expected));
  }
}

// --- 6

TEST_CASE("Rule 6: scores are float32 whatever the storage type", "[rules]") {
  const std::string type = GENERATE("float", "half", "bfloat16");
  // Differences that half and bfloat16 would round away; then the oldest would go.
  const auto layer = make_layer(type, AnyPolicy(ByPosition{[](Index position) { return 1.0f - 0x1p-20f * static_cast<float>(position); }}), one_head, 6);
  give(*layer, 6), give(*layer, 1);
  CHECK(held(*layer) == Positions{0, 1, 2, 3, 4, 6});
  give(*layer, 8);
  CHECK(held(*layer) == Positions{0, 1, 2, 3, 4, 6});
}

TEST_CASE("Rule 6: weights are averaged over the query group before they are judged", "[rules]") {
  // Position 1 gets 0.4 from one query head and 0.2 from the other: 0.3, not low among 4. Position 2: 0.45 and 0.01: low.
  const auto layer = make_layer("float", "scissorhands(history_window=1, num_sinks=0, recent_window=1, drop=1)", {.query_heads = 2, .kv_heads = 1, .head_dim = 2}, 4);
  give(*layer, 3);
  append(*layer, 1);
  Eigen::MatrixXf weights(4, 2);
  weights << 0.25f, 0.25f, 0.4f, 0.2f, 0.45f, 0.01f, 0.25f, 0.25f;
  layer->on_attention(0, weights);
  append(*layer, 1);
  CHECK(sorted(layer->step_positions(0)) == Positions{0, 1, 3, 4});
}

TEST_CASE("Rule 6: softmax is float32 whatever the storage type", "[rules]") {
  const std::string type = GENERATE("half", "bfloat16");
  struct SumOfRows {  // of the weights of the last query
    double* sum;
    void observe(Index, const AttentionRows& rows) { *sum = rows.mean.rightCols(1).cast<double>().sum(); }
    void on_gather(Index, std::span<const Index>) {}
    void reset(const Shape&) {}
  };
  double sum = 0;
  const auto layer = make_layer(type, AnyPolicy(SumOfRows{&sum}), two_heads, 1000);
  const Tokens tokens(two_heads, 1001, 3);
  layer->feed(tokens, 0, 1000);
  CHECK(std::abs(sum - 1) < 1e-5);
  layer->feed(tokens, 1000, 1);
  CHECK(std::abs(sum - 1) < 1e-5);
}

// --- 7

TEST_CASE("Rule 7: positions are the sequence's, 64-bit, and never renumbered", "[rules]") {
  const Index far = (Index{1} << 40) + 3;
  const auto layer = oldest_first(one_head, 5, {.num_sinks = 1});
  give(*layer, 9);
  CHECK(held(*layer) == Positions{0, 5, 6, 7, 8});
  give(*layer, 2, {.first_position = far});
  CHECK(held(*layer) == Positions{0, 7, 8, far, far + 1});
  give(*layer, 1);  // goes on from there
  CHECK(held(*layer) == Positions{0, 8, far, far + 1, far + 2});
  CHECK(layer->tokens_seen() == 12);
}

TEST_CASE("Rule 7: positions that float32 cannot tell apart are told apart", "[rules]") {
  const auto layer = make_layer("float", "streaming_llm(num_sinks=1)", one_head, 5);
  const Index far = Index{1} << 50;
  give(*layer, 3, {.first_position = far});
  give(*layer, 20);
  CHECK(held(*layer) == Positions{far, far + 19, far + 20, far + 21, far + 22});
  for (int step = 0; step < 20; ++step) give(*layer, 1);
  CHECK(held(*layer) == Positions{far, far + 39, far + 40, far + 41, far + 42});
}

TEST_CASE("Rule 7: a key stays as it was given, whatever slot it moves to", "[rules]") {
  const Tokens tokens(two_heads, 60, 4);
  const auto layer = make_layer("float", "scissorhands(mode=count, num_sinks=1, recent_window=3, history_window=5)", two_heads, 12);
  layer->feed(tokens, 0, 30);
  for (Index first = 30; first < 60; ++first) layer->feed(tokens, first, 1);
  for (Index h = 0; h < 2; ++h) {
    Index slot = 0;
    for (const Index position : layer->positions(h)) CHECK(layer->keys(h).col(slot++) == tokens.k.col(position).segment(h * 3, 3));
  }
}

// --- 8

namespace {

/// The prefix positions that SnapKV keeps of 10: a window of 2, whose two rows' votes sum to `votes`.
Positions snapkv_keeps(const std::string& options, const std::vector<float>& votes, Index budget = 5) {
  const auto layer = make_layer("float", "snapkv(observation_window=2, " + options + ")", one_head, budget);
  give(*layer, 10, {}, [&](Index position, Index query) { return votes.begin()[position] * (query == 8 ? 0.25f : 0.75f); });
  Positions kept = layer->positions(0);
  CHECK(std::vector<Index>(kept.end() - 2, kept.end()) == Positions{8, 9});  // the window is whole
  kept.resize(kept.size() - 2);
  return kept;
}

}  // namespace

TEST_CASE("Rule 8: SnapKV keeps the best of the prefix by the window's pooled votes", "[rules]") {
  const std::vector<float> votes{4, 0, 0, 5, 0, 0, 2, 4, 0, 0};
  CHECK(snapkv_keeps("kernel_size=1", votes) == Positions{0, 3, 7});
  CHECK(snapkv_keeps("kernel_size=3", votes) == Positions{4, 6, 7});                       // 4/3 4/3 5/3 5/3 5/3 2/3 6/3 6/3
  CHECK(snapkv_keeps("kernel_size=3, count_padding=false", votes) == Positions{0, 6, 7});  // 4/2 at the start, 6/2 at the end
  CHECK(snapkv_keeps("kernel_size=3, pooling=max", votes) == Positions{2, 3, 4});          // 4 4 5 5 5 2 4 4
  CHECK(snapkv_keeps("kernel_size=1, num_sinks=2", votes) == Positions{0, 1, 3});
  CHECK(snapkv_keeps("kernel_size=1", votes, 3) == Positions{3});
}

TEST_CASE("Rule 8: SnapKV pools over the prefix, or over the whole row", "[rules]") {
  const std::vector<float> votes{4, 0, 0, 5, 0, 0, 2, 0, 9, 0};  // 9 within the window
  CHECK(snapkv_keeps("kernel_size=3", votes) == Positions{2, 3, 4});
  CHECK(snapkv_keeps("kernel_size=3, pool_over=row", votes) == Positions{3, 4, 7});
}

TEST_CASE("Rule 8: SnapKV reduces the group after the sum over the window, by mean or by maximum", "[rules]") {
  const auto kept = [](const std::string& group) {
    const auto layer = make_layer("float", "snapkv(observation_window=2, kernel_size=1, group=" + group + ")", {.query_heads = 2, .kv_heads = 1, .head_dim = 2}, 3);
    append(*layer, 8);
    Eigen::MatrixXf weights = Eigen::MatrixXf::Zero(8, 4);  // columns: both heads of query 6, both of query 7
    weights.row(1) << 6, 0, 0, 6;                           // each head 6; mean 6
    weights.row(4) << 0, 8, 0, 0;                           // one head 8, mean 4
    weights.row(5) << 0, 0, 7, 3;                           // one head 7, mean 5
    layer->on_attention(0, weights);
    return layer->positions(0);
  };
  CHECK(kept("mean") == Positions{1, 6, 7});
  CHECK(kept("max") == Positions{4, 6, 7});
}

TEST_CASE("Rule 8: SnapKV's defaults", "[rules]") {
  const kvsnip::SnapKVOptions options = SnapKV{}.options();
  CHECK(options.observation_window == 32);
  CHECK(options.kernel_size == 5);
  CHECK(options.pooling == SnapKV::Pooling::average);
  CHECK(options.pool_over == SnapKV::PoolOver::prefix);
  CHECK(options.count_padding);
  CHECK(options.group == SnapKV::Group::mean);
  CHECK(options.num_sinks == 0);
}

TEST_CASE("Rule 8: a prompt not longer than the budget is kept whole, one shorter than the window too", "[rules]") {
  const Index prompt = GENERATE(1, 3, 4, 5, 9, 10);
  const auto layer = make_layer("float", "snapkv(observation_window=4)", two_heads, 10);
  give(*layer, prompt);
  CHECK(layer->positions(1) == consecutive(0, prompt));
}

TEST_CASE("Rule 8: the votes are those of the last queries of the prompt's series, whatever its chunks", "[rules]") {
  const auto layer = make_layer("float", "snapkv(observation_window=4, kernel_size=1)", one_head, 9);
  give(*layer, 8);  // fits: an earlier prompt, which votes no more
  const auto vote_for = [](Index favourite) { return [=](Index position, Index query) { return position == favourite + query - 8 ? 0.9f : 0.01f; }; };
  give(*layer, 1, {.more = true}, vote_for(0));  // the query at 8 votes for position 0
  give(*layer, 1, {.more = true}, vote_for(2));  // 9 votes for 3
  append(*layer, 0);
  CHECK(layer->wanted_rows() == 0);
  layer->done(0);
  CHECK(held(*layer) == Positions{0, 2, 3, 4, 5, 6, 7, 8, 9});  // 1 is the oldest without a vote; the window is 6 to 9
  give(*layer, 2, {.more = true}, vote_for(0));  // 10 votes for 2, 11 for 3,
  give(*layer, 3, {}, vote_for(0));              // 12 for 4, 13 for 5, 14 for 6
  CHECK(held(*layer) == Positions{3, 4, 5, 6, 10, 11, 12, 13, 14});  // the last four queries' votes alone, and the newest without one
}

// --- 9

TEST_CASE("Rule 9: a slot is low when its weight is below one over the visible slots", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(history_window=1, num_sinks=0, recent_window=1, drop=1)", one_head, 4);
  give(*layer, 3);
  const std::vector<float> weights{0.25f, 0.2499f, 0.25f, 0.2501f};
  give(*layer, 1, {}, [&](Index position, Index) { return weights.begin()[position]; });
  give(*layer, 1);
  CHECK(held(*layer) == Positions{0, 2, 3, 4});  // equal to uniform is not low
}

TEST_CASE("Rule 9: fraction judges by the share of low rows, count by their number", "[rules]") {
  const auto victim = [](const std::string& mode) {
    const auto layer = make_layer("float", "scissorhands(num_sinks=0, recent_window=1, drop=1, mode=" + mode + ")", one_head, 4);
    give(*layer, 1);
    // Position 0 is low in 3 rows of 4, position 2 in 2 of 2.
    const auto low = [](Index a, Index b) { return [=](Index position, Index) { return position == a || position == b ? 0.0f : 1.0f; }; };
    give(*layer, 1, {}, low(0, -1));
    give(*layer, 1, {}, low(0, 2));
    give(*layer, 1, {}, low(0, 2));
    const Positions before = held(*layer);
    give(*layer, 1);
    Positions gone;
    const Positions after = held(*layer);
    std::set_difference(before.begin(), before.end(), after.begin(), after.end(), std::back_inserter(gone));
    return gone;
  };
  CHECK(victim("fraction") == Positions{2});
  CHECK(victim("count") == Positions{0});
}

TEST_CASE("Rule 9: rows older than the history window are forgotten, low or not", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(history_window=2, num_sinks=0, recent_window=1, drop=1)", one_head, 4);
  const auto low = [](Index a) { return [=](Index position, Index) { return position == a ? 0.0f : 1.0f; }; };
  give(*layer, 2, {}, low(0));   // 0 was low in two rows,
  give(*layer, 1, {}, low(-1));  // but not in the last two; 1 was in one of them
  give(*layer, 1, {}, low(1));
  give(*layer, 1);
  CHECK(held(*layer) == Positions{0, 2, 3, 4});
}

TEST_CASE("Rule 9: fraction's victims wait in a queue, lowest first, whatever happens meanwhile", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(history_window=10, num_sinks=0, recent_window=2, drop=3)", one_head, 8);
  give(*layer, 7);
  give(*layer, 1, {}, [](Index position, Index) { return position == 5 ? 0.0f : 1.0f; });
  const auto meanwhile = [](Index position, Index) { return position == 0 || position == 3 ? 0.0f : 1.0f; };  // too late to be chosen
  give(*layer, 1, {}, meanwhile);
  CHECK(held(*layer) == Positions{0, 1, 2, 3, 4, 6, 7, 8});
  give(*layer, 1, {}, meanwhile);
  CHECK(held(*layer) == Positions{1, 2, 3, 4, 6, 7, 8, 9});  // 0 and 1 were queued behind 5, as the oldest of the rest
  give(*layer, 1, {}, meanwhile);
  CHECK(held(*layer) == Positions{2, 3, 4, 6, 7, 8, 9, 10});
  give(*layer, 1, {}, meanwhile);
  CHECK(held(*layer) == Positions{2, 4, 6, 7, 8, 9, 10, 11});  // the next choice: 3 was low
}

TEST_CASE("Rule 9: count drops half the budget at once, fraction queues eight", "[rules]") {
  CHECK(Scissorhands{}.eviction(100).count == 8);
  CHECK_FALSE(Scissorhands{}.eviction(100).bulk);
  const Scissorhands count{{.mode = Scissorhands::Mode::count}};
  CHECK(count.eviction(101).count == 50);
  CHECK(count.eviction(101).bulk);
  const auto layer = make_layer("float", "scissorhands(mode=count, num_sinks=1, recent_window=2)", one_head, 10);
  give(*layer, 10), give(*layer, 1);
  CHECK(layer->size(0) == 6);
  const auto greedy = make_layer("float", "scissorhands(mode=count, num_sinks=1, recent_window=2, drop=1000)", one_head, 10);
  give(*greedy, 10), give(*greedy, 1);
  CHECK(held(*greedy) == Positions{0, 9, 10});  // all that may go
}

TEST_CASE("Rule 9: only rows whose position is a multiple of record_interval are asked for", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(record_interval=4, history_window=3, recent_window=1)", one_head, 100);
  append(*layer, 31);  // of 0, 4, ... 28 the last three are wanted: from 20 on
  CHECK(layer->wanted_rows() == 11);
  end_head(*layer, 0, [](Index, Index) { return 0.1f; });
  for (Index position = 31; position < 50; ++position) {
    append(*layer, 1);
    CHECK(layer->wanted_rows() == (position % 4 == 0 ? 1 : 0));
    end_head(*layer, 0, [](Index, Index) { return 0.1f; });
  }
  append(*layer, 5);  // 50 to 54, of which 52
  CHECK(layer->wanted_rows() == 3);
}

TEST_CASE("Rule 9: a slot that no row has seen is not evicted before one that was", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(record_interval=4, num_sinks=0, recent_window=1, drop=1)", one_head, 6);
  give(*layer, 5);  // the row of 4 saw 0 to 4, none low
  for (Index position = 5; position < 8; ++position) {
    give(*layer, 1);
    CHECK(held(*layer) == consecutive(position - 5, position + 1));
  }
}

// --- 10

TEST_CASE("Rule 10: a key, value or query that is not finite is refused by kv_head and position, and nothing changes", "[rules]") {
  const float bad = GENERATE(as<float>{}, not_a_number, infinity, -infinity);
  CAPTURE(bad);
  const Tokens tokens(two_heads, 9, 5);
  const auto layer = make_layer("float", "scissorhands(num_sinks=1, recent_window=2)", two_heads, 5);
  const auto twin = make_layer("float", "scissorhands(num_sinks=1, recent_window=2)", two_heads, 5);
  layer->feed(tokens, 0, 6), twin->feed(tokens, 0, 6);
  Eigen::MatrixXf broken = tokens.k.middleCols(6, 2);
  broken(4, 1) = bad;  // the second kv_head's, position 7
  const auto names_it = [](const auto& call) { return says(message_of(call), {"kv_head 1", "position 7"}); };
  CHECK(names_it([&] { layer->update(broken, tokens.v.middleCols(6, 2)); }));
  CHECK(names_it([&] { layer->update(tokens.k.middleCols(6, 2), broken); }));
  CHECK(names_it([&] { layer->update(broken.rightCols(1), tokens.v.middleCols(7, 1), {.first_position = 7}); }));
  CHECK(same_bytes(*layer, *twin));

  layer->update(tokens, 6, 2), twin->update(tokens, 6, 2);
  Eigen::MatrixXf q = tokens.q.middleCols(6, 2), out(12, 2), head_q = Eigen::MatrixXf::Ones(3, 4);
  q(9, 1) = bad, head_q(0, 3) = bad;
  CHECK(names_it([&] { layer->attend(q, out); }));
  CHECK(names_it([&] { layer->on_queries(1, head_q); }));
  Eigen::MatrixXf weights = Eigen::MatrixXf::Constant(5, 4, 0.1f);
  for (const float value : {bad, -0.001f}) {
    weights(3, 2) = value;
    CHECK(names_it([&] { layer->on_attention(1, weights); }));
  }
  for (Layer* each : {layer.get(), twin.get()}) each->attend(tokens.q.middleCols(6, 2), out);
  CHECK(same_bits(layer->feed(tokens, 8, 1), twin->feed(tokens, 8, 1)));
  CHECK(same_bytes(*layer, *twin));
}

TEST_CASE("Rule 10: values that a storage type cannot hold are refused", "[rules]") {
  const auto [type, limit] = GENERATE(table<std::string, float>({{"half", 65504.0f}, {"bfloat16", 1e18f}, {"float", 1e18f}}));
  const auto layer = make_layer(type, "full", one_head, 1);
  Eigen::MatrixXf x = Eigen::MatrixXf::Constant(2, 1, limit);
  CHECK_NOTHROW(layer->update(x, x));
  CHECK(layer->keys(0).allFinite());
  x(1, 0) = -limit * 1.01f;
  CHECK_THROWS_AS(layer->update(x, x), std::invalid_argument);
  CHECK(layer->size(0) == 1);
}

TEST_CASE("Rule 10: a row that sees nothing is a row of zeros, and is taken as such", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(num_sinks=0, recent_window=1)", one_head, 4);
  for (int step = 0; step < 9; ++step) CHECK_NOTHROW(give(*layer, 1, {}, [](Index, Index) { return 0.0f; }));
}

// --- 11

TEST_CASE("Rule 11: an update while a wanted callback is outstanding is refused, and nothing changes", "[rules]") {
  const auto layer = make_layer("float", "scissorhands(num_sinks=1, recent_window=2)", two_heads, 5);
  give(*layer, 4);
  append(*layer, 1);
  CHECK_THROWS_AS(append(*layer, 1), std::logic_error);
  end_head(*layer, 1, [](Index, Index) { return 0.1f; });
  CHECK_THROWS_AS(append(*layer, 1), std::logic_error);
  CHECK(layer->tokens_seen() == 5);
  end_head(*layer, 0, [](Index, Index) { return 0.1f; });
  CHECK_NOTHROW(append(*layer, 1));
}

TEST_CASE("Rule 11: an over-long prompt needs its callbacks, a decode step that wants nothing does not", "[rules]") {
  const auto layer = make_layer("float", "streaming_llm", two_heads, 8);
  append(*layer, 20);
  layer->done(0);
  CHECK_THROWS_AS(append(*layer, 1), std::logic_error);
  layer->done(1);
  append(*layer, 1);
  append(*layer, 1);
  layer->done(1);
  append(*layer, 1);
  CHECK(held(*layer, 0) == Positions{0, 1, 2, 3} + consecutive(19, 23));
}

TEST_CASE("Rule 11: a refused update leaves the step before it open, to be ended or taken back", "[rules]") {
  const auto layer = oldest_first(one_head, 6);
  give(*layer, 6);
  append(*layer, 2);
  CHECK_THROWS_AS(append(*layer, 1, {.first_position = 0}), std::invalid_argument);
  CHECK_THROWS_AS(layer->update(Eigen::MatrixXf::Constant(2, 1, not_a_number), Eigen::MatrixXf::Zero(2, 1)), std::invalid_argument);
  CHECK(sorted(layer->step_positions(0)) == consecutive(2, 8));
  layer->abandon();
  CHECK(held(*layer) == consecutive(0, 6));
}

TEST_CASE("Rule 11: shapes that do not match and positions that go back are refused, and nothing changes", "[rules]") {
  const Tokens tokens(two_heads, 30, 6);
  const std::string spec = "scissorhands(num_sinks=1, recent_window=2, drop=2)";
  const auto layer = make_layer("float", spec, two_heads, 8), twin = make_layer("float", spec, two_heads, 8);
  layer->feed(tokens, 0, 9), twin->feed(tokens, 0, 9);
  const Eigen::MatrixXf k = tokens.k.middleCols(9, 2);
  CHECK_THROWS_AS(layer->update(k.topRows(5), k.topRows(5)), std::invalid_argument);
  CHECK_THROWS_AS(layer->update(k, k.topRows(5)), std::invalid_argument);
  CHECK_THROWS_AS(layer->update(k, k.leftCols(1)), std::invalid_argument);
  for (const Index first : {Index{8}, Index{0}, Index{-2}, std::numeric_limits<Index>::min()})
    CHECK_THROWS_AS(layer->update(k, k, {.first_position = first}), std::invalid_argument);
  for (const Index first : {std::numeric_limits<Index>::max(), kvsnip::unlimited_budget, kvsnip::unlimited_budget - 1})
    CHECK_THROWS_AS(layer->update(k, k, {.first_position = first}), std::invalid_argument);
  for (Index first = 9; first < 30; ++first) REQUIRE(same_bits(layer->feed(tokens, first, 1), twin->feed(tokens, first, 1)));
  CHECK(same_bytes(*layer, *twin));
}

TEST_CASE("Rule 11: weights of the wrong size, and calls that the step does not want, are refused, and nothing is recorded", "[rules]") {
  const Tokens tokens(two_heads, 40, 7);
  const std::string spec = "scissorhands(num_sinks=1, recent_window=2, drop=2)";
  const auto layer = make_layer("float", spec, two_heads, 8), twin = make_layer("float", spec, two_heads, 8);
  layer->feed(tokens, 0, 9), twin->feed(tokens, 0, 9);
  layer->update(tokens, 9, 2), twin->update(tokens, 9, 2);
  const auto weights = [](Index rows, Index cols) { return Eigen::MatrixXf(Eigen::MatrixXf::Constant(rows, cols, 0.9f)); };
  for (const auto& [rows, cols] : std::vector<std::pair<Index, Index>>{{7, 4}, {9, 4}, {8, 3}, {8, 6}, {8, 0}, {0, 0}, {4, 8}})
    CHECK_THROWS_AS(layer->on_attention(0, weights(rows, cols)), std::invalid_argument);
  for (const Index h : {Index{-1}, Index{2}, std::numeric_limits<Index>::max()}) {
    CHECK_THROWS_AS(layer->on_attention(h, weights(8, 4)), std::invalid_argument);
    CHECK_THROWS_AS(layer->on_queries(h, weights(3, 4)), std::invalid_argument);
    CHECK_THROWS_AS(layer->done(h), std::invalid_argument);
  }
  CHECK_THROWS_AS(layer->on_queries(0, weights(3, 2)), std::invalid_argument);
  CHECK_THROWS_AS(layer->on_queries(0, weights(4, 4)), std::invalid_argument);
  CHECK_THROWS_AS(layer->done(0), std::logic_error);  // rows are wanted
  for (Layer* each : {layer.get(), twin.get()}) each->on_attention(0, weights(8, 2));  // a first piece
  CHECK_THROWS_AS(layer->done(0), std::logic_error);
  CHECK_THROWS_AS(layer->on_attention(0, weights(8, 4)), std::invalid_argument);  // more than is left
  for (Layer* each : {layer.get(), twin.get()}) each->on_attention(0, weights(8, 2));
  CHECK_THROWS_AS(layer->on_attention(0, weights(8, 2)), std::logic_error);  // this kv_head has ended
  CHECK_THROWS_AS(layer->on_queries(0, weights(3, 4)), std::logic_error);
  CHECK_THROWS_AS(layer->done(0), std::logic_error);
  for (Layer* each : {layer.get(), twin.get()}) each->on_attention(1, weights(8, 4));
  for (Index first = 11; first < 40; ++first) REQUIRE(same_bits(layer->feed(tokens, first, 1), twin->feed(tokens, first, 1)));
  CHECK(same_bytes(*layer, *twin));
}

TEST_CASE("Rule 11: a step that wants nothing takes any call as done", "[rules]") {
  const auto layer = make_layer("float", "streaming_llm", {.query_heads = 3, .kv_heads = 3, .head_dim = 2}, 8);
  append(*layer, 20);
  layer->done(0);
  layer->on_queries(1, Eigen::MatrixXf::Ones(2, 1));
  CHECK_THROWS_AS(layer->on_attention(1, Eigen::MatrixXf::Ones(20, 1)), std::logic_error);  // this kv_head has ended
  layer->on_attention(2, Eigen::MatrixXf::Ones(20, 20));
  CHECK(layer->size(1) == 8);
}

TEST_CASE("Rule 11: a step that is over refuses every call", "[rules]") {
  const auto layer = make_layer("float", "scissorhands", one_head, 20);
  const auto refused = [&] {
    Eigen::MatrixXf one(2, 1), weight(1, 1);
    one.setOnes(), weight.setOnes();
    CHECK_THROWS_AS(layer->phase(), std::logic_error);
    CHECK_THROWS_AS(layer->num_queries(), std::logic_error);
    CHECK_THROWS_AS(layer->first_position(), std::logic_error);
    CHECK_THROWS_AS(layer->wanted_rows(), std::logic_error);
    CHECK_THROWS_AS(layer->step_size(0), std::logic_error);
    CHECK_THROWS_AS(layer->step_positions(0), std::logic_error);
    CHECK_THROWS_AS(layer->new_slots(0), std::logic_error);
    CHECK_THROWS_AS(layer->attend(one, one), std::logic_error);
    CHECK_THROWS_AS(layer->on_attention(0, weight), std::logic_error);
    CHECK_THROWS_AS(layer->on_queries(0, one), std::logic_error);
    CHECK_THROWS_AS(layer->done(0), std::logic_error);
    CHECK_THROWS_AS(layer->abandon(), std::logic_error);
  };
  give(*layer, 1);  // has ended
  refused();
  append(*layer, 1);
  layer->abandon();
  refused();
  append(*layer, 1);
  layer->reset();
  refused();
  give(*layer, 1);
  CHECK(layer->tokens_seen() == 1);
}

// --- 13

TEST_CASE("Rule 13: chunked prefill keeps what one-shot prefill keeps, up to scores within 1e-5 of the cut", "[rules]") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 6));
  const Index count = 211, window = 16, budget = 60;
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 8};
  const Tokens tokens(shape, count, seed);
  Random random(seed + 100);
  const auto whole = make_layer("float", "snapkv(observation_window=16)", shape, budget);
  const auto chunked = make_layer("float", "snapkv(observation_window=16)", shape, budget);
  Eigen::MatrixXf expected = whole->feed(tokens, 0, count), out(expected.rows(), count);
  for (Index first = 0, chunk = 0; first < count; first += chunk) {
    chunk = std::min(random.between(1, 60), count - first);
    out.middleCols(first, chunk) = chunked->feed(tokens, first, chunk, {.more = first + chunk < count});
  }
  CHECK(test::largest_difference(out, expected) <= test::tolerance<float> * expected.cwiseAbs().maxCoeff());
  for (Index h = 0; h < 2; ++h) {
    std::vector<Eigen::MatrixXd> rows;
    const Eigen::MatrixXd keys = tokens.k.middleRows(h * 8, 8).cast<double>();
    for (Index g = 0; g < 2; ++g)
      rows.push_back(reference::attend(tokens.q.block((2 * h + g) * 8, count - window, 8, window).cast<double>(), count - window, keys, keys,
                                       consecutive(0, count)).weights);
    const reference::SnapKVResult literal = reference::snapkv(rows, {.budget = budget, .observation_window = window});
    std::vector<double> scores = literal.scores;
    std::nth_element(scores.begin(), scores.begin() + (budget - window - 1), scores.end(), std::greater<>());
    const double cut = scores.begin()[budget - window - 1];
    for (const Layer* layer : {whole.get(), chunked.get()}) {
      Positions differing;
      const Positions positions = held(*layer, h);
      std::set_symmetric_difference(positions.begin(), positions.end(), literal.kept.begin(), literal.kept.end(), std::back_inserter(differing));
      for (const Index position : differing) CHECK(test::close(literal.scores.begin()[position], cut, 1e-5, 0));
    }
  }
}

TEST_CASE("Rule 13: Scissorhands remembers the same rows of a prompt in chunks", "[rules]") {
  const std::string options = GENERATE("history_window=7", "history_window=400, record_interval=3", "history_window=7, mode=count");
  const Tokens tokens(two_heads, 70, 9);
  const auto whole = make_layer("float", "scissorhands(" + options + ")", two_heads, 20), chunked = make_layer("float", "scissorhands(" + options + ")", two_heads, 20);
  whole->feed(tokens, 0, 50);
  for (Index first = 0; first < 50; first += 5) chunked->feed(tokens, first, 5, {.more = first < 45});
  CHECK(same_bytes(*whole, *chunked));
  for (Index first = 50; first < 70; ++first) whole->feed(tokens, first, 1), chunked->feed(tokens, first, 1);
  CHECK(same_bytes(*whole, *chunked));
}

// --- Phases

TEST_CASE("An update is a prompt when the cache is empty, a series is open, or more tokens come than free and evictable slots hold", "[rules]") {
  const auto layer = newest_first(one_head, 10, {.num_sinks = 2, .recent_window = 3});
  const auto phase = [&](Index count, bool more = false) {
    append(*layer, count, {.more = more});
    const Phase result = layer->phase();
    layer->abandon();
    return result;
  };
  CHECK(phase(1) == Phase::prompt);
  CHECK(phase(10) == Phase::prompt);
  CHECK(phase(11) == Phase::long_prompt);
  CHECK(phase(1, true) == Phase::long_prompt);  // it may become one
  give(*layer, 0);
  CHECK(phase(1) == Phase::prompt);  // still empty
  give(*layer, 4);
  CHECK(phase(1) == Phase::decode);
  CHECK(phase(8) == Phase::decode);  // 6 free, and 2 of 4 evictable: the other 2 are sinks
  CHECK(phase(9) == Phase::long_prompt);
  give(*layer, 6);
  CHECK(phase(8) == Phase::decode);
  CHECK(phase(9) == Phase::long_prompt);
  CHECK(phase(1, true) == Phase::long_prompt);
  give(*layer, 1, {.more = true});
  CHECK(phase(1) == Phase::long_prompt);  // closes a series that is over the budget
  CHECK(phase(0) == Phase::long_prompt);
}

TEST_CASE("What is protected is not evictable: with sinks and recents of a part-full cache a second turn may be a prompt", "[rules]") {
  const auto layer = newest_first(one_head, 10, {.num_sinks = 4, .recent_window = 6});
  give(*layer, 10);
  give(*layer, 1);
  CHECK(held(*layer) == consecutive(0, 4) + consecutive(5, 11));
  append(*layer, 6);
  CHECK(layer->phase() == Phase::decode);
  layer->abandon();
  append(*layer, 7);
  CHECK(layer->phase() == Phase::long_prompt);
}

TEST_CASE("A query sees the positions up to its own, skipped ones or not", "[rules]") {
  const auto layer = make_layer("float", "full", one_head, 1);
  const Tokens tokens(one_head, 12, 10);
  Positions positions;
  const auto check = [&](Index first_token, Index count, Index first_position) {
    layer->update(tokens.k.middleCols(first_token, count), tokens.v.middleCols(first_token, count), {.first_position = first_position});
    for (Index t = 0; t < count; ++t) positions.push_back(first_position + t);
    Eigen::MatrixXf out(2, count);
    layer->attend(tokens.q.middleCols(first_token, count), out);
    const auto expected = reference::attend(tokens.q.middleCols(first_token, count).cast<double>(), first_position,
                                            tokens.k.leftCols(first_token + count).cast<double>(), tokens.v.leftCols(first_token + count).cast<double>(), positions);
    CHECK(test::largest_difference(out, expected.out) <= test::tolerance<float> * expected.out.cwiseAbs().maxCoeff());
  };
  check(0, 3, 5);
  check(3, 4, 100);
  check(7, 1, 104);
  check(8, 4, 1000);
}

// --- Taking a step back

namespace {

/// Starts a step of `count` tokens that are not in `tokens`, gets it somewhere, and takes it back.
void phantom(Layer& layer, Random& random) {
  const Shape& shape = layer.shape();
  const Tokens others(shape, random.pick({0, 1, 1, 1, 2, 3, 9, 30}), static_cast<std::uint64_t>(random.below(1000)));
  const bool skip = random.one_in(4);
  layer.update(others.k, others.v, {.more = random.one_in(5), .first_position = skip ? Index{1} << 30 : -1});
  const Index wanted = layer.wanted_rows(), group = shape.group_size();
  switch (random.below(4)) {
    case 0: break;  // nothing came
    case 1:         // some kv_heads ended, but not the last one
      for (Index h = 1; h < shape.kv_heads; ++h)
        if (wanted == 0) layer.done(h);
        else layer.on_attention(h, Eigen::MatrixXf::Constant(layer.step_size(h), wanted * group, 0.01f));
      break;
    case 2:  // every kv_head got some of its rows
      for (Index h = 0; h < shape.kv_heads && wanted > 1; ++h)
        layer.on_attention(h, Eigen::MatrixXf::Constant(layer.step_size(h), (wanted - 1) * group, 0.01f));
      break;
    default: {  // the executor throws half-way, if there is anything to run
      if (others.count() == 0) break;
      Eigen::MatrixXf out(others.q.rows(), others.count());
      const auto breaks = [](Index n, test::FunctionRef fn) {
        for (Index i = 0; i < n - 1; ++i) fn(i);
        throw std::runtime_error("a worker died");
      };
      CHECK_THROWS_AS(layer.attend(others.q, out, breaks), std::runtime_error);
    }
  }
  layer.abandon();
}

}  // namespace

TEST_CASE("A step that is taken back leaves no trace: later decisions are those of a cache that never saw it", "[rules]") {
  const std::string spec = GENERATE("full", "streaming_llm", "scissorhands(recent_window=3, num_sinks=2, drop=3, history_window=9)",
                                    "scissorhands(recent_window=3, num_sinks=2, mode=count, history_window=9)",
                                    "scissorhands(recent_window=1, num_sinks=0, record_interval=3)", "snapkv(observation_window=5, kernel_size=3)",
                                    "snapkv(observation_window=5, group=max)+scissorhands(recent_window=3, history_window=9)",
                                    "streaming_llm+scissorhands(mode=count, recent_window=3)");
  const auto seed = GENERATE(range<std::uint64_t>(0, 4));
  CAPTURE(spec, seed);
  const Shape shape{.query_heads = 6, .kv_heads = 3, .head_dim = 3};
  const Tokens tokens(shape, 400, seed);
  Random random(seed);
  const auto layer = make_layer("float", spec, shape, 17), twin = make_layer("float", spec, shape, 17);
  for (Index first = 0, update = 0; update < 45; ++update) {
    const Index count = update == 0 ? random.pick({1, 17, 40}) : random.pick({1, 1, 1, 1, 0, 2, 5, 30});
    const bool more = random.one_in(8);
    CAPTURE(update, first, count, more);
    for (Index n = random.below(3); n > 0; --n) {
      phantom(*layer, random);
      REQUIRE(same_bytes(*layer, *twin));
    }
    REQUIRE(same_bits(layer->feed(tokens, first, count, {.more = more}), twin->feed(tokens, first, count, {.more = more})));
    REQUIRE(same_bytes(*layer, *twin));
    first += count;
  }
}

TEST_CASE("An abandoned step gives back the keys, values and slots that it overwrote or dropped", "[rules]") {
  const std::string type = GENERATE("float", "half", "bfloat16");
  const bool bulk = GENERATE(false, true);
  const Index count = GENERATE(1, 4, 30);
  const auto layer = make_layer(type, AnyPolicy(ByPosition{[](Index position) { return static_cast<float>(position * 7 % 5); }, {}, {.count = 3, .bulk = bulk}}), two_heads, 9);
  const Tokens tokens(two_heads, 60, 11);
  layer->feed(tokens, 0, 9), layer->feed(tokens, 9, 1), layer->feed(tokens, 10, 1);
  const auto before = layer->clone();
  for (int again = 0; again < 3; ++again) {
    layer->update(tokens, 20, count);
    CHECK_FALSE(same_bytes(*layer, *before));
    layer->abandon();
    CHECK(same_bytes(*layer, *before));
  }
  layer->feed(tokens, 11, count), before->feed(tokens, 11, count);
  CHECK(same_bytes(*layer, *before));
}

TEST_CASE("A policy that throws leaves the update undone and the step open to be taken back", "[rules]") {
  struct Fragile {  // throws in the hook it is told to
    const std::string* breaks;
    void fail_in(const char* hook) const {
      if (*breaks == hook) throw std::runtime_error("no more memory");
    }
    void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
      if (kv_head == 1) fail_in("score");
      for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = *breaks == "nan" ? not_a_number : static_cast<float>(slots.positions[slot]);
    }
    void observe(Index kv_head, const AttentionRows&) {
      if (kv_head == 1) fail_in("observe");
    }
    void on_gather(Index, std::span<const Index>) {}
    void reset(const Shape&) {}
  };
  std::string breaks;
  const auto layer = make_layer("float", AnyPolicy(Fragile{&breaks}), two_heads, 6), twin = make_layer("float", AnyPolicy(Fragile{&breaks}), two_heads, 6);
  const Tokens tokens(two_heads, 40, 12);
  layer->feed(tokens, 0, 6), twin->feed(tokens, 0, 6);
  for (const std::string what : {"score", "nan"}) {  // in decode: the update fails
    breaks = what;
    CHECK_THROWS(layer->update(tokens, 6, 1));
    CHECK(same_bytes(*layer, *twin));
  }
  for (const std::string what : {"score", "nan", "observe"}) {  // in a prompt: the last kv_head's call fails
    breaks = what;
    layer->update(tokens, 6, 10);
    Eigen::MatrixXf out(12, 10);
    CHECK_THROWS(layer->attend(tokens.q.middleCols(6, 10), out));
    layer->abandon();
    CHECK(same_bytes(*layer, *twin));
  }
  breaks.clear();
  for (Index first = 6; first < 20; first += 2) CHECK(same_bits(layer->feed(tokens, first, 2), twin->feed(tokens, first, 2)));
  CHECK(same_bits(layer->feed(tokens, 20, 20), twin->feed(tokens, 20, 20)));
  CHECK(same_bytes(*layer, *twin));
}
