// The open step of a cache: which one it is, and how many kv_heads have not ended yet (counted from any thread).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

class StepState {
 public:
  StepState() = default;
  /// A cache is copied between steps: a copy of one that waits for its callbacks could never be ended.
  StepState(const StepState& other) : heads_left_(other.heads_left()), open_(other.open_) {
    require_state(!other.must_end(), "KVCache: a cache is copied between steps, not while one waits for its callbacks");
  }
  StepState(StepState&& other) noexcept : id_(other.id_), heads_left_(other.heads_left()), open_(other.open_), required_(other.required_) {
    other.close();  // its steps are stale
  }
  /// Numbers are never used twice: a handle to a step of what was here before stays stale.
  StepState& operator=(StepState&& other) noexcept {
    id_ = std::max(id_, other.id_) + 1;
    heads_left_ = other.heads_left(), open_ = other.open_, required_ = other.required_;
    other.close();
    return *this;
  }
  StepState& operator=(const StepState&) = delete;
  ~StepState() = default;

  void open(Index num_heads, bool required) { ++id_, heads_left_ = num_heads, open_ = true, required_ = required; }
  void close() { ++id_, heads_left_ = 0, open_ = required_ = false; }
  /// One head ended. @return whether it was the last
  bool end_head() { return heads_left_.fetch_sub(1) == 1; }

  std::uint64_t id() const { return id_; }
  bool is_open() const { return open_; }
  Index heads_left() const { return heads_left_.load(); }
  /// The next update must wait for the heads left.
  bool must_end() const { return open_ && required_; }

 private:
  std::uint64_t id_ = 0;
  std::atomic<Index> heads_left_{0};
  bool open_ = false, required_ = false;
};

}  // namespace kvsnip::detail
