// The demo's command line.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "arguments.hpp"
#include "weights.hpp"

namespace toy {

struct Options {
  std::string model;                  ///< empty: the built-in one
  std::string tokenizer;
  std::optional<std::string> prompt;  ///< none: a model starts from BOS, the built-in one reads a story
  Index steps = 256;
  double temperature = 0;
  std::uint64_t seed = 1;
  std::string policy = "scissorhands";
  Index budget = 64;
  std::string type = "float";         ///< or half, bfloat16: what keys and values are stored as
  std::string nll;                    ///< a text to score instead of generating
  std::string report;                 ///< a page of pictures to write
  bool show = false, quiet = false, ignore_eos = false, list_policies = false, help = false;
};

inline constexpr std::string_view usage =
    R"(toy_transformer: a Llama-style model that reads and writes with a compressed KV cache

Without --model the built-in model reads a little story that asks where things were left, once with a full cache and once
with the policy and the budget, and answers.

  --model FILE        llama2.c fp32 checkpoint, generates text
  --tokenizer FILE    its llama2.c tokenizer
  --prompt TEXT       what the text begins with; lets the built-in model write too, in the words it knows
  --steps N           length of the text in tokens, prompt included (256)
  --temperature X     0: always the likeliest token (0)
  --seed N            of the story, and of the draws when the temperature is not 0 (1)
  --ignore-eos        go on after the model has ended its text
  --policy SPEC       full, streaming_llm(num_sinks=4), scissorhands(history_window=400),
                      snapkv+scissorhands, ... (scissorhands)
  --list-policies     every policy with its paper, what it needs, and its options' defaults
  --budget N          slots each kv_head of each layer may keep (64)
  --type T            what keys and values are stored as: float, half, bfloat16 (float)
  --show              draw which positions each kv_head still holds
  --report FILE.html  write a page of pictures: what each head keeps as the text grows, and what it attends to
  --quiet             print the text alone
  --nll FILE          instead of generating, the mean negative log-likelihood of a text, token by token; documents end
                      at lines <|endoftext|>, each is cut at the length the model was trained on
  --help
)";

/// @param arguments  without the program's name. Throws UsageError.
inline Options parse_options(std::span<const char* const> command_line) {
  constexpr Index most = std::numeric_limits<std::int32_t>::max();
  Options options;
  Arguments arguments(command_line);
  while (arguments.next()) {
    if (arguments.is_switch("--help")) options.help = true;
    else if (arguments.is_switch("--list-policies")) options.list_policies = true;
    else if (arguments.is_switch("--show")) options.show = true;
    else if (arguments.is_switch("--quiet")) options.quiet = true;
    else if (arguments.is_switch("--ignore-eos")) options.ignore_eos = true;
    else if (arguments.is("--model")) options.model = arguments.text();
    else if (arguments.is("--tokenizer")) options.tokenizer = arguments.text();
    else if (arguments.is("--prompt")) options.prompt = arguments.text();
    else if (arguments.is("--policy")) options.policy = arguments.text();
    else if (arguments.is("--nll")) options.nll = arguments.text();
    else if (arguments.is("--report")) options.report = arguments.text();
    else if (arguments.is("--steps")) options.steps = arguments.integer<Index>(1, most);
    else if (arguments.is("--budget")) options.budget = arguments.integer<Index>(1, most);
    else if (arguments.is("--seed")) options.seed = arguments.integer<std::uint64_t>(0);
    else if (arguments.is("--temperature")) options.temperature = arguments.number(0, 100);
    else if (arguments.is("--type")) options.type = arguments.choice({"float", "half", "bfloat16"});
    else arguments.unknown();
  }
  if (options.model.empty() != options.tokenizer.empty()) throw UsageError("--model and --tokenizer go together");
  if (!options.nll.empty() && !options.report.empty()) throw UsageError("--report goes with a text that is generated, not with --nll");
  return options;
}

}  // namespace toy
