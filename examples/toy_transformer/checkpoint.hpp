// llama2.c checkpoints, the headerless fp32 kind ("legacy", version 0):
//
//   7 int32   dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len; vocab < 0: an output matrix of its own follows
//   fp32      token_embedding; of all layers rms_attention, then of all wq, wk, wv, wo, rms_ffn, w1, w2, w3;
//             rms_final; two RoPE tables (seq_len * head_dim / 2 each), which we compute; the output matrix
//
// The format has no magic number, so a file is believed only when its size is exactly what its header implies.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "binary_file.hpp"
#include "weights.hpp"

namespace toy {
namespace detail {

/// Far above any model of this format; keeps num_floats() below 2^63 (about 7 * 2^60 at the most).
inline constexpr Index max_dimension = Index{1} << 20;

inline Index num_floats(const Config& c) {
  const Index layer = 2 * c.dim + 2 * c.dim * c.dim + 2 * c.kv_dim() * c.dim + 3 * c.hidden_dim * c.dim;
  const Index embedding = c.vocab_size * c.dim;
  const Index rope_tables = c.seq_len * c.head_dim();
  return embedding * (c.shared_classifier ? 1 : 2) + c.num_layers * layer + c.dim + rope_tables;
}

inline Config read_config(BinaryFile& file) {
  const auto not_one = [&file](const std::string& reason) { file.fail("not a llama2.c fp32 checkpoint: " + reason); };
  if (file.remaining() < Index{7 * sizeof(std::int32_t)}) not_one("shorter than its header of 28 bytes");

  const auto dimension = [&](const char* name, bool may_be_negative = false) {
    const Index value = file.read<std::int32_t>();
    const Index size = may_be_negative && value < 0 ? -value : value;
    if (size < 1 || size > max_dimension)
      not_one(std::string(name) + " is " + std::to_string(value) + ", expected 1 to " + std::to_string(max_dimension));
    return value;
  };
  Config c;
  c.dim = dimension("dim");
  c.hidden_dim = dimension("hidden_dim");
  c.num_layers = dimension("layers");
  c.query_heads = dimension("heads");
  c.kv_heads = dimension("kv_heads");
  const Index vocab = dimension("vocab", true);
  c.vocab_size = vocab < 0 ? -vocab : vocab;
  c.shared_classifier = vocab > 0;
  c.seq_len = dimension("seq_len");

  const auto both = [](Index a, const char* what, Index b) { return std::to_string(a) + what + std::to_string(b); };
  if (c.dim % c.query_heads != 0) not_one(both(c.query_heads, " heads do not divide dim ", c.dim));
  if (c.query_heads % c.kv_heads != 0) not_one(both(c.kv_heads, " kv_heads do not divide heads ", c.query_heads));
  if (c.head_dim() % 2 != 0) not_one("head size " + std::to_string(c.head_dim()) + " is odd, RoPE turns pairs");

  const Index floats = num_floats(c);
  const Index bytes = file.remaining();
  if (bytes % Index{sizeof(float)} != 0 || bytes / Index{sizeof(float)} != floats)
    not_one("its header implies " + std::to_string(floats) + " floats, " + std::to_string(bytes) + " bytes follow it");
  return c;
}

}  // namespace detail

/// Throws std::runtime_error with one line if the file is not a checkpoint; allocates nothing before that is known.
inline std::shared_ptr<const Weights> load_checkpoint(const std::filesystem::path& path) {
  BinaryFile file(path);
  const auto weights = std::make_shared<Weights>(detail::read_config(file));
  const Config& c = weights->config;

  const auto read = [&file](auto& tensor) {
    file.read_floats(tensor.data(), tensor.size());
    if (!tensor.allFinite()) file.fail("not a llama2.c fp32 checkpoint: a weight is not finite");
  };
  const auto read_of_all_layers = [&](auto tensor) {
    for (Layer& layer : weights->layers) read(layer.*tensor);
  };
  read(weights->token_embedding);
  read_of_all_layers(&Layer::rms_attention);
  read_of_all_layers(&Layer::wq);
  read_of_all_layers(&Layer::wk);
  read_of_all_layers(&Layer::wv);
  read_of_all_layers(&Layer::wo);
  read_of_all_layers(&Layer::rms_ffn);
  read_of_all_layers(&Layer::w1);
  read_of_all_layers(&Layer::w2);
  read_of_all_layers(&Layer::w3);
  read(weights->rms_final);
  Eigen::VectorXf rope_tables(c.seq_len * c.head_dim());
  read(rope_tables);
  read(weights->own_classifier);
  return weights;
}

}  // namespace toy
