// The transformer once more, for training: whole sequences at a time, no cache, and the gradient of the loss by hand.
//
// Templated on the scalar so that tests can check the gradient against finite differences in double.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <span>
#include <vector>

#include "weights.hpp"

namespace toy {

/// Sequences of one length, one after the other.
struct Batch {
  Index length = 0;           ///< of each sequence [tokens]
  std::vector<Token> tokens;  ///< (sequences * length)
  std::vector<float> weight;  ///< (sequences * length) of foretelling this token in the loss; 0 for a sequence's first
  std::vector<bool> counts;   ///< (sequences * length) whether this token is a question of the examination

  Index sequences() const { return std::ssize(tokens) / length; }
};

struct BatchResult {
  double loss = 0;          ///< sum of weight * negative log-likelihood
  std::vector<bool> right;  ///< (tokens) whether the likeliest token was the one that came; false for a sequence's first

  friend bool operator==(const BatchResult&, const BatchResult&) = default;
};

template <class Scalar>
class Backprop {
 public:
  using Weights = BasicWeights<Scalar>;
  using Layer = BasicLayer<Scalar>;
  using Matrix = Eigen::MatrixX<Scalar>;  ///< activations: (features, tokens)
  using Vector = Eigen::VectorX<Scalar>;

  explicit Backprop(const Config& config) : config_(config), layers_(static_cast<std::size_t>(config.num_layers)) {}

  /// What the model makes of a batch.
  BatchResult forward(const Weights& w, const Batch& batch) {
    batch_ = &batch;
    length_ = batch.length;
    if (cos_.cols() != length_) make_rope();
    x_.resize(config_.dim, std::ssize(batch.tokens));
    for (Index t = 0; t < x_.cols(); ++t) x_.col(t) = w.token_embedding.row(token(t)).transpose();
    for (std::size_t i = 0; i < layers_.size(); ++i) forward(w.layers[i], layers_[i]);
    norm(x_, w.rms_final, final_);
    logits_.noalias() = w.classifier() * final_.out;
    return score();
  }

  /// Adds the gradient of the last forward()'s loss. @param gradient  of the same shape as `w`, which has not changed since
  void backward(const Weights& w, Weights& gradient) {
    // logits_ holds d loss / d logits by now.
    gradient.classifier().noalias() += logits_ * final_.out.transpose();
    d_out_.noalias() = w.classifier().transpose() * logits_;
    dx_.setZero(x_.rows(), x_.cols());
    norm_backward(final_, w.rms_final, d_out_, gradient.rms_final, dx_);
    for (std::size_t i = layers_.size(); i-- > 0;) backward(w.layers[i], layers_[i], gradient.layers[i]);
    for (Index t = 0; t < dx_.cols(); ++t) gradient.token_embedding.row(token(t)) += dx_.col(t).transpose();
  }

  /// (vocab_size, tokens) Of the last forward(), until backward(): what the loss would fall with, d loss / d logits.
  const Matrix& logit_gradient() const { return logits_; }

 private:
  struct Norm {
    Matrix in, out;  // (dim, tokens)
    Vector scale;    // (tokens) 1 / root mean square
  };
  struct LayerState {
    Norm attention, ffn;
    Matrix q, k, v, attended;     // (heads * head_dim, tokens), q and k turned
    std::vector<Matrix> weights;  // (sequences * query_heads)(length, length) of a key (row) to a query (column)
    Matrix gate, up, hidden;      // (hidden_dim, tokens)
  };

  Index token(Index t) const { return batch_->tokens[static_cast<std::size_t>(t)]; }

  void forward(const Layer& w, LayerState& s) {
    norm(x_, w.rms_attention, s.attention);
    s.q.noalias() = w.wq * s.attention.out;
    s.k.noalias() = w.wk * s.attention.out;
    s.v.noalias() = w.wv * s.attention.out;
    turn(s.q, 1);
    turn(s.k, 1);
    attend(s);
    x_.noalias() += w.wo * s.attended;

    norm(x_, w.rms_ffn, s.ffn);
    s.gate.noalias() = w.w1 * s.ffn.out;
    s.up.noalias() = w.w3 * s.ffn.out;
    s.hidden = s.gate.array() * s.up.array() / (Scalar(1) + (-s.gate.array()).exp());
    x_.noalias() += w.w2 * s.hidden;
  }

  void backward(const Layer& w, const LayerState& s, Layer& g) {
    g.w2.noalias() += dx_ * s.hidden.transpose();
    d_hidden_.noalias() = w.w2.transpose() * dx_;
    const auto sigmoid = (Scalar(1) + (-s.gate.array()).exp()).inverse().eval();
    d_up_ = d_hidden_.array() * s.gate.array() * sigmoid;
    d_hidden_.array() *= s.up.array() * sigmoid * (Scalar(1) + s.gate.array() * (Scalar(1) - sigmoid));  // now of the gate
    g.w1.noalias() += d_hidden_ * s.ffn.out.transpose();
    g.w3.noalias() += d_up_ * s.ffn.out.transpose();
    d_out_.noalias() = w.w1.transpose() * d_hidden_;
    d_out_.noalias() += w.w3.transpose() * d_up_;
    norm_backward(s.ffn, w.rms_ffn, d_out_, g.rms_ffn, dx_);

    g.wo.noalias() += dx_ * s.attended.transpose();
    d_attended_.noalias() = w.wo.transpose() * dx_;
    attend_backward(s);
    turn(dq_, -1);
    turn(dk_, -1);
    g.wq.noalias() += dq_ * s.attention.out.transpose();
    g.wk.noalias() += dk_ * s.attention.out.transpose();
    g.wv.noalias() += dv_ * s.attention.out.transpose();
    d_out_.noalias() = w.wq.transpose() * dq_;
    d_out_.noalias() += w.wk.transpose() * dk_;
    d_out_.noalias() += w.wv.transpose() * dv_;
    norm_backward(s.attention, w.rms_attention, d_out_, g.rms_attention, dx_);
  }

  void norm(const Matrix& x, const Vector& weight, Norm& s) {
    s.in = x;
    s.scale = (x.colwise().squaredNorm() / static_cast<Scalar>(x.rows())).array().transpose() + static_cast<Scalar>(rms_epsilon);
    s.scale = s.scale.array().rsqrt();
    s.out = weight.asDiagonal() * x * s.scale.asDiagonal();
  }
  /// out = weight * in * scale, where scale depends on all of in.
  void norm_backward(const Norm& s, const Vector& weight, const Matrix& d_out, Vector& d_weight, Matrix& dx) {
    d_weight += (d_out.array() * s.in.array()).matrix() * s.scale;
    for (Index t = 0; t < dx.cols(); ++t) {
      const Scalar along = weight.cwiseProduct(d_out.col(t)).dot(s.in.col(t)) * s.scale[t] * s.scale[t] / static_cast<Scalar>(dx.rows());
      dx.col(t) += s.scale[t] * (weight.cwiseProduct(d_out.col(t)) - along * s.in.col(t));
    }
  }

  /// Calls f(sequence's first token, kv_head, query_head, number) for every attention matrix.
  template <class F>
  void for_each_head(F&& f) const {
    std::size_t number = 0;
    for (Index first = 0; first < x_.cols(); first += length_)
      for (Index head = 0; head < config_.query_heads; ++head) f(first, head / (config_.query_heads / config_.kv_heads), head, number++);
  }
  auto block(Matrix& m, Index head, Index first) const { return m.block(head * config_.head_dim(), first, config_.head_dim(), length_); }
  auto block(const Matrix& m, Index head, Index first) const { return m.block(head * config_.head_dim(), first, config_.head_dim(), length_); }
  Scalar logit_scale() const { return 1 / std::sqrt(static_cast<Scalar>(config_.head_dim())); }

  void attend(LayerState& s) {
    s.attended.resize(s.q.rows(), s.q.cols());
    s.weights.resize(static_cast<std::size_t>(batch_->sequences() * config_.query_heads));
    for_each_head([&](Index first, Index kv_head, Index head, std::size_t number) {
      Matrix& weights = s.weights[number];
      weights.noalias() = logit_scale() * block(s.k, kv_head, first).transpose() * block(s.q, head, first);
      for (Index t = 0; t < length_; ++t) {
        auto seen = weights.col(t).head(t + 1);
        seen = (seen.array() - seen.maxCoeff()).exp();
        seen /= seen.sum();
        weights.col(t).tail(length_ - t - 1).setZero();
      }
      block(s.attended, head, first).noalias() = block(s.v, kv_head, first) * weights;
    });
  }
  void attend_backward(const LayerState& s) {
    dq_.setZero(s.q.rows(), s.q.cols());
    dk_.setZero(s.k.rows(), s.k.cols());
    dv_.setZero(s.v.rows(), s.v.cols());
    for_each_head([&](Index first, Index kv_head, Index head, std::size_t number) {
      const Matrix& weights = s.weights[number];
      const auto d_attended = block(d_attended_, head, first);
      block(dv_, kv_head, first).noalias() += d_attended * weights.transpose();
      d_weights_.noalias() = block(s.v, kv_head, first).transpose() * d_attended;
      for (Index t = 0; t < length_; ++t)  // of the softmax: now d logits
        d_weights_.col(t) = weights.col(t).array() * (d_weights_.col(t).array() - weights.col(t).dot(d_weights_.col(t))) * logit_scale();
      block(dq_, head, first).noalias() += block(s.k, kv_head, first) * d_weights_;
      block(dk_, kv_head, first).noalias() += block(s.q, head, first) * d_weights_.transpose();
    });
  }

  void make_rope() {
    const Index pairs = config_.head_dim() / 2;
    cos_.resize(pairs, length_), sin_.resize(pairs, length_);
    for (Index i = 0; i < pairs; ++i) {
      for (Index t = 0; t < length_; ++t) {
        const double angle = static_cast<double>(t) * std::pow(rope_theta, -2 * static_cast<double>(i) / static_cast<double>(config_.head_dim()));
        cos_(i, t) = static_cast<Scalar>(std::cos(angle)), sin_(i, t) = static_cast<Scalar>(std::sin(angle));
      }
    }
  }
  /// Every pair (2i, 2i + 1) by its position's angle. @param direction  1, or -1: back, which is also the gradient's way
  void turn(Matrix& x, Scalar direction) const {
    for (Index t = 0; t < x.cols(); ++t) {
      for (Index row = 0; row < x.rows(); row += 2) {
        const Scalar c = cos_(row / 2 % cos_.rows(), t % length_), s = direction * sin_(row / 2 % cos_.rows(), t % length_);
        const Scalar a = x(row, t), b = x(row + 1, t);
        x(row, t) = a * c - b * s;
        x(row + 1, t) = a * s + b * c;
      }
    }
  }

  /// Softmax and loss; turns the logits into d loss / d logits.
  BatchResult score() {
    BatchResult result{.right = std::vector<bool>(batch_->tokens.size(), false)};
    for (Index t = 0; t < logits_.cols(); ++t) {
      auto column = logits_.col(t);
      if (t % length_ == length_ - 1) {  // nothing follows
        column.setZero();
        continue;
      }
      const std::size_t next = static_cast<std::size_t>(t) + 1;
      const Scalar weight = static_cast<Scalar>(batch_->weight[next]);
      Index likeliest;
      const Scalar greatest = column.maxCoeff(&likeliest);
      const Scalar logit = column[token(t + 1)];
      column = (column.array() - greatest).exp();
      const Scalar sum = column.sum();
      result.right[next] = likeliest == token(t + 1);
      result.loss += static_cast<double>(weight * (std::log(sum) + greatest - logit));
      column *= weight / sum;
      column[token(t + 1)] -= weight;
    }
    return result;
  }

  Config config_;
  const Batch* batch_ = nullptr;
  Index length_ = 0;
  Matrix cos_, sin_;  // (head_dim / 2, length)
  std::vector<LayerState> layers_;
  Norm final_;
  Matrix x_, logits_;
  Matrix dx_, d_out_, d_hidden_, d_up_, d_attended_, d_weights_, dq_, dk_, dv_;
};

}  // namespace toy
