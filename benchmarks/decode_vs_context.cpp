// How much faster does a layer decode with a budget of 1024, as the context grows?
//
// A decode step of one layer, update() and attend() with its callback: a full cache against Scissorhands, which evicts one
// token per step. Victims are chosen eight at a time, so it is the mean of eight steps. A bounded cache's step does not
// depend on how many tokens were seen: one that has seen 1024 stands for all.
#include "bench.hpp"

using namespace bench;

namespace {

constexpr Index budget = 1024;

/// The mean of some steps, each on cold caches.
template <class L>
Task& decode(Bench& bench, std::string name, std::string type, Index seen, std::shared_ptr<L> layer, int steps) {
  const auto one = bench.timed([=, &bench] { layer->update(), layer->attend(bench.threads()); });
  return bench.time({.name = std::move(name),
                     .shape = fmt::format("{}, {} tokens seen", text(llama), seen),
                     .type = std::move(type),
                     .run = [=, &bench] {
                       double seconds = one();
                       for (int i = 1; i < steps; ++i) bench.machine().read(), seconds += one();
                       return seconds / steps;
                     }});
}

template <class T>
void add(Bench& bench, Index seen, std::vector<std::function<void()>>& rows) {
  const auto everything = std::make_shared<Layer<T, kvsnip::Full>>(llama, seen);
  const MatrixXf more = MatrixXf::Random(llama.kv_heads * llama.head_dim, 256);
  everything->cache.update(more, more).abandon();  // leaves memory for as many steps
  const auto bounded = std::make_shared<Layer<T, kvsnip::Scissorhands>>(llama, budget);
  const Task& full = decode(bench, "decode step, full", type_name<T>(), seen, everything, 1);
  const Task& scissorhands = decode(bench, "decode step, scissorhands at 1024", type_name<T>(), seen, bounded, 8);
  rows.push_back([&bench, &full, &scissorhands, seen] {
    bench.row(full, over(full, full), "full");
    bench.row(scissorhands, over(full, scissorhands), "full, times faster", seen == 16384 ? Limits{12, 15, /*at_least=*/true} : Limits{});
  });
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "How much faster does a layer decode with a budget of 1024, as the context grows?", /*threaded=*/true);
  std::vector<std::function<void()>> rows;
  for (Index seen = 1024; seen <= (bench.quick() ? 16384 : 65536); seen *= 2) {
    add<float>(bench, seen, rows);
    add<Eigen::half>(bench, seen, rows);
    bench.measure(bench.quick() ? 5 : 11);  // length by length: the caches of all would be gigabytes
  }
  for (const auto& row : rows) row();
  return bench.report();
}
