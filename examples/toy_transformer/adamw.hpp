// AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv:1711.05101).
#pragma once

#include <cmath>

#include "weights.hpp"

namespace toy {

struct AdamWOptions {
  float beta1 = 0.9f, beta2 = 0.98f, epsilon = 1e-8f;
  float decay = 0.01f;    ///< per step, times the rate; of matrices, the embedding among them, not of norms
  float max_norm = 1;     ///< a longer gradient is shortened to this
};

class AdamW {
 public:
  explicit AdamW(const Config& config, const AdamWOptions& options = {}) : options_(options), mean_(config), square_(config) {
    for_each_tensor([](auto& mean, auto& square) { mean.setZero(), square.setZero(); }, mean_, square_);
  }

  /// One step. @param gradient  overwritten  @return its norm before clipping
  float step(Weights& weights, Weights& gradient, float rate) {
    double squared = 0;
    for_each_tensor([&](auto& g) { squared += g.template cast<double>().squaredNorm(); }, gradient);
    const float norm = static_cast<float>(std::sqrt(squared)), scale = norm > options_.max_norm ? options_.max_norm / norm : 1;
    ++steps_;
    const float correct1 = 1 / (1 - std::pow(options_.beta1, static_cast<float>(steps_)));
    const float correct2 = 1 / (1 - std::pow(options_.beta2, static_cast<float>(steps_)));
    for_each_tensor(
        [&](auto& w, auto& g, auto& mean, auto& square) {
          g *= scale;
          mean = options_.beta1 * mean + (1 - options_.beta1) * g;
          square = options_.beta2 * square + (1 - options_.beta2) * g.cwiseAbs2();
          if (w.cols() > 1) w *= 1 - rate * options_.decay;
          w.array() -= rate * correct1 * mean.array() / ((correct2 * square.array()).sqrt() + options_.epsilon);
        },
        weights, gradient, mean_, square_);
    return norm;
  }

  /// To keep and to restore it: f is called with every tensor, all in all twice as much as the weights.
  template <class F>
  void for_each_state(F&& f) {
    for_each_tensor(f, mean_);
    for_each_tensor(f, square_);
  }
  Index steps() const { return steps_; }
  void set_steps(Index steps) { steps_ = steps; }

 private:
  AdamWOptions options_;
  Weights mean_, square_;  // of the gradient, decayed
  Index steps_ = 0;
};

}  // namespace toy
