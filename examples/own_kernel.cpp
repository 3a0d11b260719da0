// An engine with its own attention kernel: it reads step.keys(h) and step.values(h) and hands the weights back. The result,
// and what the policy keeps, is the same as with attend().
#include <fmt/core.h>

#include <cmath>
#include <kvsnip/kvsnip.hpp>

using Eigen::MatrixXf;
using kvsnip::Index;

/// Attention of one kv_head for one token. q (head_dim, group_size); keys, values (head_dim, slots).
/// Returns the weights (slots, group_size) and writes out (head_dim, group_size).
template <class Columns>
MatrixXf my_attention(const MatrixXf& q, const Columns& keys, const Columns& values, Eigen::Ref<MatrixXf> out) {
  MatrixXf weights = keys.transpose() * q / std::sqrt(static_cast<float>(q.rows()));
  for (Index g = 0; g < weights.cols(); ++g) {
    weights.col(g).array() = (weights.col(g).array() - weights.col(g).maxCoeff()).exp();
    weights.col(g) /= weights.col(g).sum();
  }
  out = values * weights;
  return weights;
}

int main() {
  const kvsnip::Shape shape{.query_heads = 8, .kv_heads = 2, .head_dim = 16};
  const Index group = shape.group_size(), dim = shape.head_dim;
  kvsnip::KVCache<float, kvsnip::Scissorhands> mine(shape, /*budget=*/64), theirs(shape, /*budget=*/64);

  float largest_difference = 0;
  for (int token = 0; token < 500; ++token) {
    const MatrixXf k = MatrixXf::Random(shape.kv_heads * dim, 1), v = MatrixXf::Random(shape.kv_heads * dim, 1);
    const MatrixXf q = MatrixXf::Random(shape.query_heads * dim, 1);
    MatrixXf out(shape.query_heads * dim, 1), expected(shape.query_heads * dim, 1);

    auto step = mine.update(k, v);
    for (Index h = 0; h < shape.kv_heads; ++h) {  // heads may run on different threads
      const MatrixXf head_q = q.middleRows(h * group * dim, group * dim).reshaped(dim, group);
      MatrixXf head_out(dim, group);
      const MatrixXf weights = my_attention(head_q, step.keys(h), step.values(h), head_out);
      out.middleRows(h * group * dim, group * dim) = head_out.reshaped(group * dim, 1);
      if (step.wants_attention()) step.on_attention(h, weights);  // the attention callback
      else step.done(h);
    }
    kvsnip::attend(theirs.update(k, v), q, expected);
    largest_difference = std::max(largest_difference, (out - expected).cwiseAbs().maxCoeff());
  }
  const bool same = std::equal(mine.positions(0).begin(), mine.positions(0).end(), theirs.positions(0).begin(), theirs.positions(0).end());
  fmt::print("largest difference to attend(): {:.1e}; the same positions kept: {}\n", largest_difference, same ? "yes" : "no");
  return same && largest_difference < 1e-5f ? 0 : 1;
}
