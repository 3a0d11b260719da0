// How close is a decode step's attention to the machine's limit?
//
// One step of one layer, full cache of n slots, all kv_heads. The limit ("roof") is the larger of reading K and V once and
// of the multiply-adds at peak, both measured in this run, interleaved with the kernels. Baseline: Eigen's GEMM.
#include "bench.hpp"

using namespace bench;

namespace {

struct Case {
  std::string type;
  kvsnip::Shape shape;
  Index n;
  double gate = 0, goal = 0;
  std::function<void()> run;
  double bytes = 0, flops = 0;
  std::vector<double> seconds;
};

template <class T>
std::shared_ptr<kvsnip::KVCache<T, kvsnip::Full>> filled(const kvsnip::Shape& shape, Index n) {
  auto cache = std::make_shared<kvsnip::KVCache<T, kvsnip::Full>>(shape, n);
  for (Index first = 0; first < n; first += 256) {
    const Index count = std::min<Index>(256, n - first);
    const MatrixXf k = MatrixXf::Random(shape.kv_heads * shape.head_dim, count), v = MatrixXf::Random(shape.kv_heads * shape.head_dim, count);
    (void)cache->update(k, v, {.more = first + count < n});
  }
  return cache;
}

template <class T>
Case make(const char* type, const kvsnip::Shape& shape, Index n, double gate, double goal, const Threads& threads) {
  Case c{type, shape, n, gate, goal, {}, 0, 0, {}};
  auto cache = filled<T>(shape, n - 1);
  auto step = std::make_shared<typename kvsnip::KVCache<T, kvsnip::Full>::Step>(
      cache->update(MatrixXf::Random(shape.kv_heads * shape.head_dim, 1), MatrixXf::Random(shape.kv_heads * shape.head_dim, 1)));
  auto q = std::make_shared<MatrixXf>(MatrixXf::Random(shape.query_heads * shape.head_dim, 1));
  auto out = std::make_shared<MatrixXf>(q->rows(), 1);
  // The step stays open, so that the same attention can run again and again: its kernel, without the step's end.
  c.run = [=, &threads] {
    threads(step->shape().kv_heads, [&](Index h) { kvsnip::detail::attend_head(*step, h, *q, *out, /*end_head=*/false); });
    use((*out)(0, 0));
    (void)cache;
  };
  c.bytes = 2.0 * static_cast<double>(shape.kv_heads * n * shape.head_dim) * sizeof(T);
  c.flops = 4.0 * static_cast<double>(shape.query_heads * n * shape.head_dim);
  return c;
}

/// Eigen as one would write it: scores by GEMM, softmax, values by GEMM.
Case make_naive(const kvsnip::Shape& shape, Index n) {
  Case c{"float, naive Eigen", shape, n, 0, 0, {}, 0, 0, {}};
  const Index dim = shape.head_dim, group = shape.group_size();
  auto k = std::make_shared<std::vector<MatrixXf>>(), v = std::make_shared<std::vector<MatrixXf>>();
  for (Index h = 0; h < shape.kv_heads; ++h) k->push_back(MatrixXf::Random(dim, n)), v->push_back(MatrixXf::Random(dim, n));
  auto q = std::make_shared<MatrixXf>(MatrixXf::Random(dim, group));
  c.run = [=] {
    for (std::size_t h = 0; h < k->size(); ++h) {
      MatrixXf s = (*k)[h].transpose() * *q / std::sqrt(static_cast<float>(dim));
      for (Index g = 0; g < group; ++g) {
        s.col(g) = (s.col(g).array() - s.col(g).maxCoeff()).exp();
        s.col(g) /= s.col(g).sum();
      }
      const MatrixXf out = (*v)[h] * s;
      use(out(0, 0));
    }
  };
  c.bytes = 2.0 * static_cast<double>(shape.kv_heads * n * dim) * sizeof(float);
  c.flops = 4.0 * static_cast<double>(shape.query_heads * n * dim);
  return c;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const Threads threads(options.threads);
  const kvsnip::Shape llama{.query_heads = 32, .kv_heads = 8, .head_dim = 128};
  const bool one = options.threads == 1;
  std::vector<Case> cases;
  for (const Index n : options.quick ? std::vector<Index>{4096} : std::vector<Index>{1024, 4096, 16384}) {
    cases.push_back(make<float>("float", llama, n, n < 4096 ? 0 : one ? 2.0 : 1.8, n < 4096 ? 0 : one ? 1.5 : 1.3, threads));
    cases.push_back(make<Eigen::half>("half", llama, n, one ? 2.0 : n < 4096 ? 0 : 1.8, one ? 1.6 : n < 4096 ? 0 : 1.3, threads));
    cases.push_back(make<Eigen::bfloat16>("bfloat16", llama, n, one ? 2.0 : n < 4096 ? 0 : 1.8, one ? 1.6 : n < 4096 ? 0 : 1.3, threads));
    if (one && n <= 4096) cases.push_back(make_naive(llama, n));
  }
  if (!options.quick)
    for (const kvsnip::Shape& shape : {kvsnip::Shape{8, 8, 128}, kvsnip::Shape{16, 8, 128}, kvsnip::Shape{56, 8, 128}, kvsnip::Shape{64, 8, 128},
                                       kvsnip::Shape{32, 8, 64}, kvsnip::Shape{32, 8, 80}, kvsnip::Shape{32, 8, 96}, kvsnip::Shape{32, 8, 256}}) {
      cases.push_back(make<float>("float", shape, 4099, 0, 0, threads));
      cases.push_back(make<Eigen::half>("half", shape, 4099, 0, 0, threads));
    }

  const Eigen::ArrayXf probe = Eigen::ArrayXf::Random(Index{48} << 20 >> 2);  // 48 MiB: past the caches
  std::vector<double> read, peak;
  const int rounds = options.quick ? 7 : 15;
  for (int round = 0; round < rounds; ++round) {
    fmt::print(stderr, "\rround {}/{}", round + 1, rounds);
    for (Case& c : cases) {
      read.push_back(static_cast<double>(probe.size()) * sizeof(float) / read_seconds(probe.data(), probe.size(), threads) / static_cast<double>(threads.count()));
      peak.push_back(fma_flops());
      c.run();  // warm
      const double start = cpu_seconds();
      int runs = 0;
      do c.run(), ++runs;
      while (cpu_seconds() - start < 0.01);
      c.seconds.push_back((cpu_seconds() - start) / runs / static_cast<double>(threads.count()));
    }
  }
  fmt::print(stderr, "\n");
  const double bandwidth = median(read), flops = median(peak), cores = static_cast<double>(threads.count());
  fmt::print("roof, per core: read {:.1f} GB/s, multiply-add {:.1f} GFLOP/s\n\n", bandwidth * 1e-9, flops * 1e-9);
  std::vector<Row> rows;
  for (const Case& c : cases) {
    const double roof = std::max(c.bytes / bandwidth, c.flops / flops) / cores, m = median(c.seconds);
    rows.push_back({"decode", fmt::format("{} x {} x {}, n = {}", c.shape.query_heads, c.shape.kv_heads, c.shape.head_dim, c.n), c.type,
                    threads.count(), 1e3 * m, spread(c.seconds), m / roof, "roof", c.gate, c.goal});
  }
  return report(options, "How close is a decode step's attention to the machine's limit?", rows, std::max(spread(peak), spread(read)));
}
