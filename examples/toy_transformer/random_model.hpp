// Models that have learned nothing, for what does not depend on the weights: speed, memory, agreement of two ways to compute.
#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>

#include "random.hpp"
#include "weights.hpp"

namespace toy {

/// Uniform weights of standard deviation 1 / sqrt(inputs), which keeps activations near 1; norms of 1.
inline std::shared_ptr<const Weights> random_weights(const Config& config, std::uint64_t seed) {
  std::mt19937_64 bits(seed);
  const auto fill = [&bits](Matrix& matrix) {
    const double limit = std::sqrt(3.0 / static_cast<double>(matrix.cols()));
    for (Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = static_cast<float>((2 * uniform(bits) - 1) * limit);
  };
  const auto weights = std::make_shared<Weights>(config);
  fill(weights->token_embedding);
  for (Layer& layer : weights->layers) {
    layer.rms_attention.setOnes();
    layer.rms_ffn.setOnes();
    for (Matrix* matrix : {&layer.wq, &layer.wk, &layer.wv, &layer.wo, &layer.w1, &layer.w2, &layer.w3}) fill(*matrix);
  }
  weights->rms_final.setOnes();
  fill(weights->own_classifier);
  return weights;
}

}  // namespace toy
