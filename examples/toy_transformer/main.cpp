// The demo: a small transformer that generates text from a KV cache held to a budget, and says what that saved.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <kvsnip/fmt.hpp>
#include <kvsnip/kvsnip.hpp>
#include <kvsnip/registry.hpp>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../report/recorder.hpp"
#include "../report/report.hpp"
#include "checkpoint.hpp"
#include "generate.hpp"
#include "held_strip.hpp"
#include "nll.hpp"
#include "options.hpp"
#include "printable.hpp"
#include "random_model.hpp"
#include "tokenizer.hpp"
#include "transformer.hpp"

namespace {

using toy::Index;

/// Said when nothing can go wrong with the arguments any more, so that an error stays one line.
void announce(const toy::Options& options) {
  if (options.model.empty())
    fmt::print(stderr, "no --model given: a small built-in model with random weights; its text is noise\n");
}

template <class T>
std::string cache_summary(const toy::Transformer<T>& model, const toy::Options& options) {
  const auto& cache = model.caches().front();
  const bool evicts = cache.policy().evicts(kvsnip::Phase::decode) || cache.policy().evicts(kvsnip::Phase::long_prompt);
  return fmt::format("policy {}, {}, stored as {}", to_string(cache.policy()),
                     evicts ? fmt::format("budget {}", cache.budget()) : "evicts nothing", options.type);
}

template <class T>
void print_statistics(const toy::Transformer<T>& model, const toy::GenerateTimes& times, const toy::Options& options) {
  fmt::print("\n{}\n", cache_summary(model, options));
  fmt::print("tokens seen      {}\n", model.tokens_seen());
  fmt::print("prompt           {} tokens in {:.2f} ms\n", times.prompt_tokens, 1e3 * times.prompt_seconds);
  if (times.decoded_tokens > 0)
    fmt::print("generation       {:.0f} tokens/s\n", static_cast<double>(times.decoded_tokens) / times.decode_seconds);
  const kvsnip::Bytes bytes = model.bytes();
  const Index held = bytes.keys + bytes.values, full = model.full_cache_bytes();
  fmt::print("keys and values  {}, {:.1f} % of the {} of a full cache\n", kvsnip::human_bytes(held),
             100 * static_cast<double>(held) / static_cast<double>(full), kvsnip::human_bytes(full));
  fmt::print("all caches       {}\n", bytes);
}

template <class T>
void print_held_positions(const toy::Transformer<T>& model) {
  const Index tokens = model.tokens_seen();
  fmt::print("\npositions held, 0 on the left, {} on the right: {}\n", tokens - 1, toy::held_strip_legend);
  std::size_t layer = 0;
  for (const auto& cache : model.caches()) {
    for (Index h = 0; h < model.config().kv_heads; ++h)
      fmt::print("layer {:2} kv_head {:2} |{}| {}\n", layer, h, toy::held_strip(cache.positions(h), tokens),
                 cache.size(h));
    ++layer;
  }
}

template <class T>
void write_report(toy::Recorder<T>& recorder, const toy::Transformer<T>& model, const toy::Options& options) {
  const kvsnip::Bytes bytes = model.bytes();
  recorder.add_fact("the cache", cache_summary(model, options));
  recorder.add_fact("keys and values", fmt::format("{}, {} in a full cache", kvsnip::human_bytes(bytes.keys + bytes.values), kvsnip::human_bytes(model.full_cache_bytes())));
  std::ofstream out(options.report, std::ios::binary);
  toy::write_report(out, &recorder.recording());
  if (!out.flush()) throw std::runtime_error(options.report + ": cannot be written");
  if (!options.quiet) fmt::print("pictures         {}\n", options.report);
}

template <class T>
void generate(toy::Transformer<T>& model, const toy::Tokenizer& tokenizer, const toy::Options& options) {
  if (!options.report.empty() && !std::ofstream(options.report, std::ios::app)) throw toy::UsageError(options.report + ": cannot be written");  // before the run
  announce(options);
  std::optional<toy::Recorder<T>> recorder;
  if (!options.report.empty()) recorder.emplace(model).add_text("<s>");
  toy::Sampler sampler(options.temperature.value_or(0), options.seed);
  toy::Printable printable;
  const auto print = [](const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);  // the text appears as it comes
  };
  const toy::GenerateTimes times = toy::generate(
      model, sampler, tokenizer.encode(options.prompt.value_or("")),
      {.steps = options.steps, .ignore_eos = options.ignore_eos},
      [&](toy::Token previous, toy::Token token) {
        const std::string text = tokenizer.decode(previous, token);
        if (recorder) recorder->add_text(text);
        print(printable.push(text));
      });
  print(printable.finish() + "\n");
  if (!options.quiet) print_statistics(model, times, options);
  if (!options.quiet && options.show) print_held_positions(model);
  if (recorder) write_report(*recorder, model, options);
}

template <class T>
void score_text(toy::Transformer<T>& model, const toy::Tokenizer& tokenizer, const toy::Options& options) {
  const std::string text = toy::read_text(options.nll);
  const std::vector<std::string_view> documents = toy::split_documents(text);
  if (documents.empty() || model.config().seq_len < 2) throw toy::UsageError(options.nll + ": no text to score");

  announce(options);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  Clock::time_point last_report = start;
  const toy::TextNll nll = toy::text_nll(model, tokenizer, documents, [&](std::size_t document) {
    const Clock::time_point now = Clock::now();
    if (now - last_report < std::chrono::seconds(5)) return;
    last_report = now;
    const double left = static_cast<double>(documents.size() - document) / static_cast<double>(document);
    fmt::print(stderr, "document {} of {}, about {:.0f} s left\n", document, documents.size(),
               left * std::chrono::duration<double>(now - start).count());
  });
  if (options.quiet) fmt::print("{:.4f}\n", nll.mean());
  else fmt::print("{:.4f} nats per token: {} tokens of {} documents, {}\n", nll.mean(), nll.tokens, documents.size(),
                  cache_summary(model, options));
}

void list_policies() {
  for (const kvsnip::PolicyInfo& info : kvsnip::policies()) {
    fmt::print("{}{}\n", info.name, info.decorates ? "(POLICY, ...)" : "");
    if (!info.paper.empty()) fmt::print("  paper     {}\n", info.paper);
    fmt::print("  needs     {}\n", info.needs);
    if (!info.defaults.empty()) fmt::print("  defaults  {}\n", info.defaults);
  }
}

template <class T>
void run(std::shared_ptr<const toy::Weights> weights, const toy::Tokenizer& tokenizer, const toy::Options& options) {
  toy::Transformer<T> model(std::move(weights), options.policy, options.budget);
  if (options.nll.empty()) generate(model, tokenizer, options);
  else score_text(model, tokenizer, options);
}

void run(toy::Options options) {
  const bool built_in = options.model.empty();
  const toy::Tokenizer tokenizer = built_in ? toy::Tokenizer::bytes_only() : toy::Tokenizer::load(options.tokenizer);
  const std::shared_ptr<const toy::Weights> weights =
      built_in ? toy::random_weights(toy::builtin_config(), 1) : toy::load_checkpoint(options.model);
  if (built_in) {
    if (!options.prompt) options.prompt = "Once upon a time";
    if (!options.temperature) options.temperature = 1;  // its likeliest tokens go round in a small circle
    options.ignore_eos = true;                          // it has not learned to end a text
  }
  if (tokenizer.size() != weights->config.vocab_size)
    throw toy::UsageError(fmt::format("{} has {} tokens, the model {}", options.tokenizer, tokenizer.size(),
                                      weights->config.vocab_size));

  if (options.type == "half") run<Eigen::half>(weights, tokenizer, options);
  else if (options.type == "bfloat16") run<Eigen::bfloat16>(weights, tokenizer, options);
  else run<float>(weights, tokenizer, options);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const toy::Options options = toy::parse_options({argv + 1, argv + argc});
    if (options.help) fmt::print("{}", toy::usage);
    else if (options.list_policies) list_policies();
    else run(options);
    return EXIT_SUCCESS;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "toy_transformer: out of memory\n");
  } catch (const std::exception& error) {
    fmt::print(stderr, "toy_transformer: {}\n", error.what());
  }
  return 2;
}
