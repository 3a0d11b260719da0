// What every policy's cache does, whatever the policy: one suite over all of them, storage types, query groups, and sizes around
// every edge.

#include "reference/attention.hpp"
#include "support/catch.hpp"
#include "support/layer.hpp"
#include "support/positions.hpp"
#include "support/tolerance.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace {

using kvsnip::Index;
using kvsnip::Phase;
using kvsnip::Shape;
using test::Layer;
using test::PolicyCase;
using test::Promise;
using test::Random;
using test::sorted;
using test::Tokens;

constexpr Index budget = 13;  // prime, and the smallest that leaves every policy room to choose

struct Update {
  Index count = 1;
  bool more = false;
};
using Schedule = std::vector<Update>;

Schedule operator+(Schedule a, const Schedule& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
Schedule decode(Index steps) { return Schedule(static_cast<std::size_t>(steps)); }

/// Prompts of every size that an edge is near, then decode; chunks; several tokens at once; long second turns; no token at all.
std::vector<Schedule> schedules() {
  std::vector<Schedule> all;
  for (const Index prompt : {1, 2, 4, 5, 6, 11, 12, 13, 14, 15, 26, 31, 37}) all.push_back(Schedule{{prompt}} + decode(19));
  all.push_back(decode(40));
  all.push_back(Schedule{{3, true}, {10, true}, {1, false}} + decode(15));
  all.push_back(Schedule{{7, true}, {20, true}, {0, true}, {2, false}} + decode(15));
  all.push_back(Schedule{{0, true}, {30, true}, {0, false}} + decode(15));
  all.push_back(Schedule{{0}, {20}} + decode(5) + Schedule{{0}, {2}, {3}, {1}, {5}, {7}, {8}, {1}, {11}, {12}, {13}, {14}, {2}});
  all.push_back(Schedule{{9}} + decode(9) + Schedule{{29}} + decode(9) + Schedule{{4, true}, {17, true}, {1, false}} + decode(9));
  return all;
}
Index num_tokens(const Schedule& schedule) {
  Index sum = 0;
  for (const Update& update : schedule) sum += update.count;
  return sum;
}

const std::vector<Shape> shapes{{.query_heads = 3, .kv_heads = 3, .head_dim = 4},   // a query head each
                                {.query_heads = 8, .kv_heads = 2, .head_dim = 3},   // groups of 4
                                {.query_heads = 6, .kv_heads = 1, .head_dim = 5}};  // one kv_head for all

/// Whether a (sorted) is within b (sorted).
bool within(const std::vector<Index>& a, const std::vector<Index>& b) { return std::includes(b.begin(), b.end(), a.begin(), a.end()); }
/// The first positions below `sinks` and the `recents` newest of `positions` (sorted).
std::vector<Index> protected_of(const std::vector<Index>& positions, Index sinks, Index recents) {
  const Index size = std::ssize(positions);
  std::vector<Index> result;
  for (Index i = 0; i < size; ++i)
    if (positions.begin()[i] < sinks || i >= size - recents) result.push_back(positions.begin()[i]);
  return result;
}

/// What an update left in a kv_head that could hold the positions `all` (sorted).
void check_held(const Layer& layer, const Promise& promise, Index kv_head, const std::vector<Index>& all, const Update& update, Phase phase) {
  const std::vector<Index> slots = layer.positions(kv_head), held = sorted(slots);
  const bool compacts = phase != Phase::decode && promise.evicts_prompt && !update.more;
  const bool evicts = phase == Phase::decode && promise.evicts_decode;
  REQUIRE(std::adjacent_find(held.begin(), held.end()) == held.end());
  REQUIRE(within(held, all));
  if (std::ssize(all) <= layer.budget(kv_head) || !(compacts || evicts)) {
    REQUIRE(held == all);
  } else if (evicts) {
    if (promise.drops_in_bulk) REQUIRE(std::ssize(held) <= layer.budget(kv_head));
    else REQUIRE(std::ssize(held) == layer.budget(kv_head));
    REQUIRE(within(protected_of(all, promise.decode_sinks, std::max(promise.recent_window, update.count)), held));
  } else {
    REQUIRE(std::ssize(held) == layer.budget(kv_head));
    REQUIRE(within(protected_of(all, promise.prompt_sinks, promise.kept_of_prompt), held));
    REQUIRE(slots == held);  // in order
  }
}

/// Every slot has the key and value of its position.
void check_vectors(const Layer& layer, Index kv_head, const Tokens& tokens) {
  const Index dim = layer.shape().head_dim;
  const Eigen::MatrixXf keys = layer.keys(kv_head), values = layer.values(kv_head);
  Index slot = 0;
  bool same = true;
  for (const Index position : layer.positions(kv_head)) {
    same = same && keys.col(slot) == tokens.k.col(position).segment(kv_head * dim, dim) && values.col(slot) == tokens.v.col(position).segment(kv_head * dim, dim);
    ++slot;
  }
  REQUIRE((same && keys.cols() == slot));
}

/// All updates. @return the outputs, a column a token
Eigen::MatrixXf run(Layer& layer, const Tokens& tokens, const Schedule& schedule, const test::ParallelFor& parallel_for = test::serially) {
  Eigen::MatrixXf out(tokens.q.rows(), num_tokens(schedule));
  Index first = 0;
  for (const Update& update : schedule) {
    out.middleCols(first, update.count) = layer.feed(tokens, first, update.count, {.more = update.more}, parallel_for);
    first += update.count;
  }
  return out;
}

/// Heads in another order: new head i is head order[i].
Tokens permuted(const Tokens& tokens, const Shape& shape, const std::vector<Index>& order) {
  Tokens result = tokens;
  Index h = 0;
  for (const Index from : order) {
    const Index rows = shape.head_dim, query_rows = shape.group_size() * shape.head_dim;
    result.k.middleRows(h * rows, rows) = tokens.k.middleRows(from * rows, rows);
    result.v.middleRows(h * rows, rows) = tokens.v.middleRows(from * rows, rows);
    result.q.middleRows(h * query_rows, query_rows) = tokens.q.middleRows(from * query_rows, query_rows);
    ++h;
  }
  return result;
}

}  // namespace

TEST_CASE("A kv_head holds no more than its budget: sinks, recents, and other tokens that came, each once with its own key and value", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  for (const Shape& shape : shapes)
    for (const Schedule& schedule : schedules()) {
      const auto layer = policy.make(shape, budget);
      Tokens tokens(shape, num_tokens(schedule), 1);
      tokens.k = layer->stored(tokens.k), tokens.v = layer->stored(tokens.v);
      Index first = 0;
      for (const Update& update : schedule) {
        CAPTURE(policy.name, shape.kv_heads, schedule.front().count, first, update.count, update.more);
        std::vector<std::vector<Index>> all;
        for (Index h = 0; h < shape.kv_heads; ++h) {
          all.push_back(sorted(layer->positions(h)));
          for (Index t = 0; t < update.count; ++t) all.back().push_back(first + t);
        }
        layer->update(tokens, first, update.count, {.more = update.more});
        const Phase phase = layer->phase();
        Eigen::MatrixXf out(tokens.q.rows(), update.count);
        layer->attend(tokens.q.middleCols(first, update.count), out);
        first += update.count;
        REQUIRE(layer->tokens_seen() == first);
        for (Index h = 0; h < shape.kv_heads; ++h) {
          check_held(*layer, policy.promise, h, all[static_cast<std::size_t>(h)], update, phase);
          if (!policy.promise.merges) check_vectors(*layer, h, tokens);
        }
      }
    }
}

TEST_CASE("Outputs are the softmax attention over the tokens that the step held", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  if (policy.promise.merges) return;  // what it holds is no longer the tokens'
  const Shape shape = GENERATE(from_range(shapes));
  const Index dim = shape.head_dim, group = shape.group_size();
  const Schedule schedule = Schedule{{7, true}, {20, true}, {2, false}} + decode(9) + Schedule{{3}, {1}, {5}, {21}} + decode(4);
  const auto layer = policy.make(shape, budget);
  Tokens tokens(shape, num_tokens(schedule), 2);
  tokens.k = layer->stored(tokens.k), tokens.v = layer->stored(tokens.v), tokens.q = layer->stored(tokens.q);
  Index first = 0;
  for (const Update& update : schedule) {
    CAPTURE(policy.name, shape.kv_heads, first, update.count);
    layer->update(tokens, first, update.count, {.more = update.more});
    std::vector<std::vector<Index>> positions;
    for (Index h = 0; h < shape.kv_heads; ++h) positions.push_back(layer->step_positions(h));
    Eigen::MatrixXf out(tokens.q.rows(), update.count);
    layer->attend(tokens.q.middleCols(first, update.count), out);
    for (Index head = 0; head < shape.query_heads; ++head) {
      const std::vector<Index>& held = positions[static_cast<std::size_t>(head / group)];
      Eigen::MatrixXd keys(dim, std::ssize(held)), values(dim, std::ssize(held));
      Index slot = 0;
      for (const Index position : held) {
        keys.col(slot) = tokens.k.col(position).segment(head / group * dim, dim).cast<double>();
        values.col(slot++) = tokens.v.col(position).segment(head / group * dim, dim).cast<double>();
      }
      const Eigen::MatrixXd expected =
          reference::attend(tokens.q.block(head * dim, first, dim, update.count).cast<double>(), first, keys, values, held).out;
      REQUIRE(test::largest_difference(out.middleRows(head * dim, dim), expected) <= test::tolerance<float> * expected.cwiseAbs().maxCoeff());
    }
    first += update.count;
  }
}

TEST_CASE("A budget that fits all gives the full cache's outputs bit for bit, and evicts nothing", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Shape shape = GENERATE(from_range(shapes));
  for (const Schedule& schedule : {Schedule{{1}} + decode(30), Schedule{{61}} + decode(5), Schedule{{33, true}, {40, true}, {5, false}} + decode(5),
                                   Schedule{{11}, {3}, {1}, {35}, {1}, {0}, {2}}, decode(12)}) {
    CAPTURE(policy.name, shape.kv_heads, schedule.front().count);
    const Index count = num_tokens(schedule);
    const Tokens tokens(shape, count, 3);
    const auto layer = policy.make(shape, std::max<Index>(count, 12)), full = test::make_layer(policy.type, "full", shape, 1);
    const Eigen::MatrixXf out = run(*layer, tokens, schedule);
    CHECK(test::same_bits(out, run(*full, tokens, schedule)));
    CHECK(test::same_bytes(*layer, *full));
  }
}

TEST_CASE("Permuting the kv_heads permutes the results", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  if (!policy.promise.heads_alike) return;
  const Index group = GENERATE(1, 4);
  const Shape shape{.query_heads = 3 * group, .kv_heads = 3, .head_dim = 4};
  const std::vector<Index> order{2, 0, 1};
  const Schedule schedule = Schedule{{29}} + decode(17) + Schedule{{3}, {19}, {1}};
  const Tokens tokens(shape, num_tokens(schedule), 4), others = permuted(tokens, shape, order);
  const auto a = policy.make(shape, budget), b = policy.make(shape, budget);
  Tokens outs = tokens;  // as queries: their heads are permuted likewise
  outs.q = run(*a, tokens, schedule);
  CAPTURE(policy.name);
  CHECK(test::same_bits(run(*b, others, schedule), permuted(outs, shape, order).q));
  Index h = 0;
  for (const Index from : order) {
    CHECK(b->positions(h) == a->positions(from));
    CHECK(test::same_bits(b->keys(h), a->keys(from)));
    CHECK(test::same_bits(b->values(h), a->values(from)));
    ++h;
  }
}

TEST_CASE("Equal calls give equal bytes, on any number of threads", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Shape shape{.query_heads = 10, .kv_heads = 5, .head_dim = 7};
  const Schedule schedule = Schedule{{7, true}, {20, true}, {2, false}} + decode(9) + Schedule{{3}, {21}, {1}};
  const Tokens tokens(shape, num_tokens(schedule), 5);
  const auto expected = policy.make(shape, budget);
  const Eigen::MatrixXf out = run(*expected, tokens, schedule);
  for (const Index threads : {0, 1, 2, 4}) {
    CAPTURE(policy.name, threads);
    const auto layer = policy.make(shape, budget);
    CHECK(test::same_bits(run(*layer, tokens, schedule, threads == 0 ? test::serially : test::on_threads(threads)), out));
    CHECK(test::same_bytes(*layer, *expected));
  }
}

TEST_CASE("A cache that forgot its sequence is as good as new", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Shape shape = shapes[1];
  const Schedule before = Schedule{{7, true}, {20}} + decode(9), schedule = Schedule{{17}} + decode(17) + Schedule{{3}, {21}, {1}};
  const Tokens others(shape, num_tokens(before), 6), tokens(shape, num_tokens(schedule), 7);
  const auto used = policy.make(shape, budget), fresh = policy.make(shape, budget);
  run(*used, others, before);
  used->reset();
  CAPTURE(policy.name);
  CHECK(used->tokens_seen() == 0);
  CHECK(used->size(1) == 0);
  CHECK(test::same_bits(run(*used, tokens, schedule), run(*fresh, tokens, schedule)));
  CHECK(test::same_bytes(*used, *fresh));
}

TEST_CASE("A prompt in chunks, split anywhere, keeps the positions and gives the outputs of the whole prompt", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Shape shape = GENERATE(from_range(shapes));
  const Index count = GENERATE(14, 29, 70);
  const Tokens tokens(shape, count, 8);
  const auto whole = policy.make(shape, budget);
  const Eigen::MatrixXf expected = run(*whole, tokens, {{count}});
  std::vector<Schedule> splits{{{count, true}, {0, false}}, {{0, true}, {count, false}}, {{5, true}, {1, true}, {1, true}, {count - 7, false}}};
  for (Index split = 1; split < count; split += count / 14) splits.push_back({{split, true}, {count - split, false}});
  for (const Schedule& schedule : splits) {
    CAPTURE(policy.name, shape.kv_heads, count, schedule.front().count);
    const auto layer = policy.make(shape, budget);
    REQUIRE(test::largest_difference(run(*layer, tokens, schedule), expected) <= test::tolerance<float> * expected.cwiseAbs().maxCoeff());
    for (Index h = 0; h < shape.kv_heads; ++h) REQUIRE(layer->positions(h) == whole->positions(h));
  }
}

TEST_CASE("A policy decides the same behind AnyPolicy, made from its spec", "[contract]") {
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  if (policy.spec == "custom") return;
  const Shape shape = shapes[1];
  for (const Schedule& schedule : {Schedule{{29}} + decode(40), Schedule{{7, true}, {20}, {3}, {1}, {21}, {1}, {2}, {5}} + decode(20)}) {
    const Tokens tokens(shape, num_tokens(schedule), 9);
    const auto own = policy.make(shape, budget), erased = test::make_layer(policy.type, policy.spec, shape, budget);
    CAPTURE(policy.name, policy.spec);
    CHECK(test::same_bits(run(*own, tokens, schedule), run(*erased, tokens, schedule)));
    CHECK(test::same_bytes(*own, *erased));
  }
}
