// How many tokens per second does a whole model decode at a context of 16k tokens, with a full cache and with a budget?
//
// A Llama-style model of about 100 million random float weights, the toy transformer's, one token at a time, greedily. A
// real prompt of 16k tokens would take minutes and not change the decoding's speed: the caches are filled with random keys
// and values instead, so the model's blocks are spelled out here.
#include <toy_transformer/layers.hpp>
#include <toy_transformer/random_model.hpp>

#include "bench.hpp"

using namespace bench;

namespace {

constexpr Index context = 16384, budget = 1024;
constexpr toy::Config config{
    .dim = 768, .hidden_dim = 2048, .num_layers = 12, .query_heads = 12, .kv_heads = 4, .vocab_size = 32000, .seq_len = context};

template <class T, kvsnip::Policy P>
class Model {
 public:
  /// @param held  slots a kv_head holds; the next token's position is `context`
  Model(std::shared_ptr<const toy::Weights> weights, Index held)
      : weights_(std::move(weights)), caches_(static_cast<std::size_t>(config.num_layers), kvsnip::KVCache<T, P>(config.shape(), held)) {
    const MatrixXf more = MatrixXf::Random(config.kv_dim(), 256);
    for (auto& cache : caches_) {
      fill(cache, held);
      cache.update(more, more).abandon();  // leaves memory for as many tokens
    }
  }
  /// Decode the token after the last one.
  void step() {
    x_ = weights_->token_embedding.row(token_).transpose();
    const toy::Rope rope(config.head_dim(), position_, 1);
    for (std::size_t i = 0; i < caches_.size(); ++i) {
      const toy::Layer& layer = weights_->layers[i];
      toy::rms_norm(x_, layer.rms_attention, normed_);
      q_.noalias() = layer.wq * normed_;
      k_.noalias() = layer.wk * normed_;
      v_.noalias() = layer.wv * normed_;
      rope.rotate(q_);
      rope.rotate(k_);
      const auto step = caches_[i].update(k_, v_, {.first_position = position_});
      attended_.resize(q_.rows(), 1);
      kvsnip::attend(step, q_, attended_);
      x_.noalias() += layer.wo * attended_;

      toy::rms_norm(x_, layer.rms_ffn, normed_);
      gate_.noalias() = layer.w1 * normed_;
      up_.noalias() = layer.w3 * normed_;
      gate_.array() *= up_.array() / (1.0f + (-gate_.array()).exp());
      x_.noalias() += layer.w2 * gate_;
    }
    toy::rms_norm(x_, weights_->rms_final, normed_);
    logits_.noalias() = weights_->classifier() * normed_;
    logits_.col(0).maxCoeff(&token_);
    ++position_;
  }

 private:
  std::shared_ptr<const toy::Weights> weights_;
  std::vector<kvsnip::KVCache<T, P>> caches_;
  Index position_ = context, token_ = toy::bos_token;
  MatrixXf x_, normed_, q_, k_, v_, attended_, gate_, up_, logits_;
};

template <class T, kvsnip::Policy P>
Task& decode(Bench& bench, const std::shared_ptr<const toy::Weights>& weights, std::string name, Index held) {
  constexpr int steps = 8;  // what one choice of victims serves
  const auto model = std::make_shared<Model<T, P>>(weights, held);
  return bench.time({.name = std::move(name),
                     .shape = fmt::format("{} layers, {}, {} tokens seen", config.num_layers, text(config.shape()), context),
                     .type = type_name<T>(),
                     .run = [=, &bench] {
                       const double start = bench.threads().seconds();
                       for (int i = 0; i < steps; ++i) model->step();
                       return (bench.threads().seconds() - start) / steps;
                     }});
}

template <class T>
void add(Bench& bench, const std::shared_ptr<const toy::Weights>& weights, std::vector<std::function<void()>>& rows) {
  const Task& full = decode<T, kvsnip::Full>(bench, weights, "token, full", context);
  const Task& bounded = decode<T, kvsnip::Scissorhands>(bench, weights, "token, scissorhands at 1024", budget);
  for (const Task* task : {&full, &bounded})
    rows.push_back([&bench, &full, task] {
      bench.row(*task, over(full, *task), fmt::format("full, times faster; {:.1f} tokens/s", 1 / median(task->seconds)));
    });
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc, argv, "How many tokens per second does a 100M-parameter model decode at a context of 16k tokens?");
  fmt::print(stderr, "making a model\n");
  const std::shared_ptr<const toy::Weights> weights = toy::random_weights(config, /*seed=*/1);
  std::vector<std::function<void()>> rows;
  add<float>(bench, weights, rows);
  add<Eigen::half>(bench, weights, rows);
  bench.measure(bench.quick() ? 3 : 9);
  for (const auto& row : rows) row();
  return bench.report();
}
