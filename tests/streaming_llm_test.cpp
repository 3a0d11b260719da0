// StreamingLLM against its literal version, and by hand.

#include "reference/streaming_llm.hpp"

#include <kvsnip/kv_cache.hpp>
#include <kvsnip/policy/streaming_llm.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"

namespace {

using kvsnip::Index;
using kvsnip::KVCache;
using kvsnip::StreamingLLM;
using test::Random;
using test::sorted;

/// The policy looks at positions alone: the keys and values are zeros, and no attention is run.
void append(KVCache<float, StreamingLLM>& cache, Index num_tokens, bool more = false) {
  const Eigen::MatrixXf zeros = Eigen::MatrixXf::Zero(cache.shape().kv_heads * cache.shape().head_dim, num_tokens);
  auto step = cache.update(zeros, zeros, {.more = more});
  for (Index h = 0; h < cache.shape().kv_heads; ++h) step.done(h);
}

}  // namespace

TEST_CASE("StreamingLLM holds the sinks and the newest positions, however the tokens come") {
  const auto seed = GENERATE(range<std::uint64_t>(0, 40));
  Random random(seed);
  const Index num_sinks = random.between(0, 5);
  const Index budget = num_sinks + random.pick({1, 2, 3, 8, 23});
  CAPTURE(seed, num_sinks, budget);
  KVCache<float, StreamingLLM> cache({.query_heads = 6, .kv_heads = 3, .head_dim = 2}, budget,
                                     StreamingLLM{{.num_sinks = num_sinks}});
  while (cache.tokens_seen() < 120) {
    const Index num_tokens = random.pick({1, 1, 1, 2, 5, 17, 40});
    CAPTURE(cache.tokens_seen(), num_tokens);
    append(cache, num_tokens);
    for (Index h = 0; h < 3; ++h)
      REQUIRE(sorted(cache.positions(h)) == reference::streaming_llm(cache.tokens_seen(), num_sinks, budget));
  }
}

TEST_CASE("StreamingLLM cuts a prompt that comes in pieces like one that comes whole") {
  const Index piece = GENERATE(1, 4, 7, 50);
  CAPTURE(piece);
  KVCache<float, StreamingLLM> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 16,
                                     StreamingLLM{{.num_sinks = 4}});
  for (Index seen = 0; seen < 50; seen += piece) append(cache, std::min(piece, 50 - seen), seen + piece < 50);
  CHECK(sorted(cache.positions(0)) == reference::streaming_llm(50, 4, 16));
}

TEST_CASE("StreamingLLM by hand: one sink, budget 4") {
  KVCache<float, StreamingLLM> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 1}, 4,
                                     StreamingLLM{{.num_sinks = 1}});
  const auto slots = [&] { return std::vector<Index>(cache.positions(0).begin(), cache.positions(0).end()); };
  append(cache, 3);
  CHECK(slots() == std::vector<Index>{0, 1, 2});
  append(cache, 1);
  CHECK(slots() == std::vector<Index>{0, 1, 2, 3});
  append(cache, 1);  // 1 is the oldest that is not a sink: 4 takes its slot
  CHECK(slots() == std::vector<Index>{0, 4, 2, 3});
  append(cache, 2);
  CHECK(slots() == std::vector<Index>{0, 4, 5, 6});
  append(cache, 9);  // more than can be evicted: the cache holds them all, then keeps the sink and the last three
  CHECK(slots() == std::vector<Index>{0, 13, 14, 15});
}

TEST_CASE("StreamingLLM streams on in constant memory, as the paper claims") {
  KVCache<float, StreamingLLM> cache({.query_heads = 1, .kv_heads = 1, .head_dim = 4}, 12,
                                     StreamingLLM{{.num_sinks = 4}});
  append(cache, 12);
  const Index bytes = cache.bytes().total();
  for (int token = 0; token < 20000; ++token) append(cache, 1);
  CHECK(cache.bytes().total() <= 2 * bytes);  // scratch may have come, once
  CHECK(cache.capacity(0) == 12);
  CHECK(sorted(cache.positions(0)) ==
        std::vector<Index>{0, 1, 2, 3, 20004, 20005, 20006, 20007, 20008, 20009, 20010, 20011});
}

TEST_CASE("StreamingLLM refuses a budget that its sinks fill") {
  using Cache = KVCache<float, StreamingLLM>;
  const kvsnip::Shape shape{.query_heads = 1, .kv_heads = 1, .head_dim = 1};
  CHECK_THROWS_AS(Cache(shape, 4, StreamingLLM{{.num_sinks = 4}}), std::invalid_argument);
  CHECK(Cache(shape, 5, StreamingLLM{{.num_sinks = 4}}).budget() == 5);
}
