// attend() against plain softmax attention in double, for everything that a kernel might treat apart: storage types,
// head_dims that are no multiple of a vector, query groups, odd lengths, prompts, decode, several tokens at once.

#include <kvsnip/registry.hpp>

#include "reference/attention.hpp"
#include "support/catch.hpp"
#include "support/layer.hpp"
#include "support/tolerance.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using kvsnip::AttentionRows;
using kvsnip::ColumnSums;
using kvsnip::Index;
using kvsnip::Phase;
using kvsnip::Shape;
using kvsnip::SlotsView;
using kvsnip::StepInfo;
using test::Random;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr Index all = std::numeric_limits<Index>::max();

/// What a Recorder was told of one kv_head.
struct Recorded {
  Index first_position = -1, num_queries = 0;
  bool in_order = true;
  Eigen::MatrixXf mean, per_query_head;
  Eigen::VectorXf column_sums;
};

/// Wants the last `rows` queries of every update, and column sums if so asked, and writes down what it is told. Evicts the
/// oldest.
class Recorder {
 public:
  Recorder(Index rows, bool sums, bool query_heads, std::vector<Recorded>* log) : rows_(rows), sums_(sums), query_heads_(query_heads), log_(log) {}

  bool wants_column_sums(const StepInfo&) const { return sums_; }
  void observe_column_sums(Index kv_head, const ColumnSums& sums) {
    Recorded& head = (*log_)[static_cast<std::size_t>(kv_head)];
    head.in_order = head.in_order && head.column_sums.size() == 0;  // once
    head.column_sums = Eigen::Map<const Eigen::VectorXf>(sums.sums.data(), static_cast<Index>(sums.sums.size()));
  }

  Index wanted_rows(const StepInfo& step) const { return std::min(rows_, step.num_queries); }
  bool wants_query_heads() const { return query_heads_; }
  void observe(Index kv_head, const AttentionRows& rows) {
    Recorded& head = (*log_)[static_cast<std::size_t>(kv_head)];
    if (head.num_queries == 0) head.first_position = rows.first_position;
    head.in_order = head.in_order && head.first_position + head.num_queries == rows.first_position;
    head.num_queries += rows.num_queries();
    append(head.mean, rows.mean), append(head.per_query_head, rows.per_query_head);
  }
  void score(Index, const SlotsView& slots, std::span<float> out) const {
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = static_cast<float>(slots.positions[slot]);
  }
  void on_gather(Index, std::span<const Index>) {}
  void reset(const Shape& shape) { log_->assign(static_cast<std::size_t>(shape.kv_heads), {}); }

 private:
  static void append(Eigen::MatrixXf& whole, const AttentionRows::Weights& piece) {
    whole.conservativeResize(piece.rows(), whole.cols() + piece.cols());
    whole.rightCols(piece.cols()) = piece;
  }
  Index rows_;
  bool sums_, query_heads_;
  std::vector<Recorded>* log_;  // by kv_head; the test's
};

/// A cache with a Recorder, the tokens it is given, and what they attend to.
class Recording {
 public:
  Recording(const std::string& type, const Shape& shape, Index rows, Index budget = 100000, bool sums = false, bool query_heads = true)
      : sums_(sums), query_heads_(query_heads), cache_(test::make_layer(type, kvsnip::AnyPolicy(Recorder(rows, sums, query_heads, &log_)), shape, budget)) {}

  const Shape& shape() const { return cache_->shape(); }
  Index tokens_seen() const { return cache_->tokens_seen(); }
  const Recorded& recorded(Index kv_head) const { return log_[static_cast<std::size_t>(kv_head)]; }
  Eigen::MatrixXf stored(const Eigen::MatrixXf& x) const { return cache_->stored(x); }

  /// An update, attended to: its output; and what was attended to, by kv_head.
  struct Result {
    Eigen::MatrixXf out;
    std::vector<std::vector<Index>> positions;
    std::vector<Eigen::MatrixXd> keys, values;
    Index wanted_rows = 0;
    bool wanted_sums = false;
  };
  Result update(const Eigen::MatrixXf& k, const Eigen::MatrixXf& v, const Eigen::MatrixXf& q) {
    log_.assign(log_.size(), {});
    cache_->update(k, v);
    Result result;
    result.wanted_rows = cache_->wanted_rows(), result.wanted_sums = wants_sums(cache_->phase());
    for (Index h = 0; h < shape().kv_heads; ++h) {
      result.positions.push_back(cache_->step_positions(h));
      result.keys.push_back(cache_->keys(h).cast<double>());
      result.values.push_back(cache_->values(h).cast<double>());
    }
    result.out = Eigen::MatrixXf::Constant(q.rows(), q.cols(), std::numeric_limits<float>::quiet_NaN());
    cache_->attend(q, result.out);
    return result;
  }
  /// Tokens that nobody attends to: the policy is told of zero weights.
  void append(const Eigen::MatrixXf& k) {
    cache_->update(k, k);
    for (Index h = 0, wanted = cache_->wanted_rows(); h < shape().kv_heads && wanted > 0; ++h)
      cache_->on_attention(h, Eigen::MatrixXf::Zero(cache_->step_size(h), wanted * shape().group_size()));
  }

  /// A prompt's step wants them.
  bool wants_query_heads() const { return query_heads_; }
  bool wants_sums(Phase phase) const { return sums_ && phase != Phase::decode; }
  /// The same update, ended by on_queries. @return what was told of each kv_head
  std::vector<Recorded> weigh(const Eigen::MatrixXf& k, const Eigen::MatrixXf& q) {
    log_.assign(log_.size(), {});
    cache_->update(k, k);
    const Index queries = wants_sums(cache_->phase()) ? k.cols() : cache_->wanted_rows(), group = shape().group_size(), dim = shape().head_dim;
    for (Index h = 0; h < shape().kv_heads; ++h) {
      Eigen::MatrixXf wanted(dim, queries * group);
      for (Index j = 0; j < queries; ++j)
        for (Index g = 0; g < group; ++g) wanted.col(j * group + g) = q.col(q.cols() - queries + j).segment((h * group + g) * dim, dim);
      cache_->on_queries(h, wanted);
    }
    return log_;
  }

 private:
  std::vector<Recorded> log_;
  bool sums_, query_heads_;
  std::unique_ptr<test::Layer> cache_;
};

const std::vector<std::string> storage_types{"float", "half", "bfloat16"};

/// One update of `count` tokens: outputs and the recorded rows are the reference's, on the inputs as stored. What remains is
/// the error of float sums, whatever the storage type.
void check_update(Recording& cache, Index count, Random& random) {
  const Shape shape = cache.shape();
  const Index dim = shape.head_dim, group = shape.group_size(), first = cache.tokens_seen();
  const Eigen::MatrixXf k = random.matrix(shape.kv_heads * dim, count), v = random.matrix(shape.kv_heads * dim, count);
  const Eigen::MatrixXf q = cache.stored(random.matrix(shape.query_heads * dim, count));
  const Recording::Result result = cache.update(k, v, q);
  const Index wanted = result.wanted_rows;

  for (Index h = 0; h < shape.kv_heads; ++h) {
    const auto at = static_cast<std::size_t>(h);
    const Recorded& recorded = cache.recorded(h);
    CHECK(recorded.num_queries == wanted);
    if (wanted > 0) REQUIRE((recorded.in_order && recorded.first_position == first + count - wanted));
    Eigen::MatrixXd mean = Eigen::MatrixXd::Zero(result.keys[at].cols(), wanted), weights(mean.rows(), wanted * group);
    Eigen::VectorXd sums = Eigen::VectorXd::Zero(mean.rows());
    for (Index g = 0; g < group; ++g) {
      CAPTURE(h, g, first, count);
      const Index row = (h * group + g) * dim;
      const reference::Attention expected =
          reference::attend(q.middleRows(row, dim).cast<double>(), first, result.keys[at], result.values[at], result.positions[at]);
      CHECK(test::largest_difference(result.out.middleRows(row, dim), expected.out) <= test::tolerance<float> * expected.out.cwiseAbs().maxCoeff());
      mean += expected.weights.rightCols(wanted) / static_cast<double>(group);
      sums += expected.weights.rowwise().sum() / static_cast<double>(group);
      for (Index j = 0; j < wanted; ++j) weights.col(j * group + g) = expected.weights.col(count - wanted + j);
    }
    if (wanted > 0 && cache.wants_query_heads()) CHECK(test::largest_difference(recorded.per_query_head, weights) <= test::tolerance<float>);
    if (wanted > 0) CHECK(test::largest_difference(recorded.mean, mean) <= test::tolerance<float>);
    REQUIRE(recorded.column_sums.size() == (result.wanted_sums ? sums.size() : 0));
    if (result.wanted_sums) CHECK(test::largest_difference(recorded.column_sums, sums) <= test::tolerance<float> * sums.maxCoeff());
  }
}

}  // namespace

TEST_CASE("A prompt's attention is the double-precision softmax's for every head_dim, group and length", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const std::vector<Index> lengths{1, 2, 31, 32, 33, 47, 64, 65}, wanted{0, 1, 5, 32, 33, all};
  std::size_t turn = 0;
  for (const Index dim : {1, 3, 8, 64, 80, 96, 128, 256})
    for (const Index group : {1, 2, 7, 8}) {
      const Index length = lengths[turn % lengths.size()], rows = wanted[turn % wanted.size()];
      turn += 5;
      CAPTURE(type, dim, group, length, rows);
      Random random(turn);
      Recording cache(type, {.query_heads = 2 * group, .kv_heads = 2, .head_dim = dim}, rows);
      check_update(cache, length, random);
    }
}

// The prefill kernel goes by blocks of 144 slots, panels of 2 packets of columns, tiles of queries.
TEST_CASE("A long prompt's attention is the double-precision softmax's whatever blocks and tiles it falls into", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const Index group = GENERATE(1, 3);
  const std::vector<Index> wanted{0, 1, 50, all};
  std::size_t turn = static_cast<std::size_t>(group);
  for (const Index length : {144, 145, 289}) {
    const Index rows = wanted[turn++ % wanted.size()];
    const bool sums = turn % 3 != 0;
    CAPTURE(type, group, length, rows, sums);
    Random random(turn);
    Recording cache(type, {.query_heads = 2 * group, .kv_heads = 2, .head_dim = 12}, rows, 100, sums, /*query_heads=*/turn % 2 == 0);
    check_update(cache, length, random);
    check_update(cache, 1, random);
    check_update(cache, length - 100, random);
  }
}

TEST_CASE("What the policy wants does not change a bit of the output", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const Shape shape{.query_heads = 2, .kv_heads = 1, .head_dim = 4};
  Random random(31);
  const Eigen::MatrixXf k = random.matrix(4, 2201), q = random.matrix(8, 2201);  // more than a part of the slots
  const auto run = [&](Index rows, bool sums) {
    Recording cache(type, shape, rows, 100000, sums);
    Eigen::MatrixXf out(8, 2201);
    for (const auto& [first, count] : {std::pair<Index, Index>{0, 300}, {300, 1899}, {2199, 1}, {2200, 1}})
      out.middleCols(first, count) = cache.update(k.middleCols(first, count), k.middleCols(first, count), q.middleCols(first, count)).out;
    return out;
  };
  const Eigen::MatrixXf expected = run(0, false);
  for (const Index rows : {Index{0}, Index{1}, Index{70}, all}) CHECK(test::same_bits(run(rows, rows != 1), expected));
}

TEST_CASE("Queries alone give the weights that attend gives, to the bit", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const Index rows = GENERATE(Index{0}, Index{3}, Index{40}, all);
  const bool sums = GENERATE(false, true), heads = GENERATE(false, true);
  const Shape shape{.query_heads = 8, .kv_heads = 2, .head_dim = 20};
  Recording attended(type, shape, rows, 150, sums, heads), weighed(type, shape, rows, 150, sums, heads);
  Random random(17);
  for (const Index count : {300, 1, 2, 9, 151, 1}) {
    CAPTURE(type, rows, sums, count);
    const Eigen::MatrixXf k = random.matrix(40, count), q = random.matrix(160, count);
    const std::vector<Recorded> log = weighed.weigh(k, q);
    (void)attended.update(k, k, q);
    for (Index h = 0; h < 2; ++h) {
      const Recorded &a = attended.recorded(h), &b = log[static_cast<std::size_t>(h)];
      CHECK((a.num_queries == b.num_queries && a.first_position == b.first_position && a.column_sums.size() == b.column_sums.size()));
      CHECK(test::same_bits(a.mean, b.mean));
      CHECK(test::same_bits(a.per_query_head, b.per_query_head));
      CHECK(test::same_bits(a.column_sums, b.column_sums));
    }
  }
}

TEST_CASE("A decoded token's attention is the double-precision softmax's for every head_dim, group and length", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const std::vector<Index> lengths{0, 1, 2, 7, 14, 15, 16, 17, 62, 63, 64, 65, 126, 127, 128, 129, 251, 509};  // slots before it
  std::size_t turn = 0;
  for (const Index dim : {1, 3, 8, 64, 80, 96, 128, 256})
    for (const Index group : {1, 2, 7, 8}) {
      const Index length = lengths[turn % lengths.size()], rows = static_cast<Index>(turn % 2);
      turn += 5;
      CAPTURE(type, dim, group, rows, length);
      Random random(turn);
      Recording cache(type, {.query_heads = 2 * group, .kv_heads = 2, .head_dim = dim}, rows, 100000, false, /*query_heads=*/turn % 3 == 0);
      if (length > 0) cache.append(random.matrix(2 * dim, length));
      check_update(cache, 1, random);
      check_update(cache, 1, random);
    }
}

TEST_CASE("Several decoded tokens see the past and each other causally", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const Index tokens = GENERATE(2, 3, 31, 33, 70);
  const Index rows = GENERATE(Index{0}, Index{2}, all);
  CAPTURE(type, tokens, rows);
  Random random(3);
  Recording cache(type, {.query_heads = 6, .kv_heads = 2, .head_dim = 20}, rows, 100000, false, /*query_heads=*/tokens % 2 == 0);
  for (const Index count : {Index{13}, tokens, Index{1}, tokens, Index{2}}) check_update(cache, count, random);
}

// Victims are overwritten, so slots are in no order of position and the newest tokens are anywhere among them.
TEST_CASE("Slots in any order are masked by their positions", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const Index group = GENERATE(1, 3);
  const Index rows = GENERATE(Index{0}, all);
  Random random(22);
  Recording cache(type, {.query_heads = 2 * group, .kv_heads = 2, .head_dim = 9}, rows, 37);
  for (Index update = 0, count = 50; update < 25; ++update, count = random.between(1, 20)) check_update(cache, count, random);
}

TEST_CASE("Long rows keep their precision", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  Random random(5);
  Recording cache(type, {.query_heads = 2, .kv_heads = 1, .head_dim = 64}, 1);
  cache.append(random.matrix(64, 20011));
  check_update(cache, 1, random);
  check_update(cache, 3, random);
}

TEST_CASE("A key that matches far better than the others gets all the weight", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const float match = GENERATE(300.0f, 30000.0f);
  const Index dim = 16, slots = 75;
  Recording cache(type, {.query_heads = 1, .kv_heads = 1, .head_dim = dim}, 1);
  Random random(8);
  Eigen::MatrixXf k = Eigen::MatrixXf::Constant(dim, slots, -match);
  k.col(40).setConstant(match);
  const Eigen::MatrixXf v = random.matrix(dim, slots), q = Eigen::MatrixXf::Constant(dim, slots, match);
  const Eigen::MatrixXf out = cache.update(k, v, q).out;
  CHECK(test::largest_difference(out.col(slots - 1), cache.stored(v).col(40)) == 0);
  CHECK(cache.recorded(0).mean.sum() == 1.0f);
  CHECK(cache.recorded(0).mean(40, 0) == 1.0f);
}

TEST_CASE("Equal keys share the weight equally, however far their logits are from zero", "[attention]") {
  const Index dim = 4, slots = 33;
  const float size = GENERATE(0.0f, 1.0f, 1e9f, -1e9f, 1e18f, -1e18f);
  CAPTURE(size);
  Recording cache("float", {.query_heads = 2, .kv_heads = 1, .head_dim = dim}, 1);
  const Eigen::MatrixXf k = Eigen::MatrixXf::Constant(dim, slots, size), q = Eigen::MatrixXf::Constant(2 * dim, slots, std::abs(size));
  const Eigen::MatrixXf threes = Eigen::MatrixXf::Constant(2 * dim, slots, 3.0f);
  CHECK(test::largest_difference(cache.update(k, threes.topRows(dim), q).out, threes) <= 3 * test::tolerance<float>);
  CHECK(test::largest_difference(cache.recorded(0).mean, Eigen::VectorXf::Constant(slots, 1.0f / slots)) <= test::tolerance<float>);
}

TEST_CASE("The largest accepted keys, values and queries give finite outputs", "[attention]") {
  const std::string type = GENERATE(from_range(storage_types));
  const Index dim = GENERATE(1, 64, 300);
  const float largest = type == "half" ? 65504.0f : 0.99e18f;  // bfloat16 may round up
  Random random(6);
  Recording cache(type, {.query_heads = 2, .kv_heads = 1, .head_dim = dim}, 1);
  const auto signs = [&](Index rows, Index cols) { return Eigen::MatrixXf(largest * random.matrix(rows, cols).array().sign()); };
  for (const Index count : {20, 1, 3}) CHECK(cache.update(signs(dim, count), signs(dim, count), signs(2 * dim, count)).out.allFinite());
}

TEST_CASE("Executors do not change a bit of the output", "[attention]") {
  const Shape shape{.query_heads = 6, .kv_heads = 3, .head_dim = 5};
  const test::Tokens tokens(shape, 2300, 4);
  const std::string type = GENERATE(from_range(storage_types));
  const std::string spec = GENERATE("full", "scissorhands");
  const auto run = [&](const test::ParallelFor& parallel_for) {
    const auto cache = test::make_layer(type, spec, shape, 2299);
    if (spec == "full") {  // more than a part of the slots, which nobody attends to
      cache->update(tokens, 0, 2000);
      for (Index h = 0; h < 3; ++h) cache->done(h);
    }
    Eigen::MatrixXf out(tokens.q.rows(), 300);
    for (const auto& [first, count] : {std::pair<Index, Index>{0, 70}, {70, 200}, {270, 28}, {298, 1}, {299, 1}})  // more than a tile of queries
      out.middleCols(first, count) = cache->feed(tokens, 2000 + first, count, {}, parallel_for);
    return out;
  };
  const Eigen::MatrixXf expected = run(test::serially);
  CHECK(run(test::on_threads(1)) == expected);
  CHECK(run(test::on_threads(3)) == expected);
  CHECK(run([](Index n, test::FunctionRef fn) {
          while (n > 0) fn(--n);
        }) == expected);
}

TEST_CASE("Queries and outputs may be blocks of larger matrices", "[attention]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 5};
  const test::Tokens tokens(shape, 9, 4);
  const auto cache = test::make_layer("float", "full", shape, 1), other = test::make_layer("float", "full", shape, 1);
  const Eigen::MatrixXf expected = cache->feed(tokens, 0, 9);
  Eigen::MatrixXf q = Eigen::MatrixXf::Constant(30, 15, infinity), out = Eigen::MatrixXf::Constant(30, 15, 7.0f);
  q.block(3, 2, 20, 9) = tokens.q;
  other->update(tokens, 0, 9);
  other->attend(q.block(3, 2, 20, 9), out.block(5, 4, 20, 9));
  CHECK(out.block(5, 4, 20, 9) == expected);
  out.block(5, 4, 20, 9).setConstant(7.0f);
  CHECK((out.array() == 7.0f).all());
}

TEST_CASE("No token at all is attended to without a fuss", "[attention]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 5};
  const test::Tokens tokens(shape, 9, 4);
  const auto cache = test::make_layer("float", "scissorhands", shape, 20);
  CHECK(cache->feed(tokens, 0, 0).cols() == 0);
  cache->feed(tokens, 0, 9);
  CHECK(cache->feed(tokens, 9, 0).cols() == 0);
}

TEST_CASE("attend refuses wrong shapes and queries that are not finite before it starts", "[attention]") {
  const Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 3};
  const test::Tokens tokens(shape, 7, 4);
  const auto cache = test::make_layer("float", "scissorhands", shape, 20);
  cache->feed(tokens, 0, 5);
  cache->update(tokens, 5, 2);
  const Eigen::MatrixXf q = tokens.q.rightCols(2), before = Eigen::MatrixXf::Constant(12, 2, 7.0f);
  Eigen::MatrixXf out = before, narrow(12, 1), low(6, 2);
  CHECK_THROWS_AS(cache->attend(q.leftCols(1), out), std::invalid_argument);
  CHECK_THROWS_AS(cache->attend(q.topRows(6), out), std::invalid_argument);
  CHECK_THROWS_AS(cache->attend(q, narrow), std::invalid_argument);
  CHECK_THROWS_AS(cache->attend(q, low), std::invalid_argument);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), infinity, -infinity, std::numeric_limits<float>::max()}) {
    Eigen::MatrixXf broken = q;
    broken(8, 1) = bad;  // the second kv_head's first query head
    CHECK_THROWS_AS(cache->attend(broken, out), std::invalid_argument);
  }
  CHECK(out == before);
  cache->attend(q, out);
  CHECK(out.allFinite());
  CHECK_THROWS_AS(cache->attend(q, out), std::logic_error);  // the step is over
}

TEST_CASE("attend refuses a step of which a kv_head has been told something already", "[attention]") {
  const Shape shape{.query_heads = 2, .kv_heads = 2, .head_dim = 3};
  const test::Tokens tokens(shape, 4, 4);
  const bool whole = GENERATE(false, true);
  const auto cache = test::make_layer("float", "scissorhands", shape, 20), twin = test::make_layer("float", "scissorhands", shape, 20);
  Eigen::MatrixXf out(6, 3);
  for (test::Layer* each : {cache.get(), twin.get()}) {
    each->update(tokens, 0, 3);
    each->on_attention(1, Eigen::MatrixXf::Constant(3, whole ? 3 : 2, 0.1f));
  }
  CHECK_THROWS_AS(cache->attend(tokens.q.leftCols(3), out), std::logic_error);
  for (test::Layer* each : {cache.get(), twin.get()}) {
    each->on_attention(0, Eigen::MatrixXf::Constant(3, 3, 0.2f));
    if (!whole) each->on_attention(1, Eigen::MatrixXf::Constant(3, 1, 0.1f));
  }
  CHECK(test::same_bits(cache->feed(tokens, 3, 1), twin->feed(tokens, 3, 1)));
}
