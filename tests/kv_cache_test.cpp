// KVCache's own promises: a value that is copied and moved between steps, views, inputs of every layout, and arguments that
// no one should pass.

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/scissorhands.hpp>
#include <kvsnip/policy/streaming_llm.hpp>

#include "support/catch.hpp"
#include "support/layer.hpp"
#include "support/positions.hpp"
#include "support/thrown.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using kvsnip::Bytes;
using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::Scissorhands;
using kvsnip::Shape;
using kvsnip::StreamingLLM;
using test::consecutive;
using test::make_layer;
using test::message_of;
using test::Random;
using test::same_bits;
using test::same_bytes;
using test::says;
using test::sorted;
using test::Tokens;

using Cache = KVCache<float, Scissorhands>;
using HalfCache = KVCache<Eigen::half, StreamingLLM>;
using Positions = std::vector<Index>;
constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 3};
constexpr Index largest = std::numeric_limits<Index>::max(), smallest = std::numeric_limits<Index>::min();

static_assert(kvsnip::StorageScalar<float> && kvsnip::StorageScalar<Eigen::half> && kvsnip::StorageScalar<Eigen::bfloat16>);
static_assert(!kvsnip::StorageScalar<double> && !kvsnip::StorageScalar<int> && !kvsnip::StorageScalar<const float> && !kvsnip::StorageScalar<float&>);
static_assert(std::is_copy_constructible_v<Cache> && std::is_copy_assignable_v<Cache>);
static_assert(std::is_nothrow_move_constructible_v<Cache> && std::is_nothrow_move_assignable_v<Cache>);
static_assert(sizeof(Cache::Step) <= 16 && std::is_trivially_copyable_v<Cache::Step>, "a step is a cheap handle");
static_assert(!std::is_default_constructible_v<Cache::Step>);
static_assert(std::is_same_v<Cache::Scalar, float> && std::is_same_v<Cache::Step::Scalar, float>);

Cache make_cache(Index budget = 12) { return Cache(shape, budget, Scissorhands{{.history_window = 9, .recent_window = 3, .num_sinks = 2, .drop = 3}}); }

/// One more update, with made-up weights.
void feed(Cache& cache, const Tokens& tokens, Index first, Index count) {
  Cache::Step step = cache.update(tokens.k.middleCols(first, count), tokens.v.middleCols(first, count));
  if (!step.wants_attention()) return;
  for (Index h = 0; h < shape.kv_heads; ++h)
    step.on_attention(h, Random(static_cast<std::uint64_t>(first)).matrix(step.size(h), step.wanted_rows() * 2).cwiseAbs());
}
Positions list(std::span<const Index> positions) { return {positions.begin(), positions.end()}; }
void check_same(const Cache& a, const Cache& b) {
  CHECK(a.tokens_seen() == b.tokens_seen());
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK(list(a.positions(h)) == list(b.positions(h)));
    CHECK(a.keys(h) == b.keys(h));
    CHECK(a.values(h) == b.values(h));
  }
}

}  // namespace

// --- A value

TEST_CASE("A copy of a cache goes its own way, and decides as the original would have", "[kv_cache]") {
  const Tokens tokens(shape, 90, 1);
  Cache original = make_cache();
  feed(original, tokens, 0, 30);
  for (Index first = 30; first < 45; ++first) feed(original, tokens, first, 1);
  Cache copy = original, assigned = make_cache(40);
  assigned = original;
  check_same(copy, original);
  CHECK(copy.keys(0).data() != original.keys(0).data());
  for (Index first = 45; first < 80; ++first) feed(original, tokens, first, 1);
  CHECK(copy.tokens_seen() == 45);
  for (Index first = 45; first < 80; ++first) feed(copy, tokens, first, 1), feed(assigned, tokens, first, 1);
  check_same(copy, original);
  check_same(assigned, original);
}

TEST_CASE("A cache moves with all it holds, also into a vector that grows", "[kv_cache]") {
  const Tokens tokens(shape, 60, 2);
  Cache twin = make_cache();
  std::vector<Cache> layers;
  layers.push_back(make_cache());
  for (Index first = 0; first < 60; first += 5) {
    feed(layers.front(), tokens, first, 5), feed(twin, tokens, first, 5);
    layers.push_back(make_cache());
  }
  check_same(layers.front(), twin);
  Cache moved = std::move(layers.front()), other = make_cache(30);
  other = std::move(moved);
  check_same(other, twin);
  CHECK(other.budget() == 12);
}

TEST_CASE("A cache assigned to itself stays what it is", "[kv_cache]") {
  const Tokens tokens(shape, 30, 3);
  Cache cache = make_cache();
  feed(cache, tokens, 0, 30);
  const Cache twin = cache;
  const Cache& self = cache;
  cache = self;
  check_same(cache, twin);
}

TEST_CASE("A cache whose step waits for its callbacks is not copied, and what it was to be copied to stays as it is", "[kv_cache]") {
  const Tokens tokens(shape, 60, 4);
  Cache open = make_cache(), target = make_cache(), twin = make_cache();
  feed(open, tokens, 0, 30), feed(target, tokens, 3, 7), feed(twin, tokens, 3, 7);
  Cache::Step step = open.update(tokens.k.col(30), tokens.v.col(30));
  CHECK_THROWS_AS(Cache(open), std::logic_error);
  CHECK_THROWS_AS(target = open, std::logic_error);
  check_same(target, twin);
  feed(target, tokens, 10, 20), feed(twin, tokens, 10, 20);
  check_same(target, twin);
  step.abandon();
  CHECK_NOTHROW(target = open);
  check_same(target, open);
}

TEST_CASE("A step that wants nothing does not keep its cache from being copied", "[kv_cache]") {
  const Tokens tokens(shape, 20, 5);
  HalfCache cache(shape, 8);
  cache.update(tokens.k.leftCols(8), tokens.v.leftCols(8));
  HalfCache copy = cache;
  for (Index t = 8; t < 20; ++t) {
    cache.update(tokens.k.col(t), tokens.v.col(t));
    copy.update(tokens.k.col(t), tokens.v.col(t));
    copy = HalfCache(copy);
  }
  CHECK(list(copy.positions(1)) == list(cache.positions(1)));
  CHECK(copy.keys(1).cast<float>() == cache.keys(1).cast<float>());
}

TEST_CASE("A handle of a step that is over stays so when the next step opens", "[kv_cache]") {
  const Eigen::MatrixXf k = Eigen::MatrixXf::Ones(6, 1);
  Cache cache = make_cache();
  std::vector<Cache::Step> over{cache.update(k, k)};
  over.back().abandon();
  for (int step = 0; step < 4; ++step) {
    const Cache::Step open = cache.update(k, k);
    for (Cache::Step& old : over) {
      CHECK_THROWS_AS(old.keys(0), std::logic_error);
      CHECK_THROWS_AS(old.values(0), std::logic_error);
      CHECK_THROWS_AS(old.positions(0), std::logic_error);
      CHECK_THROWS_AS(old.size(0), std::logic_error);
      CHECK_THROWS_AS(old.wants_attention(), std::logic_error);
      CHECK_THROWS_AS(old.on_attention(0, Eigen::MatrixXf::Ones(cache.size(0), 2)), std::logic_error);
      CHECK_THROWS_AS(old.done(0), std::logic_error);
      CHECK_THROWS_AS(old.abandon(), std::logic_error);
    }
    over.push_back(open);
    for (Index h = 0; h < shape.kv_heads; ++h) over.back().on_attention(h, Eigen::MatrixXf::Ones(cache.size(h), 2));
  }
  CHECK(cache.tokens_seen() == 4);
}

TEST_CASE("A step of what a cache was before an assignment is stale", "[kv_cache]") {
  const Eigen::MatrixXf k = Eigen::MatrixXf::Ones(6, 1);
  Cache cache = make_cache();
  for (int times = 0; times < 5; ++times) {
    Cache::Step before = cache.update(k, k);
    cache = make_cache();
    CHECK_THROWS_AS(before.abandon(), std::logic_error);
    Cache::Step after = cache.update(k, k);
    CHECK_THROWS_AS(before.abandon(), std::logic_error);
    after.abandon();
    Cache copied = make_cache();
    before = cache.update(k, k);
    cache = copied;
    after = cache.update(k, k);
    CHECK_THROWS_AS(before.abandon(), std::logic_error);
    after.abandon();
  }
}

TEST_CASE("reset() forgets the sequence and keeps the memory", "[kv_cache]") {
  const Tokens tokens(shape, 30, 6);
  Cache cache = make_cache();
  feed(cache, tokens, 0, 30);
  const Bytes before = cache.bytes();
  cache.update(tokens.k.leftCols(1), tokens.v.leftCols(1));  // an open step does not matter
  cache.reset();
  CHECK(cache.tokens_seen() == 0);
  CHECK(cache.capacity(0) == 12);
  CHECK(cache.bytes().keys == before.keys);
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK(cache.size(h) == 0);
    CHECK(cache.positions(h).empty());
    CHECK(cache.keys(h).cols() == 0);
  }
  Cache fresh = make_cache();
  for (Index first = 0; first < 30; first += 3) feed(cache, tokens, first, 3), feed(fresh, tokens, first, 3);
  check_same(cache, fresh);
}

// --- What it says of itself

TEST_CASE("size, capacity, budget and tokens_seen", "[kv_cache]") {
  const Tokens tokens(shape, 40, 7);
  Cache cache = make_cache();
  CHECK(cache.shape() == shape);
  CHECK(cache.budget() == 12);
  CHECK((cache.size(0) == 0 && cache.capacity(0) == 0 && cache.tokens_seen() == 0));
  feed(cache, tokens, 0, 5);
  CHECK((cache.size(1) == 5 && cache.capacity(1) >= 5 && cache.tokens_seen() == 5));
  feed(cache, tokens, 5, 30);
  CHECK((cache.size(1) == 12 && cache.capacity(1) == 12 && cache.tokens_seen() == 35));
  CHECK(cache.policy().options().drop == 3);
}

TEST_CASE("Keys and values are contiguous columns, 64-byte aligned, before and after a compaction", "[kv_cache]") {
  const Tokens tokens(shape, 40, 8);
  HalfCache cache(shape, 8);
  auto step = cache.update(tokens.k, tokens.v);
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 64 == 0; };
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK((aligned(step.keys(h).data()) && aligned(step.values(h).data())));
    CHECK((step.keys(h).rows() == 3 && step.keys(h).cols() == 40 && step.keys(h).outerStride() == 3));
    CHECK(step.keys(h).data() == cache.keys(h).data());
  }
  for (Index h = 0; h < shape.kv_heads; ++h) step.done(h);
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK((aligned(cache.keys(h).data()) && aligned(cache.values(h).data())));
    CHECK((cache.keys(h).rows() == 3 && cache.keys(h).cols() == 8));
  }
}

TEST_CASE("bytes() tells keys, values, positions, policy and scratch apart", "[kv_cache]") {
  HalfCache cache(shape, 100);
  const Tokens tokens(shape, 64, 9);
  cache.update(tokens.k, tokens.v);
  const Bytes bytes = cache.bytes();
  CHECK(bytes.keys == 2 * 64 * 3 * 2);
  CHECK(bytes.values == bytes.keys);
  CHECK(bytes.positions >= 2 * 64 * 8);
  CHECK(bytes.policy == 0);
  CHECK(bytes.total() == bytes.keys + bytes.values + bytes.positions + bytes.policy + bytes.scratch);
  Cache scissorhands = make_cache();
  feed(scissorhands, tokens, 0, 10);
  CHECK(scissorhands.bytes().policy > 0);
}

TEST_CASE("A step says what the update was", "[kv_cache]") {
  const Tokens tokens(shape, 40, 10);
  Cache cache = make_cache();
  feed(cache, tokens, 0, 12);
  const Cache::Step step = cache.update(tokens.k.middleCols(12, 2), tokens.v.middleCols(12, 2), {.first_position = 50});
  CHECK(step.shape() == shape);
  CHECK(step.phase() == kvsnip::Phase::decode);
  CHECK(step.num_queries() == 2);
  CHECK(step.first_position() == 50);
  CHECK(step.wanted_rows() == 2);
  CHECK(step.wants_attention());
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK(step.size(h) == 12);
    for (Index t = 0; t < 2; ++t) {
      const Index slot = step.new_slots(h)[static_cast<std::size_t>(t)];
      CHECK(step.positions(h)[static_cast<std::size_t>(slot)] == 50 + t);
      CHECK(step.keys(h).col(slot) == tokens.k.col(12 + t).segment(h * 3, 3));
      CHECK(step.values(h).col(slot) == tokens.v.col(12 + t).segment(h * 3, 3));
    }
  }
}

// --- Inputs

TEST_CASE("Keys and values may come in any layout", "[kv_cache]") {
  const Tokens tokens(shape, 9, 11);
  Cache expected = make_cache(), cache = make_cache();
  expected.update(tokens.k, tokens.v);
  SECTION("blocks of a larger matrix") {
    Eigen::MatrixXf k = Eigen::MatrixXf::Constant(20, 15, 99.0f), v = k;
    k.block(5, 3, 6, 9) = tokens.k, v.block(2, 6, 6, 9) = tokens.v;
    cache.update(k.block(5, 3, 6, 9), v.block(2, 6, 6, 9));
  }
  SECTION("row-major matrices") {
    const Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor> k = tokens.k, v = tokens.v;
    cache.update(k, v);
  }
  SECTION("expressions") { cache.update(2.0f * tokens.k / 2.0f, (tokens.v + tokens.v) / 2.0f); }
  SECTION("transposes and strides") {
    const Eigen::MatrixXf k = tokens.k.transpose();
    Eigen::MatrixXf wide = Eigen::MatrixXf::Zero(12, 9);
    for (Index row = 0; row < 6; ++row) wide.row(2 * row) = tokens.v.row(row);
    cache.update(k.transpose(), Eigen::Map<const Eigen::MatrixXf, 0, Eigen::Stride<Eigen::Dynamic, Eigen::Dynamic>>(wide.data(), 6, 9, {12, 2}));
  }
  SECTION("fixed sizes") {
    const Eigen::Matrix<float, 6, 9> k = tokens.k, v = tokens.v;
    cache.update(k, v);
  }
  for (Index h = 0; h < shape.kv_heads; ++h) CHECK((cache.keys(h) == expected.keys(h) && cache.values(h) == expected.values(h)));
}

TEST_CASE("A cache takes its own storage type, which float is rounded to", "[kv_cache]") {
  const Tokens tokens(shape, 9, 12);
  HalfCache from_float(shape, 20), from_half(shape, 20);
  const HalfCache::Matrix k = tokens.k.cast<Eigen::half>(), v = tokens.v.cast<Eigen::half>();
  from_float.update(tokens.k, tokens.v), from_half.update(k, v);
  for (Index h = 0; h < shape.kv_heads; ++h) {
    CHECK(from_half.keys(h).cast<float>() == from_float.keys(h).cast<float>());
    CHECK(from_half.keys(h).cast<float>() == k.middleRows(h * 3, 3).cast<float>());
    CHECK(from_half.values(h).cast<float>() == v.middleRows(h * 3, 3).cast<float>());
  }
  HalfCache::Matrix bad = k;
  bad(4, 3) = Eigen::half(std::numeric_limits<float>::infinity());
  CHECK(says(message_of([&] { from_half.update(bad, v); }), {"kv_head 1", "position 12"}));
}

TEST_CASE("An update of no token changes nothing, and may open, continue and close a series", "[kv_cache]") {
  const auto layer = make_layer("float", "scissorhands(num_sinks=2, recent_window=3)", shape, 12), twin = make_layer("float", "scissorhands(num_sinks=2, recent_window=3)", shape, 12);
  const Tokens tokens(shape, 60, 13);
  const auto nothing = [&](Index first, bool more) { layer->feed(tokens, first, 0, {.more = more}); };
  nothing(0, false), nothing(0, true), nothing(0, true);
  layer->feed(tokens, 0, 20, {.more = true}), twin->feed(tokens, 0, 20);
  nothing(20, true);
  CHECK(layer->size(0) == 20);
  nothing(20, false);
  CHECK(same_bytes(*layer, *twin));
  for (Index first = 20; first < 60; ++first) {
    nothing(first, false);
    CHECK(same_bits(layer->feed(tokens, first, 1), twin->feed(tokens, first, 1)));
  }
  CHECK(same_bytes(*layer, *twin));
}

TEST_CASE("first_position skips ahead, and an update of no token does not move the sequence's end", "[kv_cache]") {
  HalfCache cache(shape, 20);
  const Eigen::MatrixXf k = Eigen::MatrixXf::Ones(6, 2), none(6, 0);
  cache.update(k, k);
  cache.update(k, k, {.first_position = 10});
  cache.update(none, none, {.first_position = 20});
  cache.update(k, k);
  cache.update(k, k, {.first_position = 14});
  CHECK(list(cache.positions(0)) == Positions{0, 1, 10, 11, 12, 13, 14, 15});
  CHECK_THROWS_AS(cache.update(k, k, {.first_position = 15}), std::invalid_argument);
  CHECK(cache.tokens_seen() == 8);
}

// --- The callback

TEST_CASE("on_queries tells the policy what on_attention would", "[kv_cache]") {
  const std::string type = GENERATE("float", "half", "bfloat16");
  const std::string spec = GENERATE("scissorhands(num_sinks=2, recent_window=3, history_window=9)", "snapkv(observation_window=5)",
                                    "snapkv(observation_window=5, group=max)+scissorhands(record_interval=2, recent_window=3)");
  const auto by_kernel = make_layer(type, spec, shape, 12), by_queries = make_layer(type, spec, shape, 12);
  const Tokens tokens(shape, 90, 14);
  Index first = 0;
  CAPTURE(type, spec);
  for (const Index count : {40, 1, 1, 1, 1, 3, 1, 5, 1, 30, 1, 1, 2, 1, 1}) {
    CAPTURE(first, count);
    by_kernel->feed(tokens, first, count);
    by_queries->update(tokens, first, count);
    const Index rows = by_queries->wanted_rows();
    for (Index h = 0; h < shape.kv_heads; ++h) {
      Eigen::MatrixXf q(3, rows * 2);  // a query's heads side by side
      for (Index j = 0; j < rows; ++j)
        for (Index g = 0; g < 2; ++g) q.col(j * 2 + g) = tokens.q.col(first + count - rows + j).segment((h * 2 + g) * 3, 3);
      by_queries->on_queries(h, q);
    }
    REQUIRE(same_bytes(*by_kernel, *by_queries));
    first += count;
  }
}

TEST_CASE("Weights in any number of in-order pieces tell the policy what one piece would", "[kv_cache]") {
  const std::string spec = GENERATE("scissorhands(num_sinks=2, recent_window=3, history_window=9)", "snapkv(observation_window=5)",
                                    "snapkv(observation_window=5, group=max)+scissorhands(recent_window=3, mode=count)");
  const auto seed = GENERATE(range<std::uint64_t>(0, 5));
  const auto whole = make_layer("float", spec, shape, 12), pieces = make_layer("float", spec, shape, 12);
  const Tokens tokens(shape, 90, 15);
  Random random(seed);
  Index first = 0;
  CAPTURE(spec, seed);
  for (const Index count : {40, 1, 1, 3, 1, 5, 5, 5, 20, 6, 3}) {
    whole->update(tokens, first, count), pieces->update(tokens, first, count);
    first += count;
    const Index rows = whole->wanted_rows();
    for (Index h = 0; h < shape.kv_heads; ++h) {
      if (rows == 0) {
        whole->done(h), pieces->done(h);
        continue;
      }
      const Eigen::MatrixXf weights = random.matrix(whole->step_size(h), rows * 2).cwiseAbs() / 10;
      whole->on_attention(h, weights);
      for (Index row = 0, piece = 0; row < rows; row += piece) {
        piece = random.between(1, rows - row);
        Eigen::MatrixXf wide = Eigen::MatrixXf::Constant(weights.rows() + 2, piece * 2, -1.0f);  // a block of something larger
        wide.middleRows(1, weights.rows()) = weights.middleCols(row * 2, piece * 2);
        pieces->on_attention(h, wide.middleRows(1, weights.rows()));
      }
    }
    REQUIRE(same_bytes(*whole, *pieces));
  }
}

// --- What no one should pass

TEST_CASE("Impossible shapes are refused by name and value", "[kv_cache]") {
  const auto refused = [](const Shape& bad) { return says(message_of([&] { HalfCache(bad, 8); }), {"Shape"}); };
  for (const Index bad : {Index{0}, Index{-1}, smallest, largest, Index{1} << 40}) {
    CAPTURE(bad);
    CHECK(refused({.query_heads = 4, .kv_heads = bad, .head_dim = 3}));
    CHECK(refused({.query_heads = 4, .kv_heads = 2, .head_dim = bad}));
    CHECK(refused({.query_heads = bad, .kv_heads = 2, .head_dim = 3}));
    CHECK(refused({.query_heads = bad, .kv_heads = bad, .head_dim = bad}));
  }
  CHECK(refused({.query_heads = 3, .kv_heads = 2, .head_dim = 3}));
  CHECK(refused({.query_heads = 2, .kv_heads = 4, .head_dim = 3}));
  CHECK(refused({}));
  CHECK_THROWS_AS(HalfCache(Shape{}, 8), std::invalid_argument);
}

TEST_CASE("Impossible budgets are refused by name and value, and the largest possible one is as good as none", "[kv_cache]") {
  for (const Index bad : {Index{0}, Index{-1}, smallest, largest, kvsnip::unlimited_budget + 1}) {
    CHECK(says(message_of([&] { HalfCache(shape, bad); }), {"budget", std::to_string(bad)}));
    CHECK_THROWS_AS(make_cache(bad), std::invalid_argument);
  }
  const Tokens tokens(shape, 40, 16);
  Cache cache = make_cache(kvsnip::unlimited_budget);
  for (Index first = 0; first < 40; first += 4) feed(cache, tokens, first, 4);
  CHECK(list(cache.positions(1)) == consecutive(0, 40));
  CHECK(cache.capacity(1) < 80);
}

TEST_CASE("A kv_head out of range is refused wherever one is asked for", "[kv_cache]") {
  Cache cache = make_cache();
  const Tokens tokens(shape, 20, 17);
  feed(cache, tokens, 0, 5);
  Cache::Step step = cache.update(tokens.k.col(5), tokens.v.col(5));
  for (const Index bad : {Index{-1}, Index{2}, smallest, largest}) {
    CAPTURE(bad);
    CHECK_THROWS_AS(cache.size(bad), std::invalid_argument);
    CHECK_THROWS_AS(cache.capacity(bad), std::invalid_argument);
    CHECK_THROWS_AS(cache.positions(bad), std::invalid_argument);
    CHECK_THROWS_AS(cache.keys(bad), std::invalid_argument);
    CHECK_THROWS_AS(cache.values(bad), std::invalid_argument);
    CHECK_THROWS_AS(step.size(bad), std::invalid_argument);
    CHECK_THROWS_AS(step.keys(bad), std::invalid_argument);
    CHECK_THROWS_AS(step.values(bad), std::invalid_argument);
    CHECK_THROWS_AS(step.positions(bad), std::invalid_argument);
    CHECK_THROWS_AS(step.new_slots(bad), std::invalid_argument);
    CHECK_THROWS_AS(step.done(bad), std::invalid_argument);
    CHECK(says(message_of([&] { step.on_attention(bad, Eigen::MatrixXf::Ones(6, 2)); }), {"kv_head", std::to_string(bad)}));
  }
}

TEST_CASE("Empty matrices, and inputs that are too high or too wide, are refused by both sizes", "[kv_cache]") {
  Cache cache = make_cache();
  const Eigen::MatrixXf k = Eigen::MatrixXf::Ones(6, 2), none;
  CHECK(says(message_of([&] { cache.update(none, none); }), {"6", "0"}));
  CHECK_THROWS_AS(cache.update(none, k), std::invalid_argument);
  CHECK_THROWS_AS(cache.update(k, none), std::invalid_argument);
  CHECK(says(message_of([&] { cache.update(Eigen::MatrixXf::Ones(7, 2), k); }), {"k ", "6", "7"}));
  CHECK(says(message_of([&] { cache.update(k, Eigen::MatrixXf::Ones(12, 2)); }), {"v ", "6", "12"}));
  CHECK(says(message_of([&] { cache.update(k, Eigen::MatrixXf::Ones(6, 3)); }), {"2", "3"}));
  CHECK(cache.tokens_seen() == 0);
  CHECK_NOTHROW(cache.update(k, k));
}

TEST_CASE("Whatever is called in whatever order, a call works or is refused, and every slot holds its position's token", "[kv_cache]") {
  const std::string spec = GENERATE("full", "streaming_llm(num_sinks=1)", "scissorhands(num_sinks=1, recent_window=2, history_window=5)",
                                    "scissorhands(num_sinks=0, recent_window=2, mode=count, record_interval=2)",
                                    "snapkv(observation_window=3)+scissorhands(num_sinks=1, recent_window=2, keep_prompt=true)");
  const auto seed = GENERATE(range<std::uint64_t>(0, 6));
  CAPTURE(spec, seed);
  Random random(seed);
  auto cache = make_layer("float", spec, shape, 9);
  Index end = 0;  // where the sequence ended, as far as we know
  const Eigen::MatrixXf none(6, 0);
  const auto call = [&](Index what) {
    const Index h = random.between(random.one_in(20) ? -1 : 0, random.one_in(20) ? 2 : 1);
    const Index count = random.pick({0, 1, 1, 1, 2, 3, 8, 20});
    if (what < 4) {
      const Index skip = random.one_in(10) ? random.between(end > 0 ? -1 : 0, 3) : 0;
      Eigen::MatrixXf k(6, count);
      for (Index t = 0; t < count; ++t) k.col(t).setConstant(static_cast<float>(end + skip + t));
      cache->update(k, -k, {.more = random.one_in(10), .first_position = end + skip});
      end += skip + count;
    } else if (what < 8) {
      const Index rows = random.one_in(10) ? random.below(5) : cache->step_size(h), cols = random.one_in(5) ? random.below(5) : 2 * cache->wanted_rows();
      cache->on_attention(h, random.matrix(rows, cols).cwiseAbs() * (random.one_in(30) ? -1.0f : 0.1f));
    } else if (what < 10) {
      cache->on_queries(h, random.matrix(3, random.one_in(5) ? random.below(5) : 2 * cache->wanted_rows()));
    } else if (what < 13) {
      cache->done(h);
    } else if (what < 16) {
      Eigen::MatrixXf q = random.matrix(12, random.one_in(10) ? count : std::ssize(cache->new_slots(0))), out(12, q.cols());
      cache->attend(q, out);
    } else if (what == 16) {
      const Index before = end - std::ssize(cache->new_slots(0));
      cache->abandon();
      end = before;
    } else if (what == 17) {
      cache = cache->clone();
      cache->update(none, none);  // a copy has no step of its own
    } else {
      cache->reset();
      end = 0;
    }
  };
  cache->update(none, none);
  for (int calls = 0, refused = 0; calls < 400; ++calls) {
    try {
      call(random.below(random.one_in(20) ? 19 : 17));
    } catch (const std::invalid_argument&) {
      ++refused;
    } catch (const std::logic_error&) {
      ++refused;
    }
    for (Index h = 0; h < 2; ++h) {
      const Positions positions = cache->positions(h), ordered = sorted(positions);
      REQUIRE(std::adjacent_find(ordered.begin(), ordered.end()) == ordered.end());
      const Eigen::MatrixXf keys = cache->keys(h), values = cache->values(h);
      REQUIRE(keys.cols() == std::ssize(positions));
      for (Index slot = 0; slot < keys.cols(); ++slot)
        REQUIRE((keys(0, slot) == static_cast<float>(positions.begin()[slot]) && values(2, slot) == -keys(0, slot)));
    }
  }
}

TEST_CASE("Queries are refused once a head has had a piece of its rows, and nothing changes", "[kv_cache]") {
  Cache cache(shape, 48);
  const Eigen::MatrixXf k = Eigen::MatrixXf::Ones(6, 40), q = Eigen::MatrixXf::Ones(3, 80), weights = Eigen::MatrixXf::Ones(40, 80);
  Cache::Step step = cache.update(k, k);
  REQUIRE(step.wanted_rows() == 40);  // more than are computed at once
  step.on_attention(0, weights.leftCols(8));
  CHECK_THROWS_AS(step.on_queries(0, q), std::logic_error);
  CHECK_NOTHROW(step.on_attention(0, weights.rightCols(72)));
  CHECK_NOTHROW(step.on_queries(1, q));
  CHECK(cache.tokens_seen() == 40);
}

// --- Column sums

namespace {

/// Wants a prompt's column sums and its last row, and keeps what it is told.
class Summing {
 public:
  Index wanted_rows(const kvsnip::StepInfo& step) const { return std::min<Index>(1, step.num_queries); }
  void observe(Index kv_head, const kvsnip::AttentionRows&) { ++rows_[static_cast<std::size_t>(kv_head)]; }
  bool wants_column_sums(const kvsnip::StepInfo&) const { return true; }
  void observe_column_sums(Index kv_head, const kvsnip::ColumnSums& sums) {
    std::vector<float>& kept = sums_[static_cast<std::size_t>(kv_head)];
    kept.assign(sums.sums.begin(), sums.sums.end());
  }
  void score(Index kv_head, const kvsnip::SlotsView& slots, std::span<float> out) const {
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = slot < sums(kv_head).size() ? sums(kv_head)[slot] : static_cast<float>(slots.positions[slot]);
  }
  void on_gather(Index kv_head, std::span<const Index>) { sums_[static_cast<std::size_t>(kv_head)].clear(); }
  void reset(const Shape& s) { sums_.assign(static_cast<std::size_t>(s.kv_heads), {}), rows_.assign(sums_.size(), 0); }

  const std::vector<float>& sums(Index kv_head) const { return sums_[static_cast<std::size_t>(kv_head)]; }
  int rows(Index kv_head) const { return rows_[static_cast<std::size_t>(kv_head)]; }

 private:
  std::vector<std::vector<float>> sums_;
  std::vector<int> rows_;
};
struct ForgotTheQuestion {
  void observe_column_sums(Index, const kvsnip::ColumnSums&) {}
};
static_assert(kvsnip::ObservesColumnSums<Summing> && !kvsnip::ObservesColumnSums<Scissorhands> && !kvsnip::ObservesColumnSums<ForgotTheQuestion>);

}  // namespace

TEST_CASE("Column sums come from engines per query head, before or after the rows, and the last of what is wanted ends the head", "[kv_cache]") {
  const Tokens tokens(shape, 6, 1);
  const bool rows_first = GENERATE(false, true);
  KVCache<float, Summing> cache(shape, 4);
  auto step = cache.update(tokens.k.leftCols(5), tokens.v.leftCols(5));
  CHECK((step.wants_column_sums() && step.wanted_rows() == 1));
  Eigen::MatrixXf sums(5, 2);
  sums << 1, 3, 5, 5, 0, 1, 0.25, 0.25, 2, 0;
  const Eigen::MatrixXf row = Eigen::MatrixXf::Constant(5, 2, 0.2f);
  for (Index h = 0; h < 2; ++h) {
    if (rows_first) step.on_attention(h, row);
    CHECK_THROWS_AS(step.done(h), std::logic_error);
    CHECK_THROWS_AS(cache.update(tokens.k.rightCols(1), tokens.v.rightCols(1)), std::logic_error);
    CHECK(says(message_of([&] { step.on_column_sums(h, sums.topRows(4)); }), {"on_column_sums", "5 x 2", "4 x 2"}));
    CHECK(says(message_of([&] { step.on_column_sums(h, sums.leftCols(1)); }), {"on_column_sums", "5 x 2", "5 x 1"}));
    CHECK(says(message_of([&] { step.on_column_sums(h, -sums); }), {"on_column_sums", "finite and >= 0", std::to_string(h)}));
    CHECK_THROWS_AS(step.on_column_sums(2, sums), std::invalid_argument);
    step.on_column_sums(h, sums);
    if (h == 0 || !rows_first) CHECK(cache.policy().sums(h) == std::vector<float>{2, 5, 0.5f, 0.25f, 1});
    if (h == 0 || !rows_first) CHECK_THROWS_AS(step.on_column_sums(h, sums), std::logic_error);
    if (!rows_first) step.on_attention(h, row);
    CHECK_THROWS_AS(step.on_attention(h, row), std::logic_error);
  }
  CHECK(cache.size(0) == 4);  // the prompt was cut by its sums
  CHECK(std::ranges::equal(cache.positions(1), Positions{0, 1, 2, 4}));
  CHECK_FALSE(cache.update(tokens.k.rightCols(1), tokens.v.rightCols(1)).wants_column_sums());  // never while decoding
}

TEST_CASE("Queries are refused once a head has had its column sums, and nothing changes", "[kv_cache]") {
  const Tokens tokens(shape, 5, 1);
  KVCache<float, Summing> cache(shape, 20);
  auto step = cache.update(tokens.k, tokens.v);
  step.on_column_sums(0, Eigen::MatrixXf::Ones(5, 2));
  CHECK_THROWS_AS(step.on_queries(0, Eigen::MatrixXf::Ones(3, 10)), std::logic_error);
  CHECK(cache.policy().rows(0) == 0);
  CHECK_NOTHROW(step.on_attention(0, Eigen::MatrixXf::Ones(5, 2)));
  CHECK_NOTHROW(step.on_queries(1, Eigen::MatrixXf::Ones(3, 10)));
  CHECK((cache.policy().rows(0) == 1 && cache.policy().rows(1) == 1 && cache.policy().sums(1).size() == 5));
}

TEST_CASE("An abandoned prompt's column sums are forgotten", "[kv_cache]") {
  const Tokens tokens(shape, 9, 1);
  KVCache<float, Summing> cache(shape, 20);
  auto step = cache.update(tokens.k.leftCols(5), tokens.v.leftCols(5));
  step.on_column_sums(0, Eigen::MatrixXf::Ones(5, 2));
  CHECK(cache.policy().sums(0).size() == 5);
  step.abandon();
  CHECK(cache.policy().sums(0).empty());
  CHECK(cache.tokens_seen() == 0);
}

TEST_CASE("A chunk of no token wants no column sums", "[kv_cache]") {
  const Tokens tokens(shape, 9, 1);
  KVCache<float, Summing> cache(shape, 4);
  auto step = cache.update(tokens.k.leftCols(5), tokens.v.leftCols(5), {.more = true});
  for (Index h = 0; h < 2; ++h) step.on_column_sums(h, Eigen::MatrixXf::Ones(5, 2)), step.on_attention(h, Eigen::MatrixXf::Ones(5, 2));
  auto close = cache.update(tokens.k.leftCols(0), tokens.v.leftCols(0));
  CHECK_FALSE(close.wants_column_sums());
  for (Index h = 0; h < 2; ++h) close.done(h);
  CHECK(cache.size(0) == 4);
}
