// A policy in about 30 lines: keep the keys with the smallest norms (Devoto et al., arXiv:2406.11430).
//
// A policy scores slots, higher is kept; protection, ties, top-k and memory are not its business. Hooks it does not need
// stay absent: this one observes no attention, so no weights are ever computed for it.
#include <fmt/core.h>

#include <kvsnip/kvsnip.hpp>

using kvsnip::Index;

class SmallKeys {
 public:
  kvsnip::Protection protection(kvsnip::Phase) const { return {.num_sinks = 4, .recent_window = 10}; }

  void reset(const kvsnip::Shape& shape) {
    norms_.assign(static_cast<std::size_t>(shape.kv_heads), {});
  }
  void on_insert(Index kv_head, Index slot, const kvsnip::SlotsView& slots) {
    Eigen::VectorXf key(slots.head_dim());
    slots.read_key(slot, {key.data(), static_cast<std::size_t>(key.size())});
    auto& norms = norms_[static_cast<std::size_t>(kv_head)];
    norms.resize(std::max(norms.size(), slots.positions.size()));
    norms[static_cast<std::size_t>(slot)] = key.norm();
  }
  void on_gather(Index kv_head, std::span<const Index> kept) {  // slots moved: new slot i was slot kept[i]
    auto& norms = norms_[static_cast<std::size_t>(kv_head)];
    std::vector<float> moved;
    for (const Index slot : kept) moved.push_back(norms[static_cast<std::size_t>(slot)]);
    norms = moved;
  }
  void score(Index kv_head, const kvsnip::SlotsView& slots, std::span<float> out) const {
    for (std::size_t slot = 0; slot < slots.positions.size(); ++slot) out[slot] = -norms_[static_cast<std::size_t>(kv_head)][slot];
  }

 private:
  std::vector<std::vector<float>> norms_;  // per kv_head (slots)
};
static_assert(kvsnip::Policy<SmallKeys> && kvsnip::ScoresSlots<SmallKeys> && kvsnip::TracksInserts<SmallKeys>);  // no misspelt hook

int main() {
  kvsnip::KVCache<float, SmallKeys> cache({.query_heads = 2, .kv_heads = 1, .head_dim = 8}, /*budget=*/32);
  for (int token = 0; token < 200; ++token) {
    const float length = token % 10 == 0 ? 0.1f : 1.0f;  // every tenth key is small: these should survive
    const Eigen::MatrixXf k = length * Eigen::MatrixXf::Ones(8, 1), q = Eigen::MatrixXf::Random(16, 1);
    Eigen::MatrixXf out(16, 1);
    kvsnip::attend(cache.update(k, k), q, out);
  }
  Index num_small = 0;
  for (const Index position : cache.positions(0)) num_small += position % 10 == 0;
  fmt::print("{} of the 20 small keys are among the {} kept\n", num_small, cache.size(0));
  return num_small == 20 ? 0 : 1;
}
