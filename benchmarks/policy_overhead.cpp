// What does a policy cost per decode step, as a share of the attention it decides about?
//
// A layer that is full at its budget of 4096 slots, stored as half; every step evicts. Timed are all calls of a step that
// are not attention, of all kv_heads: update() (victims chosen and scored, the new token stored) and, per kv_head,
// accept(), as our kernel calls it, with weights made beforehand; the last call runs the step's end (observe, insert).
// For the ratio the same is subtracted for a full cache with room left, which has no policy: the token is stored there too.
// The rest is the policy's cost, eviction's bookkeeping included, and is held against attend() alone.
//
// The ms of the table are before the subtraction.
//
// A kv_head's weights have just been written. The policy's state is in the caches for the rows that have a gate, as it is
// when one layer is measured alone; "cold" rows read 64 MiB before every timed step, as many other layers do in a model.
// Calls are too short for the CPU clock, so the wall clock times them; a step that was interrupted does not count,
// because victims are chosen in cycles (one choice serves several steps): each place in the cycle gets the median over
// cycles, and the cost is the mean over the places.
#include <kvsnip/registry.hpp>

#include <chrono>
#include <random>

#include "bench.hpp"

using namespace bench;

namespace {

constexpr Index slots = 4096;

/// Weights of about 1 / slots, exponentially distributed: what is below uniform changes from row to row.
const Eigen::ArrayXf& some_weights() {
  static const Eigen::ArrayXf weights = [] {
    std::mt19937 bits;
    std::exponential_distribution<float> weight(static_cast<float>(slots));
    return Eigen::ArrayXf(Eigen::ArrayXf::NullaryExpr(4 * slots * llama.group_size(), [&](Index) { return weight(bits); }));
  }();
  return weights;
}

template <kvsnip::Policy P>
class Books {
 public:
  Books(Bench& bench, P policy, bool cold)
      : machine_(bench.machine()), cold_(cold), layer_(llama, slots, std::move(policy)), weights_(2 * slots * llama.group_size()) {}
  auto& cache() { return layer_.cache; }

  /// Untimed steps: more than a history_window, so that all of the policy's state has been touched.
  void warm_up(Index steps) {
    for (Index i = 0; i < steps; ++i) step([](auto call) { call(); });
  }
  /// @param cycle   steps from one choice of victims to the next
  /// @param stride  of a long cycle only its first step and then every stride-th are timed
  /// @return mean seconds of a step
  double run_cycles(Index cycle, Index stride, int cycles) {
    std::vector<std::vector<double>> seconds(static_cast<std::size_t>((cycle + stride - 1) / stride));
    for (int i = 0; i < cycles; ++i)
      for (Index place = 0; place < cycle; ++place)
        if (place % stride == 0) seconds[static_cast<std::size_t>(place / stride)].push_back(timed_step());
        else step([](auto call) { call(); });
    double first = median(seconds[0]), others = 0;
    for (std::size_t place = 1; place < seconds.size(); ++place) others += median(seconds[place]);
    if (seconds.size() == 1) return first;
    return (first + others / static_cast<double>(seconds.size() - 1) * static_cast<double>(cycle - 1)) / static_cast<double>(cycle);
  }

 private:
  double timed_step() {
    using Clock = std::chrono::steady_clock;
    double seconds = 0;
    if (cold_) machine_.read();
    step([&](auto call) {
      const Clock::time_point start = Clock::now();
      call();
      seconds += std::chrono::duration<double>(Clock::now() - start).count();
    });
    return seconds;
  }
  template <class Around>
  void step(Around around) {
    around([&] { layer_.update(); });
    for (Index h = 0; h < llama.kv_heads; ++h) {
      const Index n = layer_.step->size(h) * llama.group_size();
      offset_ = (offset_ + 509) % (some_weights().size() - weights_.size());
      weights_.head(n) = some_weights().segment(offset_, n);
      around([&] {
        if (layer_.step->wants_attention()) layer_.step->accept(h, weights_.data(), llama.group_size());
        else layer_.step->done(h);
      });
    }
  }

  Machine& machine_;
  bool cold_;
  Layer<Eigen::half, P> layer_;
  Eigen::ArrayXf weights_;  // (slots, group_size), and room for more
  Index offset_ = 0;
};

template <kvsnip::Policy P>
Task& cost(Bench& bench, std::string name, P policy, Index cycle = 8, bool cold = false) {
  const auto books = std::make_shared<Books<P>>(bench, std::move(policy), cold);
  return bench.time({.name = std::move(name),
                     .shape = fmt::format("{}, {} slots", text(llama), slots),
                     .type = "half",
                     .run = [=] {
                       if (!cold) books->warm_up(std::max<Index>(cycle, 512));
                       return books->run_cycles(cycle, std::max<Index>(cycle / 32, 1), 3);
                     }});
}

/// A cache that has room for more: what a token costs without a policy.
Task& no_policy(Bench& bench, bool cold = false) {
  const auto books = std::make_shared<Books<kvsnip::Full>>(bench, kvsnip::Full{}, cold);
  fill(books->cache(), slots, /*more=*/true);  // so much memory
  return bench.time({.name = cold ? "full, cold" : "full",
                     .shape = fmt::format("{}, {} slots", text(llama), slots),
                     .type = "half",
                     .prepare = [=] { books->cache().reset(), fill(books->cache(), slots); },
                     .run = [=] { return books->run_cycles(8, 1, 3); }});
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "What does a policy cost per decode step, as a share of the attention it decides about?");
  using kvsnip::Scissorhands;
  const auto layer = std::make_shared<SteadyLayer<Eigen::half>>(llama, slots);
  const Task& attention = bench.time({.name = "attention alone",
                                      .shape = fmt::format("{}, {} slots", text(llama), slots),
                                      .type = "half",
                                      .prepare = [=] { layer->update(); },
                                      .run = bench.timed([=, &bench] { layer->attend(bench.threads()); }),
                                      .bytes = decode_bytes<Eigen::half>(llama, slots),
                                      .flops = decode_flops(llama, slots)});
  const Task &none = no_policy(bench), &none_cold = no_policy(bench, /*cold=*/true);
  constexpr Limits scissorhands{0.02, 0.007}, others{0.05, 0.02};
  const std::pair<const Task*, Limits> policies[] = {
      {&cost(bench, "scissorhands, fraction", Scissorhands{}), scissorhands},
      {&cost(bench, "scissorhands, count", Scissorhands{{.mode = Scissorhands::Mode::count}}, slots / 2), scissorhands},
      {&cost(bench, "snapkv+scissorhands", kvsnip::Chain<kvsnip::SnapKV, Scissorhands>{}), scissorhands},
      {&cost(bench, "scissorhands, type-erased", kvsnip::make_policy("scissorhands")), scissorhands},
      {&cost(bench, "streaming_llm", kvsnip::StreamingLLM{}), others},
      {&cost(bench, "key_norm", kvsnip::KeyNorm{}, 128), others},
      {&cost(bench, "key_diff", kvsnip::KeyDiff{}, 128), others},
      {&cost(bench, "lag_kv", kvsnip::LagKV{}, 128), others},
      {&cost(bench, "cur", kvsnip::CUR{}, 128), others},
      {&cost(bench, "random", kvsnip::Random{}, 128), others},
      {&cost(bench, "h2o", kvsnip::H2O{}, 128), others},
      {&cost(bench, "h2o, mean of 400 rows", kvsnip::H2O{{.score = kvsnip::H2O::Score::mean, .history_window = 400}}, 128), others},
      {&cost(bench, "tova", kvsnip::TOVA{}, 128), others},
      {&cost(bench, "loss_estimate(streaming_llm)", kvsnip::LossEstimate<kvsnip::StreamingLLM>{}, 64), others},
      {&cost(bench, "periodic(snapkv, interval=128)", kvsnip::Periodic<kvsnip::SnapKV>{kvsnip::SnapKV{}, {.interval = 128}}, 128), others},
      {&cost(bench, "merging(streaming_llm)", kvsnip::Merging<kvsnip::StreamingLLM>{}, 8), {}},  // compares every victim's key with all others
  };
  const Task& cold = cost(bench, "scissorhands, fraction, cold", Scissorhands{}, 8, /*cold=*/true);
  bench.measure(bench.quick() ? 4 : 9);

  bench.row(attention, over_roof(attention), "roof");
  const auto row = [&](const Task& task, const Task& without, Limits limits) {
    std::vector<double> net = task.seconds;
    for (std::size_t i = 0; i < net.size(); ++i) net[i] -= without.seconds[i];
    bench.row(task, over(net, attention.seconds), "attention alone, less full", limits);
  };
  bench.row(none, over(none, attention), "attention alone");
  for (const auto& [task, limits] : policies) row(*task, none, limits);
  bench.row(none_cold, over(none_cold, attention), "attention alone");
  row(cold, none_cold, {});
  return bench.report();
}
