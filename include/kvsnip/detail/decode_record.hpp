// The last rows and queries of one kv_head's decode steps, to be shown to a policy as a prompt's.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kvsnip/detail/aligned_array.hpp"
#include "kvsnip/hooks.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

class DecodeRecord {
  using Matrix = Eigen::Map<Eigen::MatrixXf>;
  using ConstMatrix = Eigen::Map<const Eigen::MatrixXf>;

 public:
  DecodeRecord() = default;
  /// @param columns  of a row: 1 if the mean over the query group is enough, else group_size
  DecodeRecord(Index rows, Index columns, Index queries, const Shape& shape)
      : columns_(columns), group_size_(shape.group_size()), head_dim_(shape.head_dim), lengths_(static_cast<std::size_t>(rows)),
        queries_(static_cast<std::size_t>(shape.head_dim * queries * group_size_)) {}

  /// Room for rows over so many slots; geometric.
  void reserve(Index num_slots) {
    if (slots_ >= num_slots || capacity() == 0) return;
    const Index slots = std::max(num_slots, slots_ + slots_ / 2), columns = capacity() * columns_;
    std::vector<float> rows(static_cast<std::size_t>(slots * columns));
    Matrix(rows.data(), slots, columns).topRows(slots_) = all_rows();
    rows_.swap(rows), slots_ = slots;
  }
  void keep(const AttentionRows& rows) {
    const AttentionRows::Weights& weights = columns_ == 1 ? rows.mean : rows.per_query_head;
    for (Index j = 0; j < rows.num_queries(); ++j) {
      const Index row = num_rows_++ % capacity();
      lengths_[static_cast<std::size_t>(row)] = weights.rows();
      all_rows().block(0, row * columns_, weights.rows(), columns_) = weights.middleCols(j * columns_, columns_);
    }
    last_position_ = rows.step.last_position();
  }
  void keep(const QueryRows& queries) {
    for (Index j = 0; j < queries.num_queries(); ++j)
      all_queries().middleCols(num_queries_++ % query_capacity() * group_size_, group_size_) = queries.queries.middleCols(j * group_size_, group_size_);
    last_position_ = queries.step.last_position();
  }
  /// Slots were compacted: new slot i was slot kept[i].
  void gather(std::span<const Index> kept) {
    for (Index row = 0; row < std::min(num_rows_, capacity()); ++row) {
      Index& length = lengths_[static_cast<std::size_t>(row)];
      all_rows().block(length, row * columns_, slots_ - length, columns_).setZero();  // a later slot got nothing
      for (Index c = row * columns_; c < (row + 1) * columns_; ++c) gather_in_place(rows_.data() + c * slots_, kept);
      length = std::ssize(kept);
    }
  }
  /// Everything that is kept, as the end of a prompt of `num_queries` tokens.
  template <Policy P>
  void replay(P& policy, Index kv_head, const SlotsView& slots, Index num_queries) const {
    const StepInfo step{Phase::long_prompt, last_position_ - num_queries + 1, num_queries};
    if (const Index n = std::min(num_queries_, query_capacity()); n > 0) {
      Eigen::MatrixXf queries(head_dim_, n * group_size_);
      for (Index j = 0; j < n; ++j)
        queries.middleCols(j * group_size_, group_size_) = all_queries().middleCols((num_queries_ - n + j) % query_capacity() * group_size_, group_size_);
      hooks::observe_queries(policy, kv_head, QueryRows{{queries.data(), queries.rows(), queries.cols()}, group_size_, last_position_ - n + 1, step, slots});
    }
    if (const Index n = std::min(num_rows_, capacity()); n > 0) {
      Eigen::MatrixXf rows = Eigen::MatrixXf::Zero(slots.size(), n * columns_), mean(rows.rows(), n);
      for (Index j = 0; j < n; ++j) {
        const Index row = (num_rows_ - n + j) % capacity(), length = lengths_[static_cast<std::size_t>(row)];
        rows.block(0, j * columns_, length, columns_) = all_rows().block(0, row * columns_, length, columns_);
        mean.col(j) = rows.middleCols(j * columns_, columns_).rowwise().mean();
      }
      const auto view = [](const Eigen::MatrixXf& m) { return AttentionRows::Weights(m.data(), m.rows(), m.cols(), Eigen::OuterStride<>(m.rows())); };
      hooks::observe(policy, kv_head, AttentionRows{view(mean), view(rows), last_position_ - n + 1, step, slots.positions});
    }
  }
  Index bytes() const { return heap_bytes(rows_) + heap_bytes(queries_) + heap_bytes(lengths_); }

 private:
  Index capacity() const { return std::ssize(lengths_); }
  Index query_capacity() const { return std::ssize(queries_) / (head_dim_ * group_size_); }
  Matrix all_rows() { return Matrix(rows_.data(), slots_, capacity() * columns_); }
  ConstMatrix all_rows() const { return ConstMatrix(rows_.data(), slots_, capacity() * columns_); }
  Matrix all_queries() { return Matrix(queries_.data(), head_dim_, query_capacity() * group_size_); }
  ConstMatrix all_queries() const { return ConstMatrix(queries_.data(), head_dim_, query_capacity() * group_size_); }

  Index columns_ = 1, group_size_ = 1, head_dim_ = 1, slots_ = 0;
  std::vector<Index> lengths_;  // (rows) slots there were
  std::vector<float> rows_;     // (slots, rows * columns), a ring
  std::vector<float> queries_;  // (head_dim, queries * group_size), a ring
  Index num_rows_ = 0, num_queries_ = 0, last_position_ = 0;
};

}  // namespace kvsnip::detail
