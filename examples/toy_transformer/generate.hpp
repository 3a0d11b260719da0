// A prompt in one pass, then token by token.
#pragma once

#include <algorithm>
#include <chrono>
#include <span>

#include "sampler.hpp"
#include "transformer.hpp"

namespace toy {

struct GenerateOptions {
  Index steps = 256;        ///< length of the text, its prompt included, BOS not [tokens], >= 1
  bool ignore_eos = false;  ///< go on after the model has ended its text
};

struct GenerateTimes {
  Index prompt_tokens = 0, decoded_tokens = 0;  ///< tokens fed to the model
  double prompt_seconds = 0, decode_seconds = 0;
};

/// Feeds `prompt` (BOS first, at least that; cut to `steps` tokens) and continues it.
/// @param on_token  called with (previous, token) for every token of the text after BOS, the prompt's too
template <class T, class OnToken>
GenerateTimes generate(Transformer<T>& model, Sampler& sampler, std::span<const Token> prompt,
                       const GenerateOptions& options, OnToken&& on_token) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  GenerateTimes times;

  const Index length = static_cast<Index>(prompt.size());
  Index written = 0;
  for (; written < std::min(length - 1, options.steps); ++written)
    on_token(prompt[static_cast<std::size_t>(written)], prompt[static_cast<std::size_t>(written) + 1]);

  Clock::time_point start = Clock::now();
  times.prompt_tokens = std::min(length, options.steps);
  const Eigen::MatrixXf* logits = &model.forward(prompt.first(static_cast<std::size_t>(times.prompt_tokens)));
  times.prompt_seconds = seconds(start);

  start = Clock::now();
  Token previous = prompt.back();
  while (written < options.steps) {
    const Token token = sampler(logits->col(0));
    if (token == bos_token && !options.ignore_eos) break;
    on_token(previous, token);
    if (++written == options.steps) break;
    logits = &model.forward(token);
    ++times.decoded_tokens;
    previous = token;
  }
  times.decode_seconds = seconds(start);
  return times;
}

}  // namespace toy
