// What every benchmark shares: interleaved timing, flags, the table, and at the end the attention layer that is measured.
//
//   Bench bench(argc, argv, "the question");
//   Task& a = bench.time({.name = ..., .prepare = ..., .run = bench.timed([=] { ... })});   as many as there are
//   bench.measure(rounds);                                                                   all of them, interleaved
//   bench.row(a, over_roof(a), "roof", {gate, goal});
//   return bench.report();
//
// A round takes one sample of every task: the best of three runs, and the best of three probes in between, which are its
// roof. A run starts on cold caches, as in a model whose other layers come in between: the probe before it reads more
// memory than the caches hold. The probe of multiply-adds lasts about as long as the run, so that both meet the same slow
// spells of a shared machine. Ratios are taken within a round, and their median over the rounds is reported.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/core.h>
#include <fmt/ostream.h>

#include "machine.hpp"

namespace bench {

inline double median(std::vector<double> x) {
  const auto middle = x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2);
  std::nth_element(x.begin(), middle, x.end());
  return *middle;
}
/// max / min.
inline double spread(const std::vector<double>& x) {
  return *std::max_element(x.begin(), x.end()) / *std::min_element(x.begin(), x.end());
}

/// Something to time, and its samples.
struct Task {
  std::string name, shape, type;
  std::function<void()> prepare{};  ///< before each run, not timed
  std::function<double()> run{};    ///< @return its seconds: see Bench::timed
  double bytes = 0, flops = 0;      ///< what cannot be avoided: the roof
  std::vector<double> seconds{}, roof{};  ///< (rounds)
};

/// Round by round.
inline std::vector<double> over(const std::vector<double>& x, const std::vector<double>& y) {
  std::vector<double> ratios(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) ratios[i] = x[i] / y[i];
  return ratios;
}
inline std::vector<double> over(const Task& x, const Task& y) { return over(x.seconds, y.seconds); }
inline std::vector<double> over_roof(const Task& x) { return over(x.seconds, x.roof); }

/// What a ratio is held against: `gate` must hold, `goal` is what we are after; 0 is none.
struct Limits {
  double gate = 0, goal = 0;
  bool at_least = false;  ///< the ratio must not be less, instead of not more
};

class Bench {
 public:
  /// @param threaded  whether --threads is offered. Exits on a bad flag.
  Bench(int argc, char** argv, std::string question, bool threaded = false)
      : question_(std::move(question)), threads_(parse(argc, argv, threaded)), machine_(threads_) {}

  bool quick() const { return quick_; }
  Threads& threads() { return threads_; }
  Machine& machine() { return machine_; }

  /// A task's run: `work`, timed.
  std::function<double()> timed(std::function<void()> work) {
    return [this, work = std::move(work)] {
      const double start = threads_.seconds();
      work();
      return threads_.seconds() - start;
    };
  }
  /// Note a task for the next measure(). The reference stays valid.
  Task& time(Task task) { return tasks_.emplace_back(std::move(task)); }

  void measure(int rounds) {
    for (int round = 0; round <= rounds; ++round) {  // the first is for warming up
      std::vector<double> reads, peaks;
      for (std::size_t i = first_; i < tasks_.size(); ++i) {
        fmt::print(stderr, "\rround {}/{}, {}/{} ", round, rounds, i + 1, tasks_.size());
        const auto [read, peak] = sample(tasks_[i]);
        reads.push_back(read), peaks.push_back(peak);
      }
      while (reads.size() < 8) {
        Task nothing{.name = "", .shape = "", .type = "", .run = [] { return 0.0; }};
        const auto [read, peak] = sample(nothing);
        reads.push_back(read), peaks.push_back(peak);
      }
      if (round > 0) reads_.push_back(median(reads)), peaks_.push_back(median(peaks));
    }
    fmt::print(stderr, "\n");
    for (; first_ < tasks_.size(); ++first_) {
      Task& task = tasks_[first_];
      task.prepare = nullptr, task.run = nullptr;  // and what they hold
      task.seconds.erase(task.seconds.begin()), task.roof.erase(task.roof.begin());
    }
  }

  /// A line of the table: the task's time, and a ratio (by rounds) against something.
  void row(const Task& task, const std::vector<double>& ratios, std::string against, Limits limits = {}) {
    rows_.push_back({task.name, task.shape, task.type, 1e3 * median(task.seconds), spread(task.seconds), median(ratios), std::move(against),
                     limits});
  }

  /// Print the table, write the JSON. @return the exit code: 1 if --check and a gate falls short
  int report() {
#if defined(__clang__)
    const std::string compiler = fmt::format("clang {}.{}", __clang_major__, __clang_minor__);
#else
    const std::string compiler = fmt::format("gcc {}.{}", __GNUC__, __GNUC_MINOR__);
#endif
    const double probe_spread = std::max(spread(reads_), spread(peaks_)) - 1;
    fmt::print("{}\n\n{}, {}-float packets, Eigen {}.{}.{}. Roof with {} thread(s): read {:.1f} GB/s, multiply-add {:.1f} GFLOP/s. The "
               "probe's spread: {:.0f} % ({}).\nTimes are CPU time; with threads that of the busiest one. Caches are cold.\n\n",
               question_, compiler, kvsnip::detail::packet_size, EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION,
               threads_.count(), median(reads_) * 1e-9, median(peaks_) * 1e-9, 100 * probe_spread,
               probe_spread < 0.15 ? "quiet" : "not quiet");
    fmt::print("| what | shape | type | threads | ms | spread | ratio | against | gate | goal |\n"
               "|---|---|---|---:|---:|---:|---:|---|---:|---:|\n");
    bool all_hold = true;
    for (const Row& row : rows_) {
      const auto limit = [&](double x) { return x == 0 ? std::string("-") : fmt::format("{} {}", row.limits.at_least ? ">=" : "<=", x); };
      fmt::print("| {} | {} | {} | {} | {:.4g} | {:.2f} | {:#.3g}{} | {} | {} | {} |\n", row.name, row.shape, row.type, threads_.count(),
                 row.ms, row.spread, row.ratio, row.holds() ? "" : " (!)", row.against, limit(row.limits.gate), limit(row.limits.goal));
      all_hold = all_hold && row.holds();
    }
    if (!json_.empty() && !write_json()) return 2;
    return check_ && !all_hold ? 1 : 0;
  }

 private:
  struct Row {
    std::string name, shape, type;
    double ms, spread, ratio;
    std::string against;
    Limits limits;
    bool holds() const { return limits.gate == 0 || (limits.at_least ? ratio >= limits.gate : ratio <= limits.gate); }
  };

  [[noreturn]] static void fail(const std::string& message) {
    fmt::print(stderr, "{}\n", message);
    std::exit(2);
  }
  /// @return the number of threads
  Index parse(int argc, char** argv, bool threaded) {
    const Index cores = std::max<Index>(std::thread::hardware_concurrency(), 1);
    const std::string known = fmt::format("--quick, --check, --json FILE{}", threaded ? ", --threads N" : "");
    Index threads = 1;
    for (int i = 1; i < argc; ++i) {
      const std::string_view flag = argv[i];
      const auto value = [&]() -> std::string {
        if (i + 1 == argc) fail(fmt::format("{} needs a value", flag));
        return argv[++i];
      };
      if (flag == "--quick") quick_ = true;
      else if (flag == "--check") check_ = true;
      else if (flag == "--json") json_ = value();
      else if (flag == "--threads" && threaded) {
        const std::string text = value();
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), threads);
        if (error != std::errc{} || end != text.data() + text.size() || threads < 1 || threads > cores)
          fail(fmt::format("--threads must be a whole number from 1 to {}, the number of cores, got '{}'", cores, text));
      } else if (flag == "--help") {
        fmt::print("{}\nFlags: {}\n", question_, known);
        std::exit(0);
      } else {
        fail(fmt::format("unknown flag '{}', known are: {}", flag, known));
      }
    }
    if (!json_.empty() && !std::ofstream(json_, std::ios::app)) fail(fmt::format("cannot write '{}'", json_));  // now, not after the run
    return threads;
  }

  /// The best of three, of the task and of the probes in between. @return byte/s, FLOP/s
  std::pair<double, double> sample(Task& task) {
    constexpr double long_run = 0.2;  // averages enough by itself
    const double probe_seconds = task.seconds.empty() ? 1e-3 : std::clamp(task.seconds.back(), 0.5e-3, 20e-3);
    double best = 1e30, spent = 0, read = 0, peak = 0;
    for (int repeat = 0; repeat < 3; ++repeat) {
      const bool runs = spent < long_run;
      if (runs && task.prepare) task.prepare();
      peak = std::max(peak, machine_.multiply_add(probe_seconds));
      read = std::max(read, machine_.read());
      if (!runs) continue;
      const double start = threads_.seconds();
      best = std::min(best, task.run());
      spent += threads_.seconds() - start;
    }
    task.seconds.push_back(best);
    task.roof.push_back(std::max(task.bytes / read, task.flops / peak));
    return {read, peak};
  }

  /// x_roof if the ratio is against the roof. A goal above its gate says that both are lower limits.
  bool write_json() const {
    std::ofstream out(json_);
    out << "[\n";
    for (const Row& row : rows_) {
      const auto limit = [](double x) { return x == 0 ? std::string("null") : fmt::format("{}", x); };
      fmt::print(out, R"(  {{"name": "{}", "shape": "{}", "type": "{}", "threads": {}, "median": {:.6g}, "spread": {:.4g}, )", row.name,
                 row.shape, row.type, threads_.count(), row.ms, row.spread);
      fmt::print(out, R"("{}": {:.5g}, "against": "{}", "gate": {}, "goal": {}}}{})", row.against == "roof" ? "x_roof" : "ratio", row.ratio,
                 row.against, limit(row.limits.gate), limit(row.limits.goal), &row == &rows_.back() ? "\n" : ",\n");
    }
    out << "]\n";
    if (!out) fmt::print(stderr, "cannot write '{}'\n", json_);
    return static_cast<bool>(out);
  }

  std::string question_, json_;
  bool quick_ = false, check_ = false;
  Threads threads_;
  Machine machine_;
  std::deque<Task> tasks_;
  std::size_t first_ = 0;  // of the tasks not measured yet
  std::vector<double> reads_, peaks_;
  std::vector<Row> rows_;
};

// --- what is measured: an attention layer

using Eigen::MatrixXf;
using kvsnip::Shape;

inline constexpr Shape llama{.query_heads = 32, .kv_heads = 8, .head_dim = 128};  // Llama 3 8B

template <class T>
std::string type_name() {
  return std::is_same_v<T, float> ? "float" : std::is_same_v<T, Eigen::half> ? "half" : "bfloat16";
}
inline std::string text(const Shape& shape) { return fmt::format("{} x {} x {}", shape.query_heads, shape.kv_heads, shape.head_dim); }

/// End an update without its attention: all weights are 0.
template <class Step>
void skip_attention(Step step) {
  const Index columns = step.wanted_rows() * step.shape().group_size();
  const bool sums = step.wants_column_sums();
  for (Index h = 0; h < step.shape().kv_heads; ++h) {
    const MatrixXf none = MatrixXf::Zero(step.size(h), std::max(columns, step.shape().group_size()));
    if (columns > 0) step.on_attention(h, none.leftCols(columns));
    if (sums) step.on_column_sums(h, none.leftCols(step.shape().group_size()));
    else if (columns == 0) step.done(h);
  }
}

/// Append `tokens` random tokens as a prompt, or a part of one. Their values do not matter: they repeat.
template <class Cache>
void fill(Cache& cache, Index tokens, bool more = false) {
  const Index rows = cache.shape().kv_heads * cache.shape().head_dim, block = std::min<Index>(tokens, 512);
  const MatrixXf k = MatrixXf::Random(rows, block), v = MatrixXf::Random(rows, block);
  for (Index first = 0; first < tokens; first += block) {
    const Index count = std::min(block, tokens - first);
    skip_attention(cache.update(k.leftCols(count), v.leftCols(count), {.more = more || first + count < tokens}));
  }
}

template <class T, kvsnip::Policy P>
struct Layer {
  using Cache = kvsnip::KVCache<T, P>;

  /// Holds `slots` slots.
  Layer(const Shape& shape, Index slots, P policy = P{}, Index budget = 0)
      : cache(shape, budget > 0 ? budget : slots, std::move(policy)),
        k(MatrixXf::Random(shape.kv_heads * shape.head_dim, 1)),
        v(MatrixXf::Random(k.rows(), 1)),
        q(MatrixXf::Random(shape.query_heads * shape.head_dim, 1)),
        out(q.rows(), 1) {
    fill(cache, slots);
  }
  void update() { step.emplace(cache.update(k, v)); }
  void attend(Threads& threads) { kvsnip::attend(*step, q, out, threads); }

  Cache cache;
  MatrixXf k, v, q, out;
  std::optional<typename Cache::Step> step;
};

/// A full cache of a constant length: a token goes for every one that comes.
template <class T>
using SteadyLayer = Layer<T, kvsnip::StreamingLLM>;

/// Bytes of keys and values of a decode step, and its multiply-adds times two.
template <class T>
double decode_bytes(const Shape& shape, Index slots) {
  return 2.0 * static_cast<double>(shape.kv_heads * shape.head_dim * slots) * sizeof(T);
}
inline double decode_flops(const Shape& shape, Index slots) {
  return 4.0 * static_cast<double>(shape.query_heads * shape.head_dim * slots);
}

}  // namespace bench
