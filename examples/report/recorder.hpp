// Looks on while a model reads, and keeps what the report draws.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "../toy_transformer/transformer.hpp"
#include "recording.hpp"

namespace toy {

/// Watches `model` from a fresh sequence until destroyed; works with any policy, as it computes the weights itself, of the
/// last query of each step.
template <class T>
class Recorder final : public Transformer<T>::Watcher {
 public:
  explicit Recorder(Transformer<T>& model) : model_(model) {
    recording_.num_layers = model.config().num_layers, recording_.kv_heads = model.config().kv_heads;
    model_.watch(this);
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder() override { model_.watch(nullptr); }

  /// What is not seen from within: say what the run was, and what the tokens read, BOS's first.
  void add_fact(std::string name, std::string value) { recording_.facts.emplace_back(std::move(name), std::move(value)); }
  void add_text(std::string bytes) { recording_.texts.push_back(std::move(bytes)); }

  const Recording& recording() const { return recording_; }

  void before_attention(Index layer, const typename Transformer<T>::Cache::Step& step, const Eigen::MatrixXf& q) override {
    if (layer == 0) open_ = {};
    open_.new_tokens = step.num_queries();
    for (Index h = 0; h < recording_.kv_heads; ++h) open_.weights.push_back(weights(step, h, q.col(q.cols() - 1), held_before(layer, h)));
  }
  void after_forward() override {
    for (const auto& cache : model_.caches()) {
      for (Index h = 0; h < recording_.kv_heads; ++h) {
        const auto positions = cache.positions(h);
        open_.held.emplace_back(positions.begin(), positions.end());
        std::sort(open_.held.back().begin(), open_.held.back().end());
      }
    }
    recording_.steps.push_back(std::move(open_));
  }

 private:
  std::vector<Index> held_before(Index layer, Index kv_head) const {
    return recording_.steps.empty() ? std::vector<Index>{} : recording_.steps.back().held[static_cast<std::size_t>(layer * recording_.kv_heads + kv_head)];
  }

  /// @param q  (query_heads * head_dim) the last query; every slot is visible to it
  static std::vector<double> weights(const typename Transformer<T>::Cache::Step& step, Index kv_head, const Eigen::VectorXf& q, std::vector<Index> held) {
    const kvsnip::Shape& shape = step.shape();
    const Eigen::MatrixXf keys = step.keys(kv_head).template cast<float>();
    Eigen::VectorXf mean = Eigen::VectorXf::Zero(keys.cols());
    for (Index g = 0; g < shape.group_size(); ++g) {
      const Eigen::VectorXf logits = keys.transpose() * q.segment((kv_head * shape.group_size() + g) * shape.head_dim, shape.head_dim) /
                                     std::sqrt(static_cast<float>(shape.head_dim));
      const Eigen::VectorXf exponentials = (logits.array() - logits.maxCoeff()).exp();
      mean += exponentials / (exponentials.sum() * static_cast<float>(shape.group_size()));
    }
    for (Index t = 0; t < step.num_queries(); ++t) held.push_back(step.first_position() + t);
    std::vector<double> by_position(held.size(), 0);  // what was evicted to make room gets none
    const auto positions = step.positions(kv_head);
    for (std::size_t slot = 0; slot < positions.size(); ++slot) {
      const auto place = std::lower_bound(held.begin(), held.end(), positions[slot]);
      by_position[static_cast<std::size_t>(place - held.begin())] = mean[static_cast<Index>(slot)];
    }
    return by_position;
  }

  Transformer<T>& model_;
  Recording recording_;
  Recording::Step open_;
};

}  // namespace toy
