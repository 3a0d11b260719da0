// The demo: a small transformer whose KV cache is held to a budget. It reads a story and answers its questions, or generates
// text, and says what the budget saved and what it cost.
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
#include "story.hpp"
#include "tokenizer.hpp"
#include "transformer.hpp"

namespace {

using toy::Index;

template <class T>
std::string cache_summary(const toy::Transformer<T>& model, const toy::Options& options) {
  const auto& cache = model.caches().front();
  const bool evicts = cache.policy().evicts(kvsnip::Phase::decode) || cache.policy().evicts(kvsnip::Phase::long_prompt);
  return fmt::format("policy {}, {}, stored as {}", to_string(cache.policy()),
                     evicts ? fmt::format("budget {}", cache.budget()) : "evicts nothing", options.type);
}

void print_times(const toy::GenerateTimes& times) {
  fmt::print("prompt           {} tokens in {:.2f} ms\n", times.prompt_tokens, 1e3 * times.prompt_seconds);
  if (times.decoded_tokens > 0)
    fmt::print("generation       {:.0f} tokens/s\n", static_cast<double>(times.decoded_tokens) / times.decode_seconds);
}

template <class T>
void print_memory(const toy::Transformer<T>& model) {
  fmt::print("tokens seen      {}\n", model.tokens_seen());
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

/// Before the run, so that it is not for nothing.
void check_report_can_be_written(const toy::Options& options) {
  if (!options.report.empty() && !std::ofstream(options.report, std::ios::app)) throw toy::UsageError(options.report + ": cannot be written");
}

template <class T, class Tokenizer>
void generate(toy::Transformer<T>& model, const Tokenizer& tokenizer, const toy::Options& options) {
  check_report_can_be_written(options);
  std::optional<toy::Recorder<T>> recorder;
  if (!options.report.empty()) recorder.emplace(model).add_text("<s>");
  toy::Sampler sampler(options.temperature, options.seed);
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
  if (!options.quiet) {
    fmt::print("\n{}\n", cache_summary(model, options));
    print_times(times);
    print_memory(model);
    if (options.show) print_held_positions(model);
  }
  if (recorder) write_report(*recorder, model, options);
}

/// Every question of a story, each at the end of a fresh prompt; after the last the model goes on by itself.
template <class T>
void tell_story(const std::shared_ptr<const toy::Weights>& weights, const toy::Options& options) {
  check_report_can_be_written(options);
  if (options.steps < toy::shortest_story) throw toy::UsageError(fmt::format("--steps: {} is too short for a story, which takes {}", options.steps, toy::shortest_story));
  toy::Transformer<T> full(weights, "full", 1), model(weights, options.policy, options.budget);
  const toy::WordTokenizer tokenizer;
  const toy::Story story = toy::make_story(options.seed, options.steps);
  const auto word = [](toy::Token token) { return toy::words.at(static_cast<std::size_t>(token)); };
  fmt::print("{}\n\n", toy::wrapped(toy::text_of(std::span(story.tokens).subspan(1)), 100));
  fmt::print("{:26} {:10} {:18} {}\n", "asked at the end", "answer", "full cache", fmt::format("{}, budget {}", to_string(model.caches().front().policy()), options.budget));

  Index right = 0, right_by_full = 0;
  std::optional<toy::Recorder<T>> recorder;
  for (const toy::Story::Riddle& riddle : story.riddles) {
    const bool last = &riddle == &story.riddles.back();
    std::vector<toy::Token> prompt = story.tokens;
    for (const toy::Token token : riddle.question()) prompt.push_back(token);
    if (last && !options.report.empty()) recorder.emplace(model);
    const toy::Token by_full = toy::ask(full, prompt), said = toy::ask(model, prompt);
    const auto verdict = [&](toy::Token token) { return token == riddle.place ? std::string("right") : fmt::format("wrong: {}", word(token)); };
    fmt::print("{:26} {:10} {:18} {}\n", toy::text_of(riddle.question()), word(riddle.place), verdict(by_full), verdict(said));
    if (by_full == riddle.place) ++right_by_full;
    if (said == riddle.place) ++right;
    if (!last) continue;
    prompt.insert(prompt.end(), {toy::token_of("in"), toy::token_of("the"), said});
    for (int more = 0; more < 40; ++more) {
      Index next;
      model.forward(prompt.back()).col(0).maxCoeff(&next);
      prompt.push_back(static_cast<toy::Token>(next));
    }
    prompt.pop_back();
    if (recorder)
      for (std::size_t i = 0; i < prompt.size(); ++i) recorder->add_text(tokenizer.decode(i == 0 ? toy::bos_token : prompt[i - 1], prompt[i]));
  }
  fmt::print("{:37} {:18} {}\n\n", "right", fmt::format("{} of {}", right_by_full, story.riddles.size()), fmt::format("{} of {}", right, story.riddles.size()));
  if (!options.quiet) fmt::print("{}\n", cache_summary(model, options));
  if (!options.quiet) print_memory(model);
  if (!options.quiet && options.show) print_held_positions(model);
  if (recorder) write_report(*recorder, model, options);
}

template <class T, class Tokenizer>
void score_text(toy::Transformer<T>& model, const Tokenizer& tokenizer, const toy::Options& options) {
  const std::string text = toy::read_text(options.nll);
  const std::vector<std::string_view> documents = toy::split_documents(text);
  if (documents.empty() || model.config().seq_len < 2) throw toy::UsageError(options.nll + ": no text to score");

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

template <class T, class Tokenizer>
void run(std::shared_ptr<const toy::Weights> weights, const Tokenizer& tokenizer, const toy::Options& options) {
  if (options.model.empty() && !options.prompt && options.nll.empty()) return tell_story<T>(weights, options);
  toy::Transformer<T> model(std::move(weights), options.policy, options.budget);
  if (options.nll.empty()) generate(model, tokenizer, options);
  else score_text(model, tokenizer, options);
}

template <class Tokenizer>
void run(const std::shared_ptr<const toy::Weights>& weights, const Tokenizer& tokenizer, const toy::Options& options) {
  if (tokenizer.size() != weights->config.vocab_size)
    throw toy::UsageError(fmt::format("{} has {} tokens, the model {}", options.tokenizer, tokenizer.size(), weights->config.vocab_size));
  if (options.type == "half") run<Eigen::half>(weights, tokenizer, options);
  else if (options.type == "bfloat16") run<Eigen::bfloat16>(weights, tokenizer, options);
  else run<float>(weights, tokenizer, options);
}

void run(const toy::Options& options) {
  if (options.model.empty()) run(toy::load_checkpoint(KVSNIP_TOY_WORLD), toy::WordTokenizer{}, options);
  else run(toy::load_checkpoint(options.model), toy::Tokenizer::load(options.tokenizer), options);
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
