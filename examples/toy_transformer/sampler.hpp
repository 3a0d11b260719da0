// From logits to the next token: the likeliest, or a seeded draw.
#pragma once

#include <Eigen/Core>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>

#include "random.hpp"
#include "weights.hpp"

namespace toy {

class Sampler {
 public:
  /// @param temperature  0: always the likeliest token; else logits are divided by it, >= 0
  Sampler(double temperature, std::uint64_t seed) : temperature_(temperature), bits_(seed) {
    if (!(temperature >= 0) || !std::isfinite(temperature))
      throw std::invalid_argument("Sampler: temperature must be >= 0");
  }

  /// @param logits  (vocab_size), finite
  Token operator()(const Eigen::Ref<const Eigen::VectorXf>& logits) {
    if (!logits.allFinite()) throw std::runtime_error("the model's logits are not finite");
    Index best;
    const float greatest = logits.maxCoeff(&best);
    if (temperature_ == 0) return static_cast<Token>(best);

    const auto share = [&](Index token) {
      return std::exp((static_cast<double>(logits[token]) - greatest) / temperature_);
    };
    double sum = 0;
    for (Index token = 0; token < logits.size(); ++token) sum += share(token);
    double left = uniform(bits_) * sum;
    for (Index token = 0; token < logits.size(); ++token) {
      left -= share(token);
      if (left < 0) return static_cast<Token>(token);
    }
    return static_cast<Token>(best);  // rounding left a hair over
  }

 private:
  double temperature_;
  std::mt19937_64 bits_;
};

}  // namespace toy
