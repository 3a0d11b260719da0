// A layer's cache with a budget: 4,096 tokens go by and 1,024 are kept, the attention sinks among them.
#include <fmt/core.h>

#include <kvsnip/kvsnip.hpp>

using Eigen::MatrixXf;

int main() {
  const kvsnip::Shape shape{.query_heads = 8, .kv_heads = 2, .head_dim = 64};
  kvsnip::KVCache<float, kvsnip::Scissorhands> cache(shape, /*budget=*/1024, kvsnip::Scissorhands{{.history_window = 400}});

  MatrixXf out(shape.query_heads * shape.head_dim, 1);
  for (int token = 0; token < 4096; ++token) {
    const MatrixXf k = MatrixXf::Random(shape.kv_heads * shape.head_dim, 1);  // your model's keys, after RoPE,
    const MatrixXf v = MatrixXf::Random(shape.kv_heads * shape.head_dim, 1);  // its values
    const MatrixXf q = MatrixXf::Random(shape.query_heads * shape.head_dim, 1);  // and queries
    auto step = cache.update(k, v);  // appends; a full cache evicts first
    kvsnip::attend(step, q, out);    // attends, then tells the policy what was attended to
  }
  fmt::print("seen {} tokens, hold {}: positions {}, {}, {}, {} and {} newer ones\n", cache.tokens_seen(), cache.size(0), cache.positions(0)[0],
             cache.positions(0)[1], cache.positions(0)[2], cache.positions(0)[3], cache.size(0) - 4);
  return cache.size(0) == 1024 && cache.positions(0)[0] == 0 && out.allFinite() ? 0 : 1;
}
