// llama2.c tokenizers (SentencePiece with byte fallback): text to tokens and back.
//
// File: int32 longest token, then per token float32 score, int32 length, bytes. Tokens 0 to 2 are unknown, BOS and EOS,
// 3 to 258 the bytes <0x00> to <0xFF>.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <map>
#include <queue>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "binary_file.hpp"
#include "weights.hpp"

namespace toy {

inline constexpr Token first_byte_token = 3;  ///< <0x00>; the other 255 follow

class Tokenizer {
 public:
  /// Throws std::runtime_error with one line if the file is not a tokenizer.
  static Tokenizer load(const std::filesystem::path& path) {
    BinaryFile file(path);
    const auto not_one = [&file](const std::string& reason) { file.fail("not a llama2.c tokenizer: " + reason); };
    constexpr Index header_bytes = sizeof(std::int32_t), entry_bytes = sizeof(float) + sizeof(std::int32_t);
    if (file.remaining() < header_bytes) not_one("shorter than its header of 4 bytes");
    const Index longest = file.read<std::int32_t>();
    if (longest < 1 || longest > max_token_bytes) not_one("longest token of " + std::to_string(longest) + " bytes");

    Tokenizer tokenizer;
    while (file.remaining() > 0) {
      const std::string which = "token " + std::to_string(tokenizer.size());
      if (file.remaining() < entry_bytes) not_one(which + " is cut short");
      const float score = file.read<float>();
      const Index length = file.read<std::int32_t>();
      if (!std::isfinite(score)) not_one(which + " has a score that is not finite");
      if (length < 0 || length > longest) not_one(which + " has length " + std::to_string(length));
      if (length > file.remaining()) not_one(which + " is cut short");
      std::string text(static_cast<std::size_t>(length), '\0');
      file.read(text);
      tokenizer.add(std::move(text), score);
    }
    for (int byte = 0; byte < 256; ++byte) {
      const std::size_t token = static_cast<std::size_t>(first_byte_token + byte);
      if (token >= tokenizer.texts_.size() || tokenizer.texts_[token] != byte_name(byte))
        not_one("token " + std::to_string(token) + " is not " + byte_name(byte));
    }
    return tokenizer;
  }

  Index size() const { return static_cast<Index>(texts_.size()); }

  /// BOS, then the tokens of `text`, any bytes: whole characters the vocabulary has, else single bytes; then, again and
  /// again, the neighbours whose union has the best score become one token (equal scores: the leftmost).
  std::vector<Token> encode(std::string_view text) const {
    std::vector<Token> tokens = characters(text);
    merge(tokens);
    tokens.insert(tokens.begin(), bos_token);
    return tokens;
  }

  /// The bytes of `token`. The space that encode() puts before the first word is dropped after BOS.
  std::string decode(Token previous, Token token) const {
    const std::string& text = texts_.at(static_cast<std::size_t>(token));
    if (token >= first_byte_token && token < first_byte_token + 256)
      return std::string(1, static_cast<char>(token - first_byte_token));
    return previous == bos_token && text.starts_with(' ') ? text.substr(1) : text;
  }

 private:
  static constexpr Index max_token_bytes = 1 << 16;
  static constexpr Token none = -1;

  Tokenizer() = default;

  static std::string byte_name(int byte) {
    constexpr std::string_view digits = "0123456789ABCDEF";
    return {'<', '0', 'x', digits[static_cast<std::size_t>(byte / 16)], digits[static_cast<std::size_t>(byte % 16)],
            '>'};
  }

  void add(std::string text, float score) {
    token_of_.emplace(text, static_cast<Token>(texts_.size()));  // of two alike the first counts
    texts_.push_back(std::move(text));
    scores_.push_back(score);
  }

  Token find(std::string_view text) const {
    const auto found = token_of_.find(text);
    return found == token_of_.end() ? none : found->second;
  }

  std::vector<Token> characters(std::string_view text) const {
    std::vector<Token> tokens;
    if (text.empty()) return tokens;
    if (const Token space = find(" "); space != none) tokens.push_back(space);  // words are learned with a space before
    const auto continues = [&text](std::size_t i) { return (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80; };
    for (std::size_t begin = 0, end; begin < text.size(); begin = end) {
      end = begin + 1;
      while (end < text.size() && continues(end)) ++end;
      if (const Token whole = find(text.substr(begin, end - begin)); whole != none) {
        tokens.push_back(whole);
      } else {
        for (std::size_t i = begin; i < end; ++i)
          tokens.push_back(first_byte_token + static_cast<unsigned char>(text[i]));
      }
    }
    return tokens;
  }

  /// Two neighbours that could become `merged`. Stale, and skipped, once either has been merged otherwise.
  struct Pair {
    float score;
    std::size_t left, right;
    Token left_token, right_token, merged;

    friend bool operator<(const Pair& a, const Pair& b) {  // std::priority_queue's top is the greatest
      return a.score != b.score ? a.score < b.score : a.left > b.left;
    }
  };

  /// A queue of pairs over a linked list: n log n, where a scan for the best pair would be n^2 on a whole book.
  void merge(std::vector<Token>& tokens) const {
    const std::size_t n = tokens.size();
    std::vector<std::size_t> previous(n), next(n);  // n: no such neighbour
    for (std::size_t i = 0; i < n; ++i) previous[i] = i == 0 ? n : i - 1, next[i] = i + 1;

    std::priority_queue<Pair> pairs;
    std::string both;
    const auto offer = [&](std::size_t left, std::size_t right) {
      if (left == n || right == n) return;
      const auto text = [&](std::size_t i) -> const std::string& {
        return texts_[static_cast<std::size_t>(tokens[i])];
      };
      both.assign(text(left)).append(text(right));
      if (const Token merged = find(both); merged != none)
        pairs.push({scores_[static_cast<std::size_t>(merged)], left, right, tokens[left], tokens[right], merged});
    };
    for (std::size_t i = 0; i + 1 < n; ++i) offer(i, i + 1);

    while (!pairs.empty()) {
      const Pair best = pairs.top();
      pairs.pop();
      if (tokens[best.left] != best.left_token || tokens[best.right] != best.right_token ||
          next[best.left] != best.right)
        continue;
      tokens[best.left] = best.merged;
      tokens[best.right] = none;
      next[best.left] = next[best.right];
      if (next[best.left] != n) previous[next[best.left]] = best.left;
      offer(previous[best.left], best.left);
      offer(best.left, next[best.left]);
    }
    std::erase(tokens, none);
  }

  std::vector<std::string> texts_;  ///< (size) bytes by token
  std::vector<float> scores_;       ///< (size) the higher, the earlier it is merged
  std::map<std::string, Token, std::less<>> token_of_;
};

}  // namespace toy
