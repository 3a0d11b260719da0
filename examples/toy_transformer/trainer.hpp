// Trains the toy world's model. The same seed gives the same weights, in one go or resumed.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "adamw.hpp"
#include "backprop.hpp"
#include "binary_file.hpp"
#include "curriculum.hpp"

namespace toy {

inline Config toy_world_config() {
  return {.dim = 96, .hidden_dim = 192, .num_layers = 2, .query_heads = 4, .kv_heads = 2, .vocab_size = std::ssize(words), .seq_len = 512, .own_head_dim = 32};
}

/// Normal, of standard deviation 1 / sqrt(inputs); what adds to the residual stream less by sqrt(2 * layers).
inline Weights untrained_weights(const Config& config, std::uint64_t seed) {
  Weights weights(config);
  std::mt19937_64 bits = random_bits(seed, ~std::uint64_t{0});
  const auto fill = [&bits](auto& matrix) {
    const double deviation = 1 / std::sqrt(static_cast<double>(matrix.cols()));
    for (Index i = 0; i < matrix.size(); ++i) matrix.data()[i] = static_cast<float>(deviation * normal(bits));
  };
  for_each_tensor(
      [&](auto& tensor) {
        if (tensor.cols() > 1) fill(tensor);
        else tensor.setOnes();
      },
      weights);
  const float less = 1 / std::sqrt(2 * static_cast<float>(config.num_layers));
  for (Layer& layer : weights.layers) layer.wo *= less, layer.w2 *= less;
  return weights;
}

class Trainer {
 public:
  struct Progress {
    std::size_t stage = 0;   ///< number of stages: done
    Index steps_in_stage = 0;
    Index steps = 0, tokens = 0;
    double loss = 0;      ///< of the last step
    double accuracy = 0;  ///< on the stage's own words or places, running

    friend bool operator==(const Progress&, const Progress&) = default;
  };

  Trainer(const Config& config, std::vector<Stage> stages, std::uint64_t seed)
      : weights_(untrained_weights(config, seed)), stages_(std::move(stages)), seed_(seed), optimiser_(config), halves_{Half(config), Half(config)} {}

  const Weights& weights() const { return weights_; }
  const Progress& progress() const { return progress_; }
  bool done() const { return progress_.stage == stages_.size(); }

  /// One batch, in two halves on a thread each: however many cores there are, the sums are the same.
  void step() {
    const Stage& stage = stages_[progress_.stage];
    const Batch batch = make_batch(stage, seed_, progress_.steps);
    const Index cut = batch.sequences() / 2 * batch.length;
    std::jthread other([&] { halves_[1].run(weights_, batch, cut, std::ssize(batch.tokens)); });
    halves_[0].run(weights_, batch, 0, cut);
    other.join();
    for_each_tensor([](auto& a, auto& b) { a += b; }, halves_[0].gradient, halves_[1].gradient);
    optimiser_.step(weights_, halves_[0].gradient, rate(stage));

    ++progress_.steps, ++progress_.steps_in_stage;
    progress_.tokens += std::ssize(batch.tokens);
    progress_.loss = halves_[0].result.loss + halves_[1].result.loss;
    observe_accuracy(batch, cut);
    const bool passed = stage.last_steps > 0 ? progress_.steps_in_stage >= stage.last_steps
                                             : progress_.steps_in_stage >= 20 && progress_.accuracy > stage.passed_at;
    if (passed) ++progress_.stage, progress_.steps_in_stage = 0, progress_.accuracy = 0;
  }

  /// Everything that a later resume() needs. Throws std::runtime_error, one line, as resume() does.
  void save(const std::filesystem::path& path) {
    std::ofstream out(path, std::ios::binary);
    const auto write = [&out](const void* data, std::size_t bytes) { out.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes)); };
    const Saved saved{magic, progress_, seed_};
    write(&saved, sizeof saved);
    for_each_state([&](auto& tensor) { write(tensor.data(), static_cast<std::size_t>(tensor.size()) * sizeof(float)); });
    if (!out.flush()) throw std::runtime_error(path.string() + ": cannot be written");
  }
  /// Of the same configuration, stages and seed.
  void resume(const std::filesystem::path& path) {
    BinaryFile file(path);
    Index floats = 0;
    for_each_state([&](auto& tensor) { floats += tensor.size(); });
    if (file.remaining() != Index{sizeof(Saved)} + floats * Index{sizeof(float)}) file.fail("not the state of this training: wrong size");
    const Saved saved = file.read<Saved>();
    if (saved.magic != magic || saved.progress.stage > stages_.size()) file.fail("not the state of this training");
    if (saved.seed != seed_) file.fail("the state of a training with seed " + std::to_string(saved.seed));
    progress_ = saved.progress;
    optimiser_.set_steps(progress_.steps);
    for_each_state([&](auto& tensor) { file.read_floats(tensor.data(), tensor.size()); });
  }

 private:
  static constexpr std::uint64_t magic = 0x31656E6961727454;  // "Ttraine1"
  struct Saved {
    std::uint64_t magic;
    Progress progress;
    std::uint64_t seed;
  };

  struct Half {
    Backprop<float> model;
    Weights gradient;
    Batch batch;
    BatchResult result;

    explicit Half(const Config& config) : model(config), gradient(config) {}
    void run(const Weights& weights, const Batch& whole, Index from, Index to) {
      batch.length = whole.length;
      batch.tokens.assign(whole.tokens.begin() + from, whole.tokens.begin() + to);
      batch.weight.assign(whole.weight.begin() + from, whole.weight.begin() + to);
      for_each_tensor([](auto& tensor) { tensor.setZero(); }, gradient);
      result = model.forward(weights, batch);
      model.backward(weights, gradient);
    }
  };

  template <class F>
  void for_each_state(F&& f) {
    for_each_tensor(f, weights_);
    optimiser_.for_each_state(f);
  }

  /// Warm-up over 100 steps, constant, and over the last stage down to 2 %.
  float rate(const Stage& stage) const {
    constexpr float highest = 3e-3f, lowest_share = 0.02f, warm_up = 100;
    const float left = stage.last_steps > 0 ? 1 - static_cast<float>(progress_.steps_in_stage) / static_cast<float>(stage.last_steps) : 1.0f;
    return highest * std::min({1.0f, static_cast<float>(progress_.steps + 1) / warm_up, std::max(lowest_share, left)});
  }

  void observe_accuracy(const Batch& batch, Index cut) {
    Index right = 0, all = 0;
    for (Index t = 0; t < std::ssize(batch.tokens); ++t) {
      if (!batch.counts[static_cast<std::size_t>(t)]) continue;
      ++all;
      if (halves_[t < cut ? 0 : 1].result.right[static_cast<std::size_t>(t < cut ? t : t - cut)]) ++right;
    }
    if (all > 0) progress_.accuracy = 0.95 * progress_.accuracy + 0.05 * static_cast<double>(right) / static_cast<double>(all);
  }

  Weights weights_;
  std::vector<Stage> stages_;
  std::uint64_t seed_;
  AdamW optimiser_;
  std::array<Half, 2> halves_;
  Progress progress_;
};

/// Answers right by distance, on documents that no training has seen: the place after "in the", with everything before it known.
struct Examination {
  static constexpr Index bin_width = 64;
  std::array<Index, 8> right{}, asked{};  ///< by (place - place in the fact) / 64; the last is open
};

inline Examination examine(const Weights& weights, std::uint64_t seed, Index documents, Index length = 512) {
  Backprop<float> model(weights.config);
  Examination result;
  for (Index number = 0; number < documents; ++number) {
    const Document document = held_out_document(seed, static_cast<std::uint64_t>(number), length);
    const Lesson lesson = make_reading(document);
    const BatchResult read = model.forward(weights, make_batch({&lesson, 1}));
    for (const Question& question : document.questions) {
      const std::size_t bin = std::min(static_cast<std::size_t>(question.distance() / Examination::bin_width), result.asked.size() - 1);
      ++result.asked[bin];
      if (read.right[static_cast<std::size_t>(question.place())]) ++result.right[bin];
    }
  }
  return result;
}

}  // namespace toy
