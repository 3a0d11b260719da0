// ChunkKV<P>: chunks of neighbouring tokens stay or go together, the same ones for all kv_heads.
//
// Liu et al., "ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference",
// arXiv:2502.00299, algorithm 1. Differs from the paper: the last chunk that finds room is cut so that the budget is filled.
#pragma once

#include <algorithm>
#include <concepts>
#include <map>
#include <string_view>
#include <utility>

#include "kvsnip/detail/decorator.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct ChunkKVOptions {
  Index chunk_length = 10;  ///< [tokens], >= 1; the paper uses 10

  static void each(auto& options, auto visit) { visit("chunk_length", options.chunk_length); }
};

/// A chunk is chunk_length positions from a multiple of it on; when a prompt is compacted a slot's score is the mean of P's
/// over its chunk and all kv_heads. With fewer slots than one chunk P's scores stand, and while decoding.
template <Policy P>
class ChunkKV : public detail::Decorator<P> {
 public:
  static constexpr std::string_view name = "chunk_kv";
  static constexpr std::string_view paper = "arXiv:2502.00299";
  static constexpr std::string_view needs = "what the policy inside needs";
  using Options = ChunkKVOptions;

  ChunkKV()
    requires std::default_initializable<P>
      : ChunkKV(P{}) {}
  explicit ChunkKV(P inner, const ChunkKVOptions& options = {}) : detail::Decorator<P>(std::move(inner)), options_(options) {
    detail::require(options.chunk_length >= 1, "ChunkKV: chunk_length must be >= 1, got ", options.chunk_length);
  }

  const ChunkKVOptions& options() const { return options_; }
  bool scores_layer(Phase phase) const { return phase != Phase::decode || detail::Decorator<P>::scores_layer(phase); }
  void score_layer(std::span<const SlotsView> heads, std::span<const std::span<float>> out) {
    this->score_inner(heads, out);
    if (heads.front().phase == Phase::decode || std::all_of(heads.begin(), heads.end(), [&](const SlotsView& slots) { return slots.size() < options_.chunk_length; })) return;
    std::map<Index, Mean> chunks;
    const auto chunk = [&](std::size_t h, std::size_t slot) -> Mean& { return chunks[heads[h].positions[slot] / options_.chunk_length]; };
    for (std::size_t h = 0; h < heads.size(); ++h)
      for (std::size_t slot = 0; slot < out[h].size(); ++slot) chunk(h, slot).add(out[h][slot]);
    for (std::size_t h = 0; h < heads.size(); ++h)
      for (std::size_t slot = 0; slot < out[h].size(); ++slot) out[h][slot] = chunk(h, slot).value();
  }

 private:
  struct Mean {
    double sum = 0;
    Index count = 0;
    void add(float x) { sum += static_cast<double>(x), ++count; }
    float value() const { return static_cast<float>(sum / static_cast<double>(count)); }
  };

  ChunkKVOptions options_;
};

}  // namespace kvsnip
