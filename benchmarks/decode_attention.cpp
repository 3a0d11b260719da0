// How close is a decode step's attention to the machine's limit?
//
// attend() of one new token of one layer over n slots, all kv_heads. The limit ("roof") is the larger of reading K and V
// once and of the multiply-adds at peak, both measured in this run. Baseline: Eigen as one would write it.
#include "bench.hpp"

using namespace bench;

namespace {

template <class T>
Task& decode(Bench& bench, const Shape& shape, Index n) {
  const auto layer = std::make_shared<SteadyLayer<T>>(shape, n);
  return bench.time({.name = "decode",
                     .shape = fmt::format("{}, n = {}", text(shape), n),
                     .type = type_name<T>(),
                     .prepare = [layer] { layer->update(); },
                     .run = bench.timed([layer, &bench] { layer->attend(bench.threads()); }),
                     .bytes = decode_bytes<T>(shape, n),
                     .flops = decode_flops(shape, n)});
}

/// Scores by GEMM, softmax, values by GEMM.
Task& naive(Bench& bench, const Shape& shape, Index n) {
  const Index dim = shape.head_dim;
  const MatrixXf k = MatrixXf::Random(dim, n * shape.kv_heads), v = MatrixXf::Random(dim, n * shape.kv_heads);
  const MatrixXf q = MatrixXf::Random(dim, shape.group_size());
  const auto attend_head = [=](Index h) {
    MatrixXf weights = k.middleCols(h * n, n).transpose() * q / std::sqrt(static_cast<float>(dim));
    for (auto column : weights.colwise()) {
      column = (column.array() - column.maxCoeff()).exp();
      column /= column.sum();
    }
    const MatrixXf out = v.middleCols(h * n, n) * weights;
    use(out(0, 0));
  };
  return bench.time({.name = "decode, naive Eigen",
                     .shape = fmt::format("{}, n = {}", text(shape), n),
                     .type = "float",
                     .run = bench.timed([=, &bench] { bench.threads()(shape.kv_heads, std::cref(attend_head)); }),
                     .bytes = decode_bytes<float>(shape, n),
                     .flops = decode_flops(shape, n)});
}

/// The gates at n slots.
template <class T>
Limits limits(Index n, Index threads) {
  if (threads > 1) return n >= 4096 ? Limits{1.8, 1.3} : Limits{};
  if (std::is_same_v<T, float>) return n >= 4096 ? Limits{2.0, 1.5} : Limits{};
  return {2.0, 1.6};
}

/// The lengths of the usual shape, then other shapes, whose share of the roof should be much the same.
template <class T>
void add(Bench& bench, std::vector<std::function<void()>>& rows) {
  const Task* usual = nullptr;
  for (const Index n : {Index{1024}, Index{4096}, Index{16384}}) {
    if (n > 4096 && bench.quick()) continue;
    const Task& task = decode<T>(bench, llama, n);
    if (n == 4096) usual = &task;
    rows.push_back([=, &task, &bench] { bench.row(task, over_roof(task), "roof", limits<T>(n, bench.threads().count())); });
  }
  if (std::is_same_v<T, Eigen::bfloat16>) return;
  for (const Shape& shape : {Shape{8, 8, 128}, Shape{16, 8, 128}, Shape{56, 8, 128}, Shape{64, 8, 128}, Shape{32, 8, 64}, Shape{32, 8, 80},
                             Shape{32, 8, 96}, Shape{32, 8, 256}, llama}) {
    const Task& task = decode<T>(bench, shape, 4099);
    rows.push_back([=, &task, &bench] {
      bench.row(task, over_roof(task), "roof");
      bench.row(task, over(over_roof(task), over_roof(*usual)), "x roof of " + usual->shape, {1.3, 1.1});
    });
  }
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "How close is a decode step's attention to the machine's limit?", /*threaded=*/true);
  std::vector<std::function<void()>> rows;
  add<float>(bench, rows);
  add<Eigen::half>(bench, rows);
  add<Eigen::bfloat16>(bench, rows);
  const Task& baseline = naive(bench, llama, 4096);
  bench.measure(bench.quick() ? 5 : 15);
  for (const auto& row : rows) row();
  bench.row(baseline, over_roof(baseline), "roof");
  return bench.report();
}
