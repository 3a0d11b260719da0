// How many kv_heads of the open step have not ended yet; counted from any thread.
#pragma once

#include <atomic>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

class OpenHeads {
 public:
  OpenHeads() = default;
  /// A cache is copied between steps: a copy of an open step could never be ended.
  OpenHeads(const OpenHeads& other) : OpenHeads() { *this = other; }
  OpenHeads(OpenHeads&& other) noexcept : count_(other.count_.load()), required_(other.required_) {}
  OpenHeads& operator=(const OpenHeads& other) {
    require_state(!other.required(), "KVCache: a cache is copied between steps, not while one waits for its callbacks");
    count_ = other.count_.load(), required_ = other.required_;
    return *this;
  }
  OpenHeads& operator=(OpenHeads&& other) noexcept {
    count_ = other.count_.load(), required_ = other.required_;
    return *this;
  }
  ~OpenHeads() = default;

  void open(Index num_heads, bool required) { count_ = num_heads, required_ = required; }
  /// One head ended. @return whether it was the last
  bool end_one() { return count_.fetch_sub(1) == 1; }
  Index count() const { return count_.load(); }
  /// The next update must wait for them.
  bool required() const { return required_; }

 private:
  std::atomic<Index> count_{0};
  bool required_ = false;
};

}  // namespace kvsnip::detail
