// Checkpoints of fp32 weights, of two kinds. llama2.c's without a header version ("legacy", version 0):
//
//   7 int32   dim, hidden_dim, layers, heads, kv_heads, vocab, seq_len; vocab < 0: an output matrix of its own follows
//   fp32      token_embedding; of all layers rms_attention, then of all wq, wk, wv, wo, rms_ffn, w1, w2, w3;
//             rms_final; two RoPE tables (seq_len * head_dim / 2 each), which we compute; the output matrix
//
// It has no magic number, so a file is believed only when its size is exactly what its header implies. And our own, for
// heads that are not dim / heads wide:
//
//   "KVS1"    read as a number more than any dimension may be
//   8 int32   the same 7, then head_dim
//   fp32      the same, without the RoPE tables
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <stdexcept>
#include <string>

#include "binary_file.hpp"
#include "weights.hpp"

namespace toy {
namespace detail {

/// Far above any model of this format; keeps num_floats() below 2^63 (about 7 * 2^60 at the most).
inline constexpr Index max_dimension = Index{1} << 20;
inline constexpr std::int32_t magic = 0x3153564B;  ///< "KVS1"

struct Header {
  Config config;
  bool rope_tables = true;
};

inline Index num_floats(const Header& header) {
  const Config& c = header.config;
  const Index layer = 2 * c.dim + 2 * c.dim * c.query_dim() + 2 * c.kv_dim() * c.dim + 3 * c.hidden_dim * c.dim;
  const Index embedding = c.vocab_size * c.dim;
  const Index rope_tables = header.rope_tables ? c.seq_len * c.head_dim() : 0;
  return embedding * (c.shared_classifier ? 1 : 2) + c.num_layers * layer + c.dim + rope_tables;
}

inline Header read_header(BinaryFile& file) {
  const auto not_one = [&file](const std::string& reason) { file.fail("not a llama2.c fp32 checkpoint: " + reason); };
  const auto at_least = [&](Index bytes) {
    if (file.remaining() < bytes) not_one("shorter than its header of " + std::to_string(bytes) + " bytes");
  };
  const auto both = [](Index a, const std::string& what, Index b) { return std::to_string(a) + what + std::to_string(b); };
  const auto in_range = [&](const char* name, Index value, Index size) {
    if (size < 1 || size > max_dimension) not_one(std::string(name) + " is " + both(value, ", expected 1 to ", max_dimension));
    return value;
  };
  at_least(7 * sizeof(std::int32_t));
  std::int32_t first = file.read<std::int32_t>();
  Header header;
  header.rope_tables = first != magic;
  if (!header.rope_tables) at_least(8 * sizeof(std::int32_t)), first = file.read<std::int32_t>();

  Config& c = header.config;
  c.dim = in_range("dim", first, first);
  const auto dimension = [&](const char* name) {
    const Index value = file.read<std::int32_t>();
    return in_range(name, value, value);
  };
  c.hidden_dim = dimension("hidden_dim");
  c.num_layers = dimension("layers");
  c.query_heads = dimension("heads");
  c.kv_heads = dimension("kv_heads");
  const Index vocab = file.read<std::int32_t>();
  c.vocab_size = vocab < 0 ? -vocab : vocab;
  in_range("vocab", vocab, c.vocab_size);
  c.shared_classifier = vocab > 0;
  c.seq_len = dimension("seq_len");
  if (!header.rope_tables) c.own_head_dim = dimension("head_dim");

  if (c.own_head_dim == 0 && c.dim % c.query_heads != 0) not_one(both(c.query_heads, " heads do not divide dim ", c.dim));
  if (c.query_heads % c.kv_heads != 0) not_one(both(c.kv_heads, " kv_heads do not divide heads ", c.query_heads));
  in_range("heads * head_dim", c.query_dim(), c.query_dim());
  if (c.head_dim() % 2 != 0) not_one("head size " + std::to_string(c.head_dim()) + " is odd, RoPE turns pairs");

  const Index floats = num_floats(header), bytes = file.remaining();
  if (bytes % Index{sizeof(float)} != 0 || bytes / Index{sizeof(float)} != floats)
    not_one("its header implies " + std::to_string(floats) + " floats, " + std::to_string(bytes) + " bytes follow it");
  return header;
}

}  // namespace detail

/// Either kind. Throws std::runtime_error with one line if the file is neither; allocates nothing before that is known.
inline std::shared_ptr<const Weights> load_checkpoint(const std::filesystem::path& path) {
  BinaryFile file(path);
  const detail::Header header = detail::read_header(file);
  const auto weights = std::make_shared<Weights>(header.config);
  const auto read = [&file](auto& tensor) {
    file.read_floats(tensor.data(), tensor.size());
    if (!tensor.allFinite()) file.fail("not a llama2.c fp32 checkpoint: a weight is not finite");
  };
  const void* const last = &weights->own_classifier;  // the RoPE tables come before it
  for_each_tensor([&](auto& tensor) { if (&tensor != last) read(tensor); }, *weights);
  Eigen::VectorXf rope_tables(header.rope_tables ? header.config.seq_len * header.config.head_dim() : 0);
  read(rope_tables);
  read(weights->own_classifier);
  return weights;
}

/// A file of our own kind. Throws std::runtime_error if it cannot be written.
inline void save_checkpoint(const std::filesystem::path& path, const Weights& weights) {
  std::ofstream out(path, std::ios::binary);
  const auto write = [&out](const void* data, std::size_t bytes) { out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes)); };
  const Config& c = weights.config;
  for (const Index number : {Index{detail::magic}, c.dim, c.hidden_dim, c.num_layers, c.query_heads, c.kv_heads,
                             c.shared_classifier ? c.vocab_size : -c.vocab_size, c.seq_len, c.head_dim()}) {
    const std::int32_t narrow = static_cast<std::int32_t>(number);
    write(&narrow, sizeof narrow);
  }
  for_each_tensor([&](const auto& tensor) { write(tensor.data(), static_cast<std::size_t>(tensor.size()) * sizeof(float)); }, weights);
  if (!out.flush()) throw std::runtime_error(path.string() + ": cannot be written");
}

}  // namespace toy
