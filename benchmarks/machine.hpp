// Threads and a clock that goes with them, and the limits of the machine they run on.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <kvsnip/kvsnip.hpp>
#include <thread>
#include <utility>
#include <vector>

namespace bench {

using kvsnip::Index;

/// CPU time of the calling thread: immune to other processes' time slices.
inline double thread_seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// Calls fn(i) for i in [0, n) on `count` threads, the caller one of them, i dealt out in turn. They start together.
class Threads {
 public:
  explicit Threads(Index count) : shares_(static_cast<std::size_t>(count)) {
    for (Index t = 1; t < count; ++t) workers_.emplace_back([this, t] { work(t); });
  }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
  ~Threads() {
    job_ = nullptr;
    next_turn();
    for (std::thread& worker : workers_) worker.join();
  }
  Index count() const { return static_cast<Index>(shares_.size()); }

  template <class Fn>
  void operator()(Index n, Fn fn) {
    const double start = thread_seconds();
    job_ = [&](Index t) {
      for (Index i = t; i < n; i += count()) fn(i);
    };
    ready_ = ended_ = 0;
    next_turn();
    share(0);
    wait_for_all(ended_);
    elsewhere_ += *std::max_element(shares_.begin(), shares_.end()) - (thread_seconds() - start);
  }

  /// CPU time of whoever held things up: the caller, and while threads ran the busiest of them. Waiting and waking do not
  /// count, as they depend on the executor and on who else uses the machine; unequal shares do.
  double seconds() const { return thread_seconds() + elsewhere_; }

 private:
  void next_turn() { ++turn_, turn_.notify_all(); }
  void wait_for_all(const std::atomic<Index>& counter) const {
    while (counter.load() < count()) std::this_thread::yield();
  }
  void share(Index t) {
    ++ready_;
    wait_for_all(ready_);
    const double start = thread_seconds();
    job_(t);
    shares_[static_cast<std::size_t>(t)] = thread_seconds() - start;
    ++ended_;
  }
  void work(Index t) {
    for (int turn = 0;; ++turn) {
      turn_.wait(turn);
      if (!job_) return;
      share(t);
    }
  }

  std::vector<double> shares_;  // (threads) seconds in the last job
  double elsewhere_ = 0;        // what seconds() adds to the caller's own
  std::function<void(Index)> job_;
  std::atomic<int> turn_{0};
  std::atomic<Index> ready_{0}, ended_{0};
  std::vector<std::thread> workers_;
};

/// Keep a result alive.
inline void use(float x) {
  volatile float sink = x;
  (void)sink;
}

/// What the machine can do at most, with all threads at once.
class Machine {
 public:
  explicit Machine(Threads& threads) : threads_(threads), memory_(Eigen::ArrayXf::Constant(num_parts * part, 1.0f)) {}

  /// Read 64 MiB that are not in the caches, in four streams a core. Afterwards nothing else is in the caches. @return byte/s
  double read() {
    const float* data = memory_.data() + (turn_++ % num_parts) * part;
    const Index stream = part / threads_.count() / 4;
    const double start = threads_.seconds();
    threads_(threads_.count(), [&](Index t) { use(sum_of_streams(data + t * stream * 4, stream)); });
    return static_cast<double>(part) * sizeof(float) / (threads_.seconds() - start);
  }
  /// Multiply-adds that stay in registers, for about so many seconds. @return FLOP/s
  double multiply_add(double seconds) {
    const Index chains = static_cast<Index>(seconds / 50e-6);  // one takes about 50 microseconds
    const double start = threads_.seconds();
    threads_(threads_.count(), [=](Index) { for (Index i = 0; i < chains; ++i) use(chain_of_multiply_adds()); });
    return static_cast<double>(threads_.count() * chains * flops_per_chain) / (threads_.seconds() - start);
  }

 private:
  using Packet = kvsnip::detail::Packet;
  static constexpr Index part = Index{16} << 20, num_parts = 3;  // [floats]
  static constexpr int num_sums = 10, num_steps = 25000;         // two units, latency up to 5
  static constexpr Index flops_per_chain = 2 * num_sums * num_steps * kvsnip::detail::packet_size;

  static float sum_of_streams(const float* data, Index stream) {
    namespace ei = Eigen::internal;
    constexpr Index line = 16;
    Packet sum[4];
    for (Packet& s : sum) s = ei::pset1<Packet>(0.0f);
    for (Index i = 0; i + line <= stream; i += line)
      for (Index s = 0; s < 4; ++s)
        for (Index p = 0; p < line; p += kvsnip::detail::packet_size)
          sum[s] = ei::padd(sum[s], ei::ploadu<Packet>(data + s * stream + i + p));
    return ei::predux(ei::padd(ei::padd(sum[0], sum[1]), ei::padd(sum[2], sum[3])));
  }
  /// Into the accumulator, and written out: Clang would otherwise move or spill the sums.
  static float chain_of_multiply_adds() {
    return []<std::size_t... i>(std::index_sequence<i...>) {
      namespace ei = Eigen::internal;
      const Packet x = ei::pset1<Packet>(0.999f), y = ei::pset1<Packet>(1e-3f);
      Packet sum[] = {ei::pset1<Packet>(static_cast<float>(i))...};
      for (int step = 0; step < num_steps; ++step) ((sum[i] = ei::pmadd(x, y, sum[i])), ...);
      return (ei::predux(sum[i]) + ...);
    }(std::make_index_sequence<num_sums>{});
  }

  Threads& threads_;
  Eigen::ArrayXf memory_;
  Index turn_ = 0;
};

}  // namespace bench
