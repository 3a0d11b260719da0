// What the toy world's model learns from, in which order.
//
// Retrieval is not learned from questions alone in reasonable time: the model finds that answers are places that were
// mentioned, and stays there. A drill of repeated random words teaches it to find what followed a word last time; of the
// repeated words 30 % are "the" or "in", so that it has to look two and three words back, as "in the ___" needs.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "backprop.hpp"
#include "world.hpp"

namespace toy {

struct Stage {
  DocumentOptions documents;
  double drill_share = 0;     ///< of the documents
  Index sequences = 0;        ///< a step
  double passed_at = 0.9;     ///< running accuracy that ends the stage
  Index last_steps = 0;       ///< > 0: the stage ends after so many instead, while the rate falls to (almost) zero
};

/// Documents of growing length; the share of delayed questions makes the distances long.
inline const std::vector<Stage>& toy_world_stages() {
  static const std::vector<Stage> stages{
      {.documents = {.length = 43}, .drill_share = 1, .sequences = 24, .passed_at = 0.8},
      {.documents = {.length = 80, .max_facts = 5, .early = 0.4, .question_share = 0.8, .delayed = 0}, .drill_share = 0.3, .sequences = 16},
      {.documents = {.length = 128, .max_facts = 6, .early = 0.6, .question_share = 0.6, .delayed = 0.3}, .sequences = 16},
      {.documents = {.length = 256, .early = 0.8, .question_share = 0.5, .delayed = 0.5}, .sequences = 8},
      {.documents = {.length = 512, .early = 0.8, .question_share = 0.4, .delayed = 0.5}, .sequences = 8, .last_steps = 200}};
  return stages;
}

/// A sequence, and which of its tokens are answers and which of those are examined.
struct Lesson {
  std::vector<Token> tokens;
  std::vector<bool> answer, counts;  ///< (tokens)
};

/// Random words, among them distinct ones said twice in a row. The second time counts, from its second word on.
inline Lesson make_drill(Index length, std::mt19937_64 bits) {
  const auto word = [&] {
    Token token = static_cast<Token>(below(all_words.size - 1, bits));
    return token + (token >= bos_token ? 1 : 0);  // any but BOS
  };
  const Index most = std::min<Index>((length - 1) / 2, all_words.size - 1), segment = 8 + below(std::max<Index>(most - 8, 0) + 1, bits);
  std::vector<Token> said(static_cast<std::size_t>(all_words.size));
  for (std::size_t i = 0; i < said.size(); ++i) said[i] = static_cast<Token>(i);
  std::erase(said, bos_token);
  for (std::size_t i = 0; i < static_cast<std::size_t>(segment); ++i)  // the first of a shuffle
    std::swap(said[i], said[i + static_cast<std::size_t>(below(std::ssize(said) - static_cast<Index>(i), bits))]);
  said.resize(static_cast<std::size_t>(segment));
  for (Token& token : said)
    if (uniform(bits) < 0.3) token = uniform(bits) < 0.5 ? token_of("the") : token_of("in");

  Lesson lesson{.tokens = {bos_token}, .answer = {}, .counts = {}};
  const Index before = below(std::max<Index>(length - 1 - 2 * segment, 0) + 1, bits);
  while (std::ssize(lesson.tokens) < 1 + before) lesson.tokens.push_back(word());
  for (int time = 0; time < 2; ++time) lesson.tokens.insert(lesson.tokens.end(), said.begin(), said.end());
  while (std::ssize(lesson.tokens) < length) lesson.tokens.push_back(word());
  lesson.tokens.resize(static_cast<std::size_t>(length));
  lesson.answer.resize(lesson.tokens.size());
  for (Index t = before + segment + 2; t < std::min(length, 1 + before + 2 * segment); ++t) lesson.answer[static_cast<std::size_t>(t)] = true;
  lesson.counts = lesson.answer;
  return lesson;
}

/// Answers are "in" and the place ("the" between them always follows "in"); the place counts.
inline Lesson make_reading(const Document& document) {
  Lesson lesson{.tokens = document.tokens, .answer = std::vector<bool>(document.tokens.size()), .counts = {}};
  lesson.counts = lesson.answer;
  for (const Question& question : document.questions) {
    lesson.answer[static_cast<std::size_t>(question.answer)] = lesson.answer[static_cast<std::size_t>(question.place())] = true;
    lesson.counts[static_cast<std::size_t>(question.place())] = true;
  }
  return lesson;
}

/// Loss: the mean over answers, and a tenth of the mean over all other words.
inline Batch make_batch(std::span<const Lesson> lessons) {
  Batch batch{.length = std::ssize(lessons.front().tokens), .tokens = {}, .weight = {}, .counts = {}};
  std::vector<bool> answer;
  for (const Lesson& lesson : lessons) {
    batch.tokens.insert(batch.tokens.end(), lesson.tokens.begin(), lesson.tokens.end());
    batch.counts.insert(batch.counts.end(), lesson.counts.begin(), lesson.counts.end());
    answer.insert(answer.end(), lesson.answer.begin(), lesson.answer.end());
  }
  const Index answers = std::count(answer.begin(), answer.end(), true), others = std::ssize(answer) - answers - std::ssize(lessons);
  for (std::size_t t = 0; t < answer.size(); ++t)
    batch.weight.push_back(static_cast<Index>(t) % batch.length == 0 ? 0.0f : answer[t] ? 1.0f / static_cast<float>(answers) : 0.1f / static_cast<float>(others));
  return batch;
}

/// The `step`-th batch of a stage.
inline Batch make_batch(const Stage& stage, std::uint64_t seed, Index step) {
  std::vector<Lesson> lessons;
  for (Index i = 0; i < stage.sequences; ++i) {
    std::mt19937_64 bits = random_bits(seed, static_cast<std::uint64_t>(step << 16 | i));
    if (uniform(bits) < stage.drill_share) lessons.push_back(make_drill(stage.documents.length, bits));
    else lessons.push_back(make_reading(make_document(stage.documents, bits)));
  }
  return make_batch(lessons);
}

}  // namespace toy
