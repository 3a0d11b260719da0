#include <kvsnip/kvsnip.hpp>

int main() {
  kvsnip::KVCache<float, kvsnip::StreamingLLM> cache({.query_heads = 2, .kv_heads = 1, .head_dim = 4}, /*budget=*/8);
  for (int token = 0; token < 20; ++token) {
    const Eigen::MatrixXf k = Eigen::MatrixXf::Random(4, 1), v = Eigen::MatrixXf::Random(4, 1), q = Eigen::MatrixXf::Random(8, 1);
    Eigen::MatrixXf out(8, 1);
    kvsnip::attend(cache.update(k, v), q, out);
  }
  return cache.size(0) == 8 ? 0 : 1;
}
