// The trainer: its gradient against finite differences, its model against the one that runs over caches, AdamW by hand.

#include <toy_transformer/random_model.hpp>
#include <toy_transformer/trainer.hpp>
#include <toy_transformer/transformer.hpp>

#include "support/catch.hpp"
#include "support/thrown.hpp"
#include "support/tolerance.hpp"

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

using toy::Backprop;
using toy::Batch;
using toy::Config;
using toy::Index;
using toy::Token;
using Wide = toy::BasicWeights<double>;

/// Two sequences of random tokens, every one with a weight of its own.
Batch random_batch(Index vocab_size, Index length) {
  std::mt19937_64 bits(7);
  Batch batch{.length = length, .tokens = {}, .weight = {}, .counts = {}};
  for (Index t = 0; t < 2 * length; ++t) {
    batch.tokens.push_back(static_cast<Token>(toy::below(vocab_size, bits)));
    batch.weight.push_back(t % length == 0 ? 0.0f : static_cast<float>(toy::uniform(bits)));
    batch.counts.push_back(false);
  }
  return batch;
}

Wide widened(const toy::Weights& narrow) {
  Wide wide(narrow.config);
  toy::for_each_tensor([](auto& w, const auto& n) { w = n.template cast<double>(); }, wide, narrow);
  return wide;
}

TEST_CASE("The gradient is what finite differences say, element by element and along random directions") {
  Config config{.dim = 6, .hidden_dim = 8, .num_layers = 2, .query_heads = 4, .kv_heads = 2, .vocab_size = 9, .seq_len = 8, .own_head_dim = 4};
  config.shared_classifier = GENERATE(true, false);
  Wide weights = widened(*toy::random_weights(config, 3));
  const Batch batch = random_batch(config.vocab_size, 7);
  std::mt19937_64 bits(5);
  for (auto& layer : weights.layers)  // norms that are not all 1
    for (Index i = 0; i < config.dim; ++i) layer.rms_attention[i] = 0.5 + toy::uniform(bits), layer.rms_ffn[i] = 0.5 + toy::uniform(bits);

  Backprop<double> model(config);
  Wide gradient(config);
  toy::for_each_tensor([](auto& tensor) { tensor.setZero(); }, gradient);
  model.forward(weights, batch);
  model.backward(weights, gradient);

  const auto loss = [&] { return model.forward(weights, batch).loss; };
  toy::for_each_tensor(
      [&](auto& tensor, const auto& g) {
        const auto check = [&](const auto& direction) {
          constexpr double small = 1e-5;
          const auto start = tensor.eval();
          tensor = start + small * direction;
          const double up = loss();
          tensor = start - small * direction;
          const double down = loss();
          tensor = start;
          const double expected = (up - down) / (2 * small), got = g.cwiseProduct(direction).sum();
          CAPTURE(tensor.rows(), tensor.cols(), got, expected);
          CHECK(test::close(got, expected, 1e-5, 1e-8));
        };
        auto direction = tensor.eval();
        for (int sample = 0; sample < 3; ++sample) {
          direction.setZero();
          direction.data()[toy::below(direction.size(), bits)] = 1;
          check(direction);
        }
        for (Index i = 0; i < direction.size(); ++i) direction.data()[i] = toy::normal(bits);
        check(direction);
      },
      weights, gradient);
}

TEST_CASE("The trained model is the one that the demo runs over its caches") {
  const Config config{.dim = 12, .hidden_dim = 16, .num_layers = 2, .query_heads = 4, .kv_heads = 2, .vocab_size = 20, .seq_len = 12, .own_head_dim = 6};
  const auto weights = toy::random_weights(config, 11);
  const Batch batch = random_batch(config.vocab_size, 12);
  Backprop<float> backprop(config);
  const toy::BatchResult result = backprop.forward(*weights, batch);
  const Eigen::MatrixXf softmax = backprop.logit_gradient();  // weight * (softmax - the token that came)

  toy::Transformer<float> transformer(weights, "full", 64);
  for (Index first = 0; first < 24; first += 12) {
    transformer.reset();
    const Eigen::MatrixXf logits = transformer.forward(std::span(batch.tokens).subspan(static_cast<std::size_t>(first), 12), {.all_logits = true});
    for (Index t = 0; t + 1 < 12; ++t) {
      const std::size_t next = static_cast<std::size_t>(first + t + 1);
      Eigen::VectorXf expected = (logits.col(t).array() - logits.col(t).maxCoeff()).exp();
      expected /= expected.sum();
      Index likeliest;
      expected.maxCoeff(&likeliest);
      CHECK(result.right[next] == (likeliest == batch.tokens[next]));
      expected[batch.tokens[next]] -= 1;
      CHECK(test::largest_difference(softmax.col(first + t), batch.weight[next] * expected) < 1e-5);
    }
  }
}

TEST_CASE("AdamW's first steps by hand") {
  const Config config{.dim = 2, .hidden_dim = 2, .num_layers = 1, .query_heads = 1, .kv_heads = 1, .vocab_size = 2, .seq_len = 4};
  toy::Weights weights(config), gradient(config);
  const auto set = [](float value) { return [value](auto& tensor) { tensor.setConstant(value); }; };
  toy::for_each_tensor(set(1.0f), weights);
  toy::for_each_tensor(set(0.0f), gradient);
  gradient.token_embedding(0, 0) = 6, gradient.rms_final[1] = 8;  // norm 10, cut to 1: 0.6 and 0.8
  toy::AdamW optimiser(config, {.decay = 0.1f, .max_norm = 1});
  CHECK(test::close(optimiser.step(weights, gradient, 0.5f), 10, 1e-6, 0));
  // Of the first step only the sign counts; matrices shrink by rate * decay, norms do not.
  CHECK(test::close(weights.token_embedding(0, 0), 0.95f - 0.5f, 1e-5, 0));
  CHECK(test::close(weights.token_embedding(1, 1), 0.95f, 1e-6, 0));
  CHECK(weights.rms_final[0] == 1);
  CHECK(test::close(weights.rms_final[1], 0.5f, 1e-5, 0));
  // Then nothing: the mean of rms_final is 0.1 * 0.8 * 0.9 / (1 - 0.9^2), of its square 0.02 * 0.64 * 0.98 / (1 - 0.98^2).
  toy::for_each_tensor(set(0.0f), gradient);
  CHECK(optimiser.step(weights, gradient, 0.5f) == 0);
  const double mean = 0.1 * 0.8 * 0.9 / 0.19, square = 0.02 * 0.64 * 0.98 / 0.0396;
  CHECK(test::close(weights.rms_final[1], 0.5 - 0.5 * mean / std::sqrt(square), 1e-4, 0));
  CHECK(optimiser.steps() == 2);
}

Config small_world() {
  return {.dim = 16, .hidden_dim = 16, .num_layers = 1, .query_heads = 2, .kv_heads = 1, .vocab_size = std::ssize(toy::words), .seq_len = 48, .own_head_dim = 8};
}
const std::vector<toy::Stage> short_stages{
    {.documents = {.length = 24}, .drill_share = 0.5, .sequences = 4, .passed_at = -1},  // passed after 20 steps
    {.documents = {.length = 32, .max_facts = 3, .question_share = 0.8}, .sequences = 5, .last_steps = 20}};

void train(toy::Trainer& trainer, Index until) {
  while (!trainer.done() && trainer.progress().steps < until) trainer.step();
}
bool same(const toy::Weights& a, const toy::Weights& b) {
  bool all = true;
  toy::for_each_tensor([&](const auto& x, const auto& y) { all = all && x == y; }, a, b);
  return all;
}

TEST_CASE("A short run's loss falls, and a run that was interrupted ends with the same weights") {
  toy::Trainer whole(small_world(), short_stages, 4), first(small_world(), short_stages, 4), second(small_world(), short_stages, 4);
  train(whole, 1);
  const double at_first = whole.progress().loss;
  train(whole, 1000);
  CHECK(whole.done());
  CHECK(whole.progress().steps == 40);
  CHECK(at_first > 4.5);  // knows nothing: log(104) = 4.64, and a tenth of it for the words that are no answers
  CHECK(whole.progress().loss < 0.9 * at_first);

  const std::filesystem::path state = std::filesystem::temp_directory_path() / ("trainer_test_" + std::to_string(std::random_device{}()));
  train(first, 17);
  first.save(state);
  second.resume(state);
  CHECK(second.progress() == first.progress());
  train(second, 1000);
  CHECK(second.progress() == whole.progress());
  CHECK(same(second.weights(), whole.weights()));

  toy::Trainer other(small_world(), short_stages, 5);
  CHECK_FALSE(same(other.weights(), toy::untrained_weights(small_world(), 4)));
  CHECK(test::says(test::message_of([&] { other.resume(state); }), {"the state of a training with seed 4"}));
  std::ofstream(state, std::ios::app) << "more";
  CHECK(test::says(test::message_of([&] { second.resume(state); }), {"wrong size"}));
  std::filesystem::remove(state);
}

TEST_CASE("An examination counts every question once, in the bin of its distance") {
  const toy::Examination examination = toy::examine(toy::untrained_weights(small_world(), 1), 1, 2, 200);
  Index asked = 0, questions = 0;
  for (std::size_t bin = 0; bin < examination.asked.size(); ++bin) {
    asked += examination.asked[bin];
    CHECK(examination.right[bin] <= examination.asked[bin]);
  }
  for (std::uint64_t number = 0; number < 2; ++number) questions += std::ssize(toy::held_out_document(1, number, 200).questions);
  CHECK(asked == questions);
  CHECK(asked > 0);
}

}  // namespace
