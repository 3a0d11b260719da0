// The demo's command line.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <locale>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

#include "weights.hpp"

namespace toy {

/// Something the user can mend; one line.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string model;                  ///< empty: the built-in one
  std::string tokenizer;
  std::optional<std::string> prompt;  ///< none: the model starts from BOS
  Index steps = 256;
  std::optional<double> temperature;  ///< none: 0 with a model, 1 with the built-in one
  std::uint64_t seed = 1;
  std::string policy = "scissorhands";
  Index budget = 64;
  std::string type = "float";         ///< or half, bfloat16: what keys and values are stored as
  std::string nll;                    ///< a text to score instead of generating
  std::string report;                 ///< a page of pictures to write
  bool show = false, quiet = false, ignore_eos = false, list_policies = false, help = false;
};

inline constexpr std::string_view usage =
    R"(toy_transformer: a Llama-style model that generates text from a compressed KV cache

  --model FILE        llama2.c fp32 checkpoint; without one, a small built-in model with random weights
  --tokenizer FILE    its llama2.c tokenizer
  --prompt TEXT       what the text begins with
  --steps N           length of the text in tokens, prompt included (256)
  --temperature X     0: always the likeliest token (default; 1 with the built-in model)
  --seed N            of the draws when the temperature is not 0 (1)
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

namespace detail {

inline std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

template <class Integer>
Integer parse_integer(std::string_view flag, std::string_view text, Integer least, Integer greatest) {
  Integer value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc::invalid_argument || end != text.data() + text.size())
    throw UsageError(std::string(flag) + ": " + quoted(text) + " is not a whole number");
  if (error != std::errc{} || value < least || value > greatest)
    throw UsageError(std::string(flag) + ": " + std::string(text) + " is not in " + std::to_string(least) + " to " +
                     std::to_string(greatest));
  return value;
}

inline double parse_temperature(std::string_view flag, std::string_view text) {
  std::istringstream stream{std::string(text)};  // std::from_chars for double is missing from some standard libraries
  stream.imbue(std::locale::classic());
  double value = 0;
  if (!(stream >> std::noskipws >> value) || stream.peek() != std::istringstream::traits_type::eof())
    throw UsageError(std::string(flag) + ": " + quoted(text) + " is not a number");
  if (!(value >= 0 && value <= 100))
    throw UsageError(std::string(flag) + ": " + std::string(text) + " is not in 0 to 100");
  return value;
}

inline std::string parse_type(std::string_view flag, std::string_view text) {
  if (text != "float" && text != "half" && text != "bfloat16")
    throw UsageError(std::string(flag) + ": " + quoted(text) + " is none of float, half, bfloat16");
  return std::string(text);
}

}  // namespace detail

/// @param arguments  without the program's name; values as "--flag value" or "--flag=value". Throws UsageError.
inline Options parse_options(std::span<const char* const> arguments) {
  constexpr Index most = std::numeric_limits<std::int32_t>::max();
  Options options;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    const std::size_t equals = argument.starts_with("--") ? argument.find('=') : std::string_view::npos;
    const std::string_view flag = argument.substr(0, equals);
    const auto is_switch = [&](std::string_view name) {
      if (flag != name) return false;
      if (equals != std::string_view::npos) throw UsageError(std::string(flag) + " takes no value");
      return true;
    };
    const auto value = [&]() -> std::string_view {
      if (equals != std::string_view::npos) return argument.substr(equals + 1);
      if (i + 1 == arguments.size()) throw UsageError(std::string(flag) + " needs a value");
      return arguments[++i];
    };

    if (is_switch("--help")) options.help = true;
    else if (is_switch("--list-policies")) options.list_policies = true;
    else if (is_switch("--show")) options.show = true;
    else if (is_switch("--quiet")) options.quiet = true;
    else if (is_switch("--ignore-eos")) options.ignore_eos = true;
    else if (flag == "--model") options.model = value();
    else if (flag == "--tokenizer") options.tokenizer = value();
    else if (flag == "--prompt") options.prompt = value();
    else if (flag == "--policy") options.policy = value();
    else if (flag == "--nll") options.nll = value();
    else if (flag == "--report") options.report = value();
    else if (flag == "--steps") options.steps = detail::parse_integer<Index>(flag, value(), 1, most);
    else if (flag == "--budget") options.budget = detail::parse_integer<Index>(flag, value(), 1, most);
    else if (flag == "--seed")
      options.seed = detail::parse_integer<std::uint64_t>(flag, value(), 0, std::numeric_limits<std::uint64_t>::max());
    else if (flag == "--temperature") options.temperature = detail::parse_temperature(flag, value());
    else if (flag == "--type") options.type = detail::parse_type(flag, value());
    else throw UsageError("unknown argument " + detail::quoted(argument) + ", see --help");
  }
  if (options.model.empty() != options.tokenizer.empty()) throw UsageError("--model and --tokenizer go together");
  if (!options.nll.empty() && !options.report.empty()) throw UsageError("--report goes with a text that is generated, not with --nll");
  return options;
}

}  // namespace toy
