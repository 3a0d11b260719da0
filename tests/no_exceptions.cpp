#include <kvsnip/kvsnip.hpp>
#include <kvsnip/registry.hpp>

#include <csignal>
#include <cstdlib>

int main() {
  auto cache = kvsnip::make_cache<float>("snapkv+scissorhands", {.query_heads = 2, .kv_heads = 1, .head_dim = 4}, /*budget=*/64);
  const Eigen::MatrixXf k = Eigen::MatrixXf::Random(4, 100), q = Eigen::MatrixXf::Random(8, 100);
  Eigen::MatrixXf out(8, 100);
  kvsnip::attend(cache.update(k, k), q, out);
  if (cache.size(0) != 64) return 2;
  std::signal(SIGABRT, [](int) { std::_Exit(0); });  // the abort is what we want to see
  kvsnip::KVCache<float, kvsnip::Scissorhands> refused({.query_heads = 2, .kv_heads = 1, .head_dim = 4}, /*budget=*/3);
  return 1;
}
