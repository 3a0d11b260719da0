// What share of the processor's multiply-adds does the attention of a prompt reach, and what do wanted rows cost?
//
// attend() of a causal prompt through an empty cache, one kv_head a thread: the time is linear in them. Counted are the
// multiply-adds that causality leaves, n (n + 1) / 2 pairs of query and key; what a kernel computes beyond them is its
// own loss. Policies that want the rows of the last 32 queries, or the column sums, and do nothing with them are held
// against one that wants nothing. Baseline: Eigen as one would write it, which computes all n x n pairs.
#include "bench.hpp"

using namespace bench;

namespace {

/// Wants what SnapKV wants, and ignores it: what is left is the emission.
struct LastRows {
  Index wanted_rows(const kvsnip::StepInfo& step) const { return std::min<Index>(32, step.num_queries); }
  void observe(Index, const kvsnip::AttentionRows&) {}
  void reset(const Shape&) {}
};

/// Wants what a heavy-hitter policy wants, likewise.
struct Sums {
  bool wants_column_sums(const kvsnip::StepInfo&) const { return true; }
  void observe_column_sums(Index, const kvsnip::ColumnSums&) {}
  void reset(const Shape&) {}
};

double causal_flops(const Shape& shape, Index n) {
  return 2.0 * static_cast<double>(shape.query_heads * shape.head_dim * n) * static_cast<double>(n + 1);
}
std::string prompt_text(const Shape& shape, Index n) { return fmt::format("{}, n = {}", text(shape), n); }

template <class T, kvsnip::Policy P = kvsnip::Full>
Task& prefill(Bench& bench, const Shape& shape, Index n, std::string name = "prefill") {
  struct Prompt {
    kvsnip::KVCache<T, P> cache;
    MatrixXf k, v, q, out;
    std::optional<typename kvsnip::KVCache<T, P>::Step> step;
  };
  const Index kv_rows = shape.kv_heads * shape.head_dim, rows = shape.query_heads * shape.head_dim;
  const auto prompt = std::make_shared<Prompt>(Prompt{kvsnip::KVCache<T, P>(shape, n), MatrixXf::Random(kv_rows, n),
                                                      MatrixXf::Random(kv_rows, n), MatrixXf::Random(rows, n), MatrixXf(rows, n), {}});
  return bench.time({.name = std::move(name),
                     .shape = prompt_text(shape, n),
                     .type = type_name<T>(),
                     .prepare = [prompt] { prompt->cache.reset(), prompt->step.emplace(prompt->cache.update(prompt->k, prompt->v)); },
                     .run = bench.timed([prompt, &bench] { kvsnip::attend(*prompt->step, prompt->q, prompt->out, bench.threads()); }),
                     .flops = causal_flops(shape, n)});
}

/// Per query head: scores by GEMM, softmax of what is visible, values by GEMM.
Task& naive(Bench& bench, const Shape& shape, Index n) {
  const Index dim = shape.head_dim;
  const MatrixXf k = MatrixXf::Random(dim, n * shape.kv_heads), v = MatrixXf::Random(dim, n * shape.kv_heads);
  const MatrixXf q = MatrixXf::Random(dim, n * shape.query_heads);
  const auto attend_head = [=](Index query_head) {
    const Index first = query_head / shape.group_size() * n;
    MatrixXf weights = k.middleCols(first, n).transpose() * q.middleCols(query_head * n, n) / std::sqrt(static_cast<float>(dim));
    for (Index j = 0; j < n; ++j) {
      auto visible = weights.col(j).head(j + 1);
      visible = (visible.array() - visible.maxCoeff()).exp();
      visible /= visible.sum();
      weights.col(j).tail(n - j - 1).setZero();
    }
    const MatrixXf out = v.middleCols(first, n) * weights;
    use(out(0, 0));
  };
  return bench.time({.name = "prefill, naive Eigen",
                     .shape = prompt_text(shape, n),
                     .type = "float",
                     .run = bench.timed([=, &bench] { bench.threads()(shape.query_heads, std::cref(attend_head)); }),
                     .flops = causal_flops(shape, n)});
}

template <class T>
void add(Bench& bench, std::vector<std::function<void()>>& rows) {
  const Index heads = bench.threads().count();
  const Shape usual{.query_heads = 4 * heads, .kv_heads = heads, .head_dim = 128};
  const auto share_of_peak = [&](const Task& task, Limits limits) {
    rows.push_back([=, &task, &bench] { bench.row(task, over(task.roof, task.seconds), "multiply-add peak", limits); });
  };
  const Task& none = prefill<T>(bench, usual, 2048);
  share_of_peak(none, {0.65, 0.80, /*at_least=*/true});
  const Task& last = prefill<T, LastRows>(bench, usual, 2048, "prefill, last 32 rows wanted");
  const Task& sums = prefill<T, Sums>(bench, usual, 2048, "prefill, column sums wanted");
  rows.push_back([&] { bench.row(last, over(last, none), "prefill", {1.03, 1.01}), bench.row(sums, over(sums, none), "prefill", {1.03, 1.01}); });
  if (std::is_same_v<T, Eigen::bfloat16> || (bench.quick() && !std::is_same_v<T, float>)) return;
  const std::pair<Index, Index> others[] = {{1, 128}, {2, 128}, {7, 128}, {8, 128}, {4, 64}, {4, 80}, {4, 96}, {4, 256}};
  for (const auto& [group, dim] : others)
    share_of_peak(prefill<T>(bench, {group * heads, heads, dim}, 1021), {});
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "What share of the processor's multiply-adds does the attention of a prompt reach?", /*threaded=*/true);
  std::vector<std::function<void()>> rows;
  add<float>(bench, rows);
  add<Eigen::half>(bench, rows);
  add<Eigen::bfloat16>(bench, rows);
  const Task& baseline = naive(bench, {4 * bench.threads().count(), bench.threads().count(), 128}, 2048);
  bench.measure(bench.quick() ? 4 : 11);
  for (const auto& row : rows) row();
  bench.row(baseline, over(baseline.roof, baseline.seconds), "multiply-add peak");
  return bench.report();
}
