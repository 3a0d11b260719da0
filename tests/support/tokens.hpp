// Tokens for one layer, the same whatever the updates they come in.
#pragma once

#include "random.hpp"

#include <kvsnip/policy.hpp>

namespace test {

using kvsnip::Shape;

/// What a model hands to one layer: keys and values (kv_heads * head_dim, tokens), queries (query_heads * head_dim, tokens).
/// Token t is the same whatever the number of tokens.
struct Tokens {
  Eigen::MatrixXf k, v, q;

  Tokens(const Shape& shape, Index count, std::uint64_t seed) {
    Random random(seed);
    k.resize(shape.kv_heads * shape.head_dim, count), v.resize(k.rows(), count), q.resize(shape.query_heads * shape.head_dim, count);
    for (Index t = 0; t < count; ++t)
      for (Eigen::MatrixXf* x : {&k, &v, &q}) x->col(t) = random.matrix(x->rows(), 1);
  }
  Index count() const { return k.cols(); }
};

}  // namespace test
