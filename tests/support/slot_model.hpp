// A test double: the demo's model over slots as cold-compress's heavy-hitter cache keeps them, which evicts live tokens while
// slots are free. Scores are our H2O's; which slot a token goes to is decided as there.
#pragma once

#include <kvsnip/policy/h2o.hpp>
#include <toy_transformer/layers.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

namespace test {

using kvsnip::Index;

class SlotModel {
 public:
  /// @param recent_window  leaves the incoming token out
  SlotModel(std::shared_ptr<const toy::Weights> weights, const kvsnip::H2O& policy, Index num_slots, Index num_sinks, Index recent_window)
      : weights_(std::move(weights)), num_slots_(num_slots), num_sinks_(num_sinks), recent_window_(recent_window) {
    const kvsnip::Shape shape = config().shape();
    for (Index layer = 0; layer < config().num_layers; ++layer) {
      layers_.push_back({policy, std::vector<Head>(static_cast<std::size_t>(shape.kv_heads))});
      layers_.back().policy.reset(shape);
      for (Index h = 0; h < shape.kv_heads; ++h) layers_.back().policy.reserve(h, num_slots);
    }
  }

  const toy::Config& config() const { return weights_->config; }
  /// @return (vocab_size) logits
  Eigen::VectorXf forward(toy::Token token) {
    Eigen::MatrixXf x = weights_->token_embedding.row(token).transpose(), normed;
    const toy::Rope rope(config().head_dim(), position_, 1);
    for (std::size_t i = 0; i < layers_.size(); ++i) {
      const toy::Layer& w = weights_->layers[i];
      toy::rms_norm(x, w.rms_attention, normed);
      Eigen::MatrixXf q = w.wq * normed, k = w.wk * normed;
      const Eigen::MatrixXf v = w.wv * normed;
      rope.rotate(q), rope.rotate(k);
      x += w.wo * attend(layers_[i], q, k, v);
      toy::rms_norm(x, w.rms_ffn, normed);
      Eigen::MatrixXf gate = w.w1 * normed;
      gate.array() *= (w.w3 * normed).array() / (1.0f + (-gate.array()).exp());
      x += w.w2 * gate;
    }
    ++position_;
    toy::rms_norm(x, weights_->rms_final, normed);
    return weights_->classifier() * normed;
  }
  /// The slot that the last token went to; the positions that are held, by slot.
  Index last_slot(Index layer, Index kv_head) const { return head(layer, kv_head).last_slot; }
  const std::vector<Index>& positions(Index layer, Index kv_head) const { return head(layer, kv_head).positions; }

 private:
  struct Head {
    std::vector<Index> positions;  // by slot; those that are free are the last ones
    Eigen::MatrixXf keys, values;  // (head_dim, slots)
    Index last_slot = 0;
  };
  struct Layer {
    kvsnip::H2O policy;
    std::vector<Head> heads;
  };

  const Head& head(Index layer, Index kv_head) const { return layers_[static_cast<std::size_t>(layer)].heads[static_cast<std::size_t>(kv_head)]; }
  static kvsnip::SlotsView view(const Head& head) {
    kvsnip::SlotsView slots;
    slots.positions = head.positions;
    return slots;
  }
  /// The lowest score, of equals the lowest slot; what is protected scores 1, a free slot 0.
  Index choose(Layer& layer, Index kv_head) const {
    const Head& head = layer.heads[static_cast<std::size_t>(kv_head)];
    std::vector<float> scores(head.positions.size());
    layer.policy.score(kv_head, view(head), scores);
    for (std::size_t slot = 0; slot < scores.size(); ++slot)
      if (head.positions[slot] < num_sinks_ || head.positions[slot] >= position_ - recent_window_) scores[slot] = 1.0f;
    scores.resize(static_cast<std::size_t>(num_slots_), 0.0f);
    return std::min_element(scores.begin(), scores.end()) - scores.begin();
  }
  Eigen::MatrixXf attend(Layer& layer, const Eigen::MatrixXf& q, const Eigen::MatrixXf& k, const Eigen::MatrixXf& v) {
    const kvsnip::Shape shape = config().shape();
    const Index dim = shape.head_dim, group = shape.group_size();
    Eigen::MatrixXf out(q.rows(), 1);
    for (Index h = 0; h < shape.kv_heads; ++h) {
      Head& head = layer.heads[static_cast<std::size_t>(h)];
      const Index slot = head.last_slot = choose(layer, h);
      if (slot == std::ssize(head.positions)) {
        head.positions.push_back(position_);
        head.keys.conservativeResize(dim, slot + 1), head.values.conservativeResize(dim, slot + 1);
      }
      head.positions[static_cast<std::size_t>(slot)] = position_;
      head.keys.col(slot) = k.middleRows(h * dim, dim), head.values.col(slot) = v.middleRows(h * dim, dim);
      layer.policy.on_insert(h, slot, view(head));
      Eigen::MatrixXf mean = Eigen::MatrixXf::Zero(head.keys.cols(), 1);
      for (Index g = 0; g < group; ++g) {
        Eigen::VectorXf weights = head.keys.transpose() * q.middleRows((h * group + g) * dim, dim) / std::sqrt(static_cast<float>(dim));
        weights = (weights.array() - weights.maxCoeff()).exp();
        weights /= weights.sum();
        out.middleRows((h * group + g) * dim, dim) = head.values * weights;
        mean += weights / static_cast<float>(group);
      }
      // Low is there what is below 1 / (slots of kv_head 0), whichever head it is.
      mean *= static_cast<float>(std::ssize(layer.heads.front().positions)) / static_cast<float>(std::ssize(head.positions));
      const kvsnip::StepInfo step{kvsnip::Phase::decode, position_, 1};
      layer.policy.observe(h, {{mean.data(), mean.rows(), 1, Eigen::OuterStride<>(mean.rows())}, {nullptr, mean.rows(), 0, Eigen::OuterStride<>(mean.rows())}, position_, step, head.positions});
    }
    return out;
  }

  std::shared_ptr<const toy::Weights> weights_;
  Index num_slots_, num_sinks_, recent_window_, position_ = 0;
  std::vector<Layer> layers_;
};

}  // namespace test
