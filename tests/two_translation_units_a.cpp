#include <kvsnip/fmt.hpp>
#include <kvsnip/kvsnip.hpp>
#include <kvsnip/registry.hpp>

kvsnip::Index use_in_another_unit();

int main() {
  auto cache = kvsnip::make_cache<float>("scissorhands", {.query_heads = 1, .kv_heads = 1, .head_dim = 2}, /*budget=*/32);
  return cache.budget() == use_in_another_unit() ? 0 : 1;
}
