// What is allocated, and when: the whole malloc family is counted (operator new and Eigen both end there), through the
// sanitizer's hooks if there is one, else by standing in for glibc's functions.

#include "support/catch.hpp"
#include "support/layer.hpp"
#include "support/positions.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <iostream>
#include <memory>
#include <new>
#include <string>
#include <vector>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define KVSNIP_TEST_SANITIZER
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define KVSNIP_TEST_SANITIZER
#endif
#if defined(KVSNIP_TEST_SANITIZER)
// Of <sanitizer/allocator_interface.h>, which GCC does not install.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*, std::size_t),
                                                         void (*free_hook)(const volatile void*));
#endif

namespace {

/// Allocations made while it is on, and what of them was freed since. One thread; allocates nothing itself.
class Ledger {
 public:
  void clear() { calls_ = 0, num_live_ = 0, fails_at_ = -1, on_ = false; }
  void turn(bool on) { on_ = on; }
  /// The n-th allocation since clear() fails, once.
  void fail_at(long n) { fails_at_ = n; }

  long calls() const { return calls_; }
  /// Bytes asked for and not given back.
  std::ptrdiff_t live_bytes() const {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < num_live_; ++i) sum += live_[i].size;
    return static_cast<std::ptrdiff_t>(sum);
  }

  bool must_fail() { return on_ && calls_ == fails_at_ && ++calls_ > 0; }
  void allocated(const volatile void* pointer, std::size_t size) {
    if (!on_ || pointer == nullptr) return;
    ++calls_;
    if (num_live_ < live_.size()) live_[num_live_++] = {pointer, size};
  }
  void freed(const volatile void* pointer) {
    for (std::size_t i = num_live_; i-- > 0;)
      if (live_[i].pointer == pointer) live_[i] = live_[--num_live_], i = 0;
  }

 private:
  struct Block {
    const volatile void* pointer;
    std::size_t size;
  };
  bool on_ = false;
  long calls_ = 0, fails_at_ = -1;
  std::size_t num_live_ = 0;
  std::array<Block, 20000> live_{};
};
constinit Ledger ledger;

}  // namespace

#if defined(KVSNIP_TEST_SANITIZER)

namespace {
constexpr bool can_count = true, can_fail = false;
[[maybe_unused]] const int hooks_installed = __sanitizer_install_malloc_and_free_hooks(
    [](const volatile void* pointer, std::size_t size) { ledger.allocated(pointer, size); }, [](const volatile void* pointer) { ledger.freed(pointer); });
}  // namespace

#elif defined(__GLIBC__)

namespace {
constexpr bool can_count = true, can_fail = true;

template <class Allocate>
void* book(std::size_t size, const Allocate& allocate) {
  if (ledger.must_fail()) {
    errno = ENOMEM;
    return nullptr;
  }
  void* pointer = allocate();
  ledger.allocated(pointer, size);
  return pointer;
}
}  // namespace

extern "C" {
void* __libc_malloc(std::size_t size);
void* __libc_calloc(std::size_t count, std::size_t size);
void* __libc_realloc(void* pointer, std::size_t size);
void* __libc_memalign(std::size_t alignment, std::size_t size);
void __libc_free(void* pointer);

void* malloc(std::size_t size) noexcept {
  return book(size, [=] { return __libc_malloc(size); });
}
void* calloc(std::size_t count, std::size_t size) noexcept {
  return book(count * size, [=] { return __libc_calloc(count, size); });
}
void* realloc(void* pointer, std::size_t size) noexcept {
  return book(size, [=] {
    void* moved = __libc_realloc(pointer, size);
    if (moved != nullptr || size == 0) ledger.freed(pointer);
    return moved;
  });
}
void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {
  return book(size, [=] { return __libc_memalign(alignment, size); });
}
void* memalign(std::size_t alignment, std::size_t size) noexcept {
  return book(size, [=] { return __libc_memalign(alignment, size); });
}
int posix_memalign(void** out, std::size_t alignment, std::size_t size) noexcept {
  *out = book(size, [=] { return __libc_memalign(alignment, size); });
  return *out == nullptr ? ENOMEM : 0;
}
void free(void* pointer) noexcept {
  ledger.freed(pointer);
  __libc_free(pointer);
}
}

#else
namespace {
constexpr bool can_count = false, can_fail = false;
}
#endif

namespace {

using kvsnip::Bytes;
using kvsnip::Index;
using kvsnip::Shape;
using test::Layer;
using test::PolicyCase;
using test::Tokens;

constexpr Index budget = 13;
// A column of keys is a multiple of 64 bytes whatever the storage type: aligned operator new may round sizes up to that.
constexpr Shape shape{.query_heads = 4, .kv_heads = 2, .head_dim = 32};

bool skipped(bool can) {
  if (!can) std::cout << "[skipped] an allocation test: not with this allocator\n";
  return !can;
}

/// Runs `call` with the ledger on.
template <class Call>
void counted(const Call& call) {
  struct Off {
    ~Off() { ledger.turn(false); }
  } off;
  ledger.turn(true);
  call();
}

/// Ends the open step with made-up weights, of which there are enough; if queries are wanted those are made up of them too.
void end_step(Layer& layer, const Eigen::MatrixXf& weights) {
  const Index columns = layer.wanted_rows() * shape.group_size();
  const bool wants_sums = layer.wants_column_sums();
  const Index queries = wants_sums ? layer.num_queries() : std::max(layer.wanted_queries(), layer.wanted_rows());
  for (Index h = 0; h < shape.kv_heads; ++h) {
    if (layer.wanted_queries() > 0) {
      layer.on_queries(h, weights.topLeftCorner(shape.head_dim, queries * shape.group_size()));
      continue;
    }
    if (columns > 0) layer.on_attention(h, weights.topLeftCorner(layer.step_size(h), columns));
    if (wants_sums) layer.on_column_sums(h, weights.topLeftCorner(layer.step_size(h), shape.group_size()));
    else if (columns == 0) layer.done(h);
  }
}

/// All that the cache holds is what it says, to the byte.
void check_bytes(const Layer& layer) {
  const Bytes bytes = layer.bytes();
  Index columns = 0, used = 0;
  for (Index h = 0; h < shape.kv_heads; ++h) columns += layer.capacity(h), used += layer.size(h);
  CHECK(bytes.total() + layer.object_bytes() == ledger.live_bytes());
  CHECK(bytes.keys == bytes.values);
  CHECK(bytes.keys % (shape.head_dim * std::max<Index>(columns, 1)) == 0);  // capacity * sizeof(T)
  CHECK(columns >= used);
  CHECK(bytes.positions >= used * static_cast<Index>(sizeof(Index)));
}

}  // namespace

TEST_CASE("Rule 12: steady-state decode allocates nothing, with our kernel or the engine's", "[allocation]") {
  if (skipped(can_count)) return;
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Index count = GENERATE(1, 3);  // tokens an update
  if (!policy.promise.evicts_decode || policy.promise.allocates || policy.promise.grows) return;
  const Tokens tokens(shape, 29 + 300 * count, 1);
  const Eigen::MatrixXf weights = Eigen::MatrixXf::Constant(budget, 2 * count, 0.05f);
  const auto layer = policy.make(shape, budget);
  CAPTURE(policy.name, count);
  layer->feed(tokens, 0, 29);
  Eigen::MatrixXf out(tokens.q.rows(), count);
  Index first = 29;
  enum class By { our_kernel, given_weights, given_queries };
  const auto allocations = [&](By by, int steps) {
    ledger.clear();
    for (int step = 0; step < steps; ++step, first += count) {
      const auto k = tokens.k.middleCols(first, count), v = tokens.v.middleCols(first, count), q = tokens.q.middleCols(first, count);
      counted([&] {
        layer->update(k, v);
        if (by == By::our_kernel) layer->attend(q, out);
        if (by == By::given_weights) end_step(*layer, weights);
        for (Index h = 0; h < shape.kv_heads && by == By::given_queries; ++h)
          layer->on_queries(h, tokens.q.topLeftCorner(shape.head_dim, 2 * std::max(layer->wanted_queries(), layer->wanted_rows())));
      });
    }
    return ledger.calls();
  };
  allocations(By::our_kernel, 50);  // warm up
  CHECK(allocations(By::our_kernel, 60) == 0);
  CHECK(allocations(By::given_weights, 60) == 0);
  allocations(By::given_queries, 20);
  CHECK(allocations(By::given_queries, 60) == 0);
}

TEST_CASE("bytes() is what is allocated, in every state of a cache", "[allocation]") {
  if (skipped(can_count)) return;
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Tokens tokens(shape, 160, 2);
  const Eigen::MatrixXf weights = Eigen::MatrixXf::Constant(160, 200, 0.05f);
  struct Update {
    Index count;
    bool more = false;
  };
  std::unique_ptr<Layer> layer;
  ledger.clear();
  counted([&] { layer = policy.make(shape, budget); });
  check_bytes(*layer);
  Index first = 0;
  for (const Update& update : {Update{3}, {1}, {60}, {1}, {1}, {1}, {1}, {1}, {1}, {1}, {3}, {1}, {1}, {20, true}, {20, true}, {2}, {1}, {1}}) {
    CAPTURE(policy.name, first, update.count);
    const auto open = [&] { layer->update(tokens.k.middleCols(first, update.count), tokens.v.middleCols(first, update.count), {.more = update.more}); };
    counted(open);
    check_bytes(*layer);
    if (update.count == 3) {
      counted([&] { layer->abandon(); });
      check_bytes(*layer);
      counted(open);
    }
    counted([&] { end_step(*layer, weights); });
    check_bytes(*layer);
    first += update.count;
  }
  counted([&] { layer->reset(); });
  check_bytes(*layer);
  layer.reset();
  CHECK(ledger.live_bytes() == 0);
}

TEST_CASE("A prompt's memory is given back when it is compacted", "[allocation]") {
  if (skipped(can_count)) return;
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  if (!policy.promise.evicts_prompt || policy.promise.grows) return;
  const bool chunks = GENERATE(false, true);
  const Tokens tokens(shape, 501, 3);
  const Eigen::MatrixXf weights = Eigen::MatrixXf::Constant(501, 1002, 0.05f);
  CAPTURE(policy.name, chunks);
  std::unique_ptr<Layer> layer;
  ledger.clear();
  counted([&] {
    layer = policy.make(shape, budget);
    layer->update(tokens, 0, chunks ? 250 : 500, {.more = chunks});
    end_step(*layer, weights);
    if (chunks) layer->update(tokens, 250, 250), end_step(*layer, weights);
  });
  for (Index h = 0; h < shape.kv_heads; ++h) CHECK(layer->capacity(h) == layer->budget(h));
  const Bytes bytes = layer->bytes();
  CHECK(bytes.keys == bytes.values);
  Index slots = 0;
  for (Index h = 0; h < shape.kv_heads; ++h) slots += layer->budget(h);
  CHECK(bytes.keys == slots * shape.head_dim * (policy.type == "float" ? 4 : 2));
  counted([&] { layer->update(tokens, 500, 1), end_step(*layer, weights); });  // what the prompt's step wrote down is not needed any longer
  const auto other = policy.make(shape, budget);
  other->update(tokens, 0, budget);
  end_step(*other, weights);
  other->update(tokens, budget, 1);
  end_step(*other, weights);
  // No more than a cache that has never seen a long prompt, but for some scratch of the compaction's indices.
  const auto num_slots = static_cast<std::ptrdiff_t>(shape.kv_heads * 500);
  CHECK(ledger.live_bytes() <= other->bytes().total() + other->object_bytes() + num_slots * 24);
}

TEST_CASE("A cache that grows while decoding reallocates geometrically", "[allocation]") {
  if (skipped(can_count)) return;
  const std::string type = GENERATE("float", "half", "bfloat16");
  const std::string spec = GENERATE("full", "snapkv(observation_window=4)");
  const auto layer = test::make_layer(type, spec, shape, 10);
  const Tokens tokens(shape, 1, 4);
  ledger.clear();
  counted([&] {
    for (int step = 0; step < 4000; ++step) {
      layer->update(tokens, 0, 1);
      for (Index h = 0; h < shape.kv_heads; ++h) layer->done(h);
    }
  });
  CHECK(layer->size(0) == 4000);
  CHECK(layer->capacity(0) <= 2 * layer->size(0));
  CHECK(ledger.calls() < 200);  // keys, values, positions, each some 20 times for two kv_heads
}

TEST_CASE("A cache that evicts does not allocate past its budget while it fills", "[allocation]") {
  const auto layer = test::make_layer("float", "streaming_llm", shape, 1000);
  const Tokens tokens(shape, 1, 5);
  for (int step = 0; step < 1100; ++step) {
    layer->update(tokens, 0, 1);
    CHECK(layer->capacity(0) <= std::max<Index>(2 * layer->size(0), 8));
    CHECK(layer->capacity(0) <= 1000);
  }
}

TEST_CASE("An allocation that fails anywhere leaves the cache as it was, or a step that can be taken back", "[allocation]") {
  if (skipped(can_fail)) return;
  const PolicyCase policy = GENERATE(from_range(test::all_policies()));
  const Tokens tokens(shape, 200, 6);
  const Eigen::MatrixXf weights = Tokens(shape, 200, 7).k.topRows(64).cwiseAbs().replicate(3, 1);
  const auto layer = policy.make(shape, budget), twin = policy.make(shape, budget);
  struct Update {
    Index count;
    bool more = false;
  };
  Index first = 0;
  long failures = 0;
  // Growth, a prompt's compaction, queue and bulk drops, several at once, a series, a second turn.
  for (const Update& update : {Update{5}, {1}, {1}, {1}, {7}, {30}, {1}, {1}, {1}, {1}, {3}, {1}, {9, true}, {9}, {1}, {1}, {25}, {1}, {1}}) {
    CAPTURE(policy.name, first, update.count);
    bool done = false;
    for (long n = 0; !done; ++n) {
      CAPTURE(n);
      ledger.clear(), ledger.fail_at(n);
      bool updated = false;
      try {
        counted([&] {
          layer->update(tokens.k.middleCols(first, update.count), tokens.v.middleCols(first, update.count), {.more = update.more});
          updated = true;
          end_step(*layer, weights);
          done = true;
        });
      } catch (const std::bad_alloc&) {
      }
      failures += !done;
      if (!done && updated) layer->abandon();
      if (!done) REQUIRE(test::same_bytes(*layer, *twin));
    }
    twin->update(tokens, first, update.count, {.more = update.more});
    end_step(*twin, weights);
    REQUIRE(test::same_bytes(*layer, *twin));
    first += update.count;
  }
  CHECK(failures > 10);
}
