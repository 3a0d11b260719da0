// What every benchmark shares: CPU time, the machine's own limits measured in the same run, medians, gates, a Markdown
// table and JSON.
#pragma once

#include <fmt/core.h>
#include <fmt/ostream.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <functional>
#include <kvsnip/kvsnip.hpp>
#include <string>
#include <thread>
#include <vector>

namespace bench {

using Eigen::MatrixXf;
using kvsnip::Index;

/// CPU time of the process (of all its threads) in seconds: immune to other processes' time slices.
inline double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}
/// Keep a result alive.
inline void use(float x) {
  volatile float sink = x;
  (void)sink;
}

/// An executor for attend(): a static split over threads that live as long as it does.
class Threads {
 public:
  explicit Threads(Index count) : count_(count) {}
  template <class Fn>
  void operator()(Index n, Fn fn) const {
    std::vector<std::thread> workers;
    for (Index t = 1; t < count_; ++t)
      workers.emplace_back([&, t] { for (Index i = t; i < n; i += count_) fn(i); });
    for (Index i = 0; i < n; i += count_) fn(i);
    for (std::thread& worker : workers) worker.join();
  }
  Index count() const { return count_; }

 private:
  Index count_;
};

/// Seconds of CPU time per thread that one core needs to read `bytes` in four streams.
inline double read_seconds(const float* data, Index floats, const Threads& threads) {
  const double start = cpu_seconds();
  threads(threads.count(), [&](Index t) {
    const Index part = floats / threads.count() / 4;
    const float* base = data + t * part * 4;
    using Block = Eigen::Map<const Eigen::Array<float, 64, 1>>;
    Eigen::Array<float, 64, 1> a = Eigen::Array<float, 64, 1>::Zero();
    for (Index i = 0; i + 64 <= part; i += 64)
      a += (Block(base + i) + Block(base + part + i)) + (Block(base + 2 * part + i) + Block(base + 3 * part + i));
    use(a.sum());
  });
  return (cpu_seconds() - start) / static_cast<double>(threads.count());
}

/// Peak multiply-adds of one core [FLOP/s]: a loop that stays in registers.
inline double fma_flops() {
  namespace ei = Eigen::internal;
  using Packet = kvsnip::detail::Packet;
  constexpr int chains = 10;
  constexpr int rounds = 100000;
  Packet sum[chains];
  for (Packet& s : sum) s = ei::pset1<Packet>(0.5f);
  const Packet x = ei::pset1<Packet>(0.999f), y = ei::pset1<Packet>(1e-3f);
  const double start = cpu_seconds();
  for (int i = 0; i < rounds; ++i)
    for (Packet& s : sum) s = ei::pmadd(s, x, y);
  const double seconds = cpu_seconds() - start;
  float total = 0;
  for (const Packet& s : sum) total += ei::predux(s);
  use(total);
  return 2.0 * chains * rounds * static_cast<double>(kvsnip::detail::packet_size) / seconds;
}

inline double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}
inline double spread(const std::vector<double>& x) {
  return *std::max_element(x.begin(), x.end()) / *std::min_element(x.begin(), x.end());
}

/// One line of the result.
struct Row {
  std::string name, shape, type;
  Index threads = 1;
  double median_ms = 0, spread = 1;
  double ratio = 0;      ///< against `against`, in the same run
  std::string against;
  double gate = 0, goal = 0;   ///< 0: none
  bool at_least = false;       ///< the ratio must be at least the gate, not at most
  bool holds() const { return gate == 0 || (at_least ? ratio >= gate : ratio <= gate); }
};

/// --quick, --check, --json FILE, --threads N.
struct Options {
  bool quick = false, check = false;
  std::string json;
  Index threads = 1;
};
inline Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto value = [&]() -> std::string {
      if (i + 1 < argc) return argv[++i];
      fmt::print(stderr, "{} needs a value\n", flag);
      std::exit(2);
    };
    if (flag == "--quick") options.quick = true;
    else if (flag == "--check") options.check = true;
    else if (flag == "--json") options.json = value();
    else if (flag == "--threads") options.threads = std::max(1, std::atoi(value().c_str()));
    else {
      fmt::print(stderr, "unknown flag {}: known are --quick, --check, --json FILE, --threads N\n", flag);
      std::exit(2);
    }
  }
  return options;
}

/// Print the table, write the JSON; the exit code: 1 if --check and a gate falls short.
inline int report(const Options& options, const std::string& question, const std::vector<Row>& rows, double probe_spread) {
#if defined(__clang__)
  const std::string compiler = fmt::format("clang {}.{}", __clang_major__, __clang_minor__);
#else
  const std::string compiler = fmt::format("gcc {}.{}", __GNUC__, __GNUC_MINOR__);
#endif
  fmt::print("{}\n\n{}, {}-float packets, Eigen {}.{}.{}; the probe's spread in this run: {:.0f} % ({})\n\n", question, compiler,
             kvsnip::detail::packet_size, EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION, 100 * (probe_spread - 1),
             probe_spread < 1.15 ? "quiet" : "noisy");
  fmt::print("| what | shape | type | threads | ms | spread | ratio | against | gate | goal |\n|---|---|---|---:|---:|---:|---:|---|---:|---:|\n");
  bool all_hold = true;
  for (const Row& row : rows) {
    const auto limit = [&](double x) { return x == 0 ? std::string("-") : fmt::format("{} {}", row.at_least ? ">=" : "<=", x); };
    fmt::print("| {} | {} | {} | {} | {:.3f} | {:.2f} | {:.3f}{} | {} | {} | {} |\n", row.name, row.shape, row.type, row.threads, row.median_ms,
               row.spread, row.ratio, row.holds() ? "" : " (!)", row.against, limit(row.gate), limit(row.goal));
    all_hold = all_hold && row.holds();
  }
  if (!options.json.empty()) {
    std::ofstream out(options.json);
    out << "[\n";
    for (std::size_t i = 0; i < rows.size(); ++i)
      fmt::print(out, "  {{\"name\": \"{}\", \"shape\": \"{}\", \"type\": \"{}\", \"threads\": {}, \"median_ms\": {}, \"spread\": {}, \"ratio\": {}, \"against\": \"{}\"}}{}\n",
                 rows[i].name, rows[i].shape, rows[i].type, rows[i].threads, rows[i].median_ms, rows[i].spread, rows[i].ratio, rows[i].against,
                 i + 1 < rows.size() ? "," : "");
    out << "]\n";
    if (!out) {
      fmt::print(stderr, "cannot write {}\n", options.json);
      return 2;
    }
  }
  return options.check && !all_hold ? 1 : 0;
}

}  // namespace bench
