// The toy world's vocabulary, a word a token: text to tokens and back.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "weights.hpp"

namespace toy {

/// By kind; each kind is a range of tokens.
inline constexpr auto words = std::to_array<std::string_view>({
    ".", "<s>", "?", "the", "a", "where", "is", "in", "and", "met", "painted", "thinks", "of",
    "anna", "ben", "clara", "david", "emma", "frank", "grace", "henry", "iris", "jack", "kate", "leo",
    "lamp", "key", "book", "clock", "coat", "drum", "flute", "globe", "hat", "kettle", "letter", "map", "mirror", "ring", "vase", "violin",
    "attic", "barn", "cellar", "chapel", "garage", "garden", "hall", "kitchen", "library", "office", "pantry", "shed", "stable", "studio", "tower", "yard",
    "keeps", "put", "hid", "left", "placed", "stored",
    "saw", "wants", "likes", "bought", "sold", "drew", "needs", "found",
    "dog", "cat", "bird", "horse", "mouse", "fox",
    "sleeps", "waits", "sits", "plays", "rests",
    "sang", "danced", "talked", "laughed", "walked", "ate",
    "today", "quietly", "again", "together",
    "old", "hungry", "happy", "tired", "small", "loud", "new", "lost",
    "red", "blue", "green", "white"});

/// The token of a word; a word that is not there does not compile.
consteval Token token_of(std::string_view word) {
  for (std::size_t i = 0; i < words.size(); ++i)
    if (words[i] == word) return static_cast<Token>(i);
  throw "no such word";
}

/// Tokens first .. first + size - 1.
struct WordKind {
  Token first, size;
  constexpr bool has(Token token) const { return token >= first && token < first + size; }
};
inline constexpr WordKind all_words{0, static_cast<Token>(words.size())}, names{token_of("anna"), 12}, objects{token_of("lamp"), 16},
    places{token_of("attic"), 16}, fact_verbs{token_of("keeps"), 6}, verbs{token_of("saw"), 8}, animals{token_of("dog"), 6},
    rest_verbs{token_of("sleeps"), 5}, acts{token_of("sang"), 6}, adverbs{token_of("today"), 4}, adjectives{token_of("old"), 8}, colours{token_of("red"), 4};

/// What Tokenizer is for llama2.c's models: words between white space are the tokens, BOS comes first.
class WordTokenizer {
 public:
  Index size() const { return std::ssize(words); }

  /// @throws std::invalid_argument  a word that the world does not have
  std::vector<Token> encode(std::string_view text) const {
    std::vector<Token> tokens{bos_token};
    constexpr std::string_view space = " \t\r\n";
    for (std::size_t begin = text.find_first_not_of(space); begin != std::string_view::npos;) {
      const std::size_t end = std::min(text.find_first_of(space, begin), text.size());
      tokens.push_back(find(text.substr(begin, end - begin)));
      begin = text.find_first_not_of(space, end);
    }
    return tokens;
  }

  /// With the space between words; none after BOS.
  std::string decode(Token previous, Token token) const {
    std::string text(previous == bos_token ? "" : " ");
    return text.append(words.at(static_cast<std::size_t>(token)));
  }

 private:
  static Token find(std::string_view word) {
    for (std::size_t i = 0; i < words.size(); ++i)
      if (words[i] == word) return static_cast<Token>(i);
    throw std::invalid_argument("the toy world has no word '" + std::string(word) + "'; it knows sentences such as 'anna left the lamp in the attic .' and 'where is the lamp ?'");
  }
};

inline std::string text_of(std::span<const Token> tokens) {
  std::string text;
  for (const Token token : tokens) text.append(text.empty() ? "" : " ").append(words.at(static_cast<std::size_t>(token)));
  return text;
}

}  // namespace toy
