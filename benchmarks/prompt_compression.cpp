// What does SnapKV cost on a long prompt, with our prefill kernel and without it?
//
// One kv_head of four query heads, a prompt of 32k tokens, budget 1024, window 32.
//   after the prefill   What SnapKV adds to a 32k prefill is lost in the noise of two such runs. So the prompt's last 128
//                       tokens are run with SnapKV and without, on copies of the same cache: update, attention, and with
//                       SnapKV the window's rows, votes, selection, gather. The difference is all that SnapKV adds, and is
//                       held against the whole prefill: the time of the last tokens without it, times the multiply-adds of
//                       the prompt over theirs.
//   from queries alone  on_queries with the window's queries, for engines whose kernel yields no weights. The limit is the
//                       product of all keys with those queries at peak. The step's end (pooling, selection, gather,
//                       memory freed) is in it, and shown by itself. Baseline: Eigen as one would write it.
#include "bench.hpp"

using namespace bench;

namespace {

constexpr Shape shape{.query_heads = 4, .kv_heads = 1, .head_dim = 128};
constexpr Index tokens = 32768, window = 32, budget = 1024, last = 128, columns = window * shape.group_size();

/// Appends the prompt's last tokens to copies of a cache that holds the others.
template <class T, kvsnip::Policy P>
Task& last_tokens(Bench& bench, std::string name) {
  struct Prompt {
    kvsnip::KVCache<T, P> before, cache;
    MatrixXf k, v, q, out;
  };
  const Index rows = shape.query_heads * shape.head_dim;
  const auto prompt = std::make_shared<Prompt>(Prompt{kvsnip::KVCache<T, P>(shape, budget), kvsnip::KVCache<T, P>(shape, budget),
                                                      MatrixXf::Random(shape.head_dim, last), MatrixXf::Random(shape.head_dim, last),
                                                      MatrixXf::Random(rows, last), MatrixXf(rows, last)});
  fill(prompt->before, tokens - last, /*more=*/true);
  return bench.time({.name = std::move(name),
                     .shape = fmt::format("{}, n = {}", text(shape), tokens),
                     .type = type_name<T>(),
                     .prepare = [prompt] { prompt->cache = prompt->before; },
                     .run = bench.timed([prompt] { kvsnip::attend(prompt->cache.update(prompt->k, prompt->v), prompt->q, prompt->out); })});
}

/// SnapKV that notes when it got its last row: what follows is the step's end.
struct NotesLastRow : kvsnip::SnapKV {
  NotesLastRow(const Threads& t, double& s) : threads(&t), seconds(&s) {}
  void observe(Index kv_head, const kvsnip::AttentionRows& rows) {
    SnapKV::observe(kv_head, rows);
    *seconds = threads->seconds();
  }
  const Threads* threads;
  double* seconds;
};

/// @param end_alone  time only what comes after the votes
template <class T>
Task& on_queries(Bench& bench, std::string name, bool end_alone) {
  using Cache = kvsnip::KVCache<T, NotesLastRow>;
  struct Prompt {
    explicit Prompt(Threads& threads) : cache(shape, budget, NotesLastRow(threads, last_row)) {}
    double last_row = 0;
    Cache cache;
    MatrixXf k = MatrixXf::Random(shape.head_dim, tokens + window), v = MatrixXf::Random(shape.head_dim, tokens + window);
    MatrixXf q = MatrixXf::Random(shape.head_dim, columns);
    std::optional<typename Cache::Step> step;
  };
  const auto prompt = std::make_shared<Prompt>(bench.threads());
  return bench.time({.name = std::move(name),
                     .shape = fmt::format("{} x {} queries, n = {} + {}", shape.group_size(), window, tokens, window),
                     .type = type_name<T>(),
                     .prepare = [prompt] { prompt->cache.reset(), prompt->step.emplace(prompt->cache.update(prompt->k, prompt->v)); },
                     .run = [prompt, end_alone, &bench] {
                       const double start = bench.threads().seconds();
                       prompt->step->on_queries(0, prompt->q);
                       return bench.threads().seconds() - (end_alone ? prompt->last_row : start);
                     },
                     .flops = 2.0 * shape.head_dim * columns * tokens});
}

/// The votes alone: scores by GEMM, softmax of what is visible, sums.
Task& naive(Bench& bench) {
  const MatrixXf k = MatrixXf::Random(shape.head_dim, tokens + window), q = MatrixXf::Random(shape.head_dim, columns);
  return bench.time({.name = "from queries alone, naive Eigen",
                     .shape = fmt::format("{} x {} queries, n = {} + {}", shape.group_size(), window, tokens, window),
                     .type = "float",
                     .run = bench.timed([=] {
                       MatrixXf weights = k.transpose() * q / std::sqrt(static_cast<float>(shape.head_dim));
                       for (Index j = 0; j < columns; ++j) {
                         auto visible = weights.col(j).head(tokens + j / shape.group_size() + 1);
                         visible = (visible.array() - visible.maxCoeff()).exp();
                         visible /= visible.sum();
                         weights.col(j).tail(window - j / shape.group_size() - 1).setZero();
                       }
                       const Eigen::VectorXf votes = weights.rowwise().sum();
                       use(votes[0]);
                     }),
                     .flops = 2.0 * shape.head_dim * columns * tokens});
}

template <class T>
void add(Bench& bench, std::vector<std::function<void()>>& rows) {
  const Task& without = last_tokens<T, kvsnip::Full>(bench, "prefill, last 128 tokens");
  const Task& with = last_tokens<T, kvsnip::SnapKV>(bench, "prefill, last 128 tokens, and SnapKV");
  const Task& queries = on_queries<T>(bench, "SnapKV from queries alone", false);
  const Task& end = on_queries<T>(bench, "SnapKV, the step's end", true);
  rows.push_back([&] {
    constexpr double pairs = 0.5 * tokens * (tokens + 1), last_pairs = pairs - 0.5 * (tokens - last) * (tokens - last + 1);
    std::vector<double> extra(with.seconds.size());
    for (std::size_t i = 0; i < extra.size(); ++i) extra[i] = (with.seconds[i] / without.seconds[i] - 1) * last_pairs / pairs;
    bench.row(with, extra, "extra / the whole prefill", {0.02, 0.005});
    bench.row(queries, over_roof(queries), "GEMM limit", {2.0, 1.4});
    bench.row(end, over(end, queries), "from queries alone");
  });
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "What does SnapKV cost on a prompt of 32k tokens?");
  std::vector<std::function<void()>> rows;
  add<float>(bench, rows);
  add<Eigen::half>(bench, rows);
  add<Eigen::bfloat16>(bench, rows);
  const Task& baseline = naive(bench);
  bench.measure(bench.quick() ? 3 : 9);
  for (const auto& row : rows) row();
  bench.row(baseline, over_roof(baseline), "GEMM limit");
  return bench.report();
}
