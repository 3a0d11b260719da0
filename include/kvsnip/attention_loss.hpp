// AttentionLoss<T, P>: a compressed cache with the full one beside it, which tells what the compression loses. Opt-in:
// the umbrella header does not include this. It costs what a full cache costs; LossEstimate guesses for next to nothing.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "kvsnip/attention.hpp"
#include "kvsnip/detail/require.hpp"
#include "kvsnip/kv_cache.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

/// One layer. Use it in the place of a KVCache and of attend(); queries, keys and values go through both caches.
template <StorageScalar T, Policy P>
class AttentionLoss {
 public:
  using Cache = KVCache<T, P>;

  /// As KVCache's.
  AttentionLoss(const Shape& shape, Index budget, P policy = P{}, Rope rope = {})
      : cache_(shape, budget, std::move(policy), std::move(rope)), measured_(std::make_unique<Measured>(shape)), full_(shape, unlimited_budget, Spy{measured_.get()}) {}

  /// As KVCache::update; attend() ends the step.
  /// @throws std::logic_error  besides: the previous step has not been attended to
  void update(const Eigen::Ref<const Eigen::MatrixXf>& k, const Eigen::Ref<const Eigen::MatrixXf>& v, const UpdateOptions& options = {}) {
    detail::require_state(!full_step_, "AttentionLoss: update() needs attend() after the previous one");
    struct Rollback {
      typename Cache::Step* step;
      ~Rollback() {
        if (step != nullptr) step->abandon();
      }
    };
    step_ = cache_.update(k, v, options);
    Rollback rollback{&*step_};
    full_step_ = full_.update(k, v, options);
    rollback.step = nullptr;
  }
  /// As attend(step, q, out): out is the compressed cache's.
  template <class ParallelFor = Serial>
  void attend(const Eigen::Ref<const Eigen::MatrixXf>& q, Eigen::Ref<Eigen::MatrixXf> out, ParallelFor&& parallel_for = {}) {
    detail::require_state(full_step_.has_value(), "AttentionLoss: attend() needs an update() before it");
    Measured measured(cache_.shape());
    for (Index h = 0; h < cache_.shape().kv_heads; ++h) measured.hold(h, step_->positions(h));
    measured.lost.setZero(cache_.shape().query_heads, step_->num_queries());
    kvsnip::attend(*step_, q, out, parallel_for);
    *measured_ = std::move(measured);
    Eigen::MatrixXf full_out(out.rows(), out.cols());
    kvsnip::attend(*std::exchange(full_step_, std::nullopt), q, full_out, parallel_for);
    sum_ += measured_->lost.template cast<double>().rowwise().sum(), num_queries_ += measured_->lost.cols();
  }

  /// (query_heads, queries) Of the last attend(): the share of the full cache's attention that goes to tokens which the
  /// compressed one did not hold, in [0, 1].
  const Eigen::MatrixXf& lost() const { return measured_->lost; }
  /// (query_heads) Mean over all queries since the last reset(); zeros if there were none.
  Eigen::VectorXd mean_lost() const { return sum_ / static_cast<double>(std::max<Index>(num_queries_, 1)); }
  const Cache& cache() const { return cache_; }

  void reset() {
    cache_.reset(), full_.reset(), step_.reset(), full_step_.reset();
    sum_.setZero(), num_queries_ = 0;
  }

 private:
  /// What the last step measured. By itself, so that the caches may move.
  struct Measured {
    explicit Measured(const Shape& s) : held(static_cast<std::size_t>(s.kv_heads)) {}
    void hold(Index kv_head, std::span<const Index> positions) {
      std::vector<Index>& of_head = held[static_cast<std::size_t>(kv_head)];
      of_head.assign(positions.begin(), positions.end());
      std::sort(of_head.begin(), of_head.end());
    }

    std::vector<std::vector<Index>> held;  // by kv_head, ascending positions
    Eigen::MatrixXf lost;                  // (query_heads, queries)
  };
  /// Sees every row of the full cache.
  struct Spy {
    Measured* measured;

    bool wants_query_heads() const { return true; }
    void reset(const Shape&) {}
    void observe(Index kv_head, const AttentionRows& rows) {
      const std::vector<Index>& held = measured->held[static_cast<std::size_t>(kv_head)];
      Eigen::VectorXf is_lost(rows.mean.rows());
      for (Index slot = 0; slot < is_lost.size(); ++slot)
        is_lost[slot] = std::binary_search(held.begin(), held.end(), rows.positions[static_cast<std::size_t>(slot)]) ? 0.0f : 1.0f;
      const Index group = rows.per_query_head.cols() / rows.num_queries();
      for (Index j = 0; j < rows.num_queries(); ++j)
        for (Index g = 0; g < group; ++g)
          measured->lost(kv_head * group + g, rows.first_position + j - rows.step.first_position) = rows.per_query_head.col(j * group + g).dot(is_lost);
    }
  };

  Cache cache_;
  std::unique_ptr<Measured> measured_;
  KVCache<T, Spy> full_;
  std::optional<typename Cache::Step> step_;
  std::optional<typename KVCache<T, Spy>::Step> full_step_;
  Eigen::VectorXd sum_ = Eigen::VectorXd::Zero(cache_.shape().query_heads);
  Index num_queries_ = 0;
};

}  // namespace kvsnip
