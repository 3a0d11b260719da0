// How well a model foretells a text: the mean negative log-likelihood of its tokens, in nats.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string_view>
#include <vector>

#include "transformer.hpp"

namespace toy {

/// The documents of a text: what stands between lines that are exactly <|endoftext|>, without the newlines around it.
/// Empty ones are left out.
inline std::vector<std::string_view> split_documents(std::string_view text) {
  std::vector<std::string_view> documents;
  const auto add = [&documents](std::string_view document) {
    const std::size_t first = document.find_first_not_of('\n');
    if (first == std::string_view::npos) return;
    documents.push_back(document.substr(first, document.find_last_not_of('\n') + 1 - first));
  };
  std::size_t document = 0;
  for (std::size_t line = 0; line < text.size();) {
    const std::size_t end = std::min(text.find('\n', line), text.size());
    const std::size_t next = std::min(end + 1, text.size());
    if (text.substr(line, end - line) == "<|endoftext|>") {
      add(text.substr(document, line - document));
      document = next;
    }
    line = next;
  }
  add(text.substr(document));
  return documents;
}

/// -log p(token), the softmax in double. @param logits  (vocab_size)
inline double negative_log_likelihood(const Eigen::Ref<const Eigen::VectorXf>& logits, Token token) {
  const double greatest = logits.maxCoeff();
  double sum = 0;
  for (Index i = 0; i < logits.size(); ++i) sum += std::exp(logits[i] - greatest);
  return std::log(sum) + greatest - logits[token];
}

/// Of every token but the first, given those before it, fed one by one to a reset model.
/// @param tokens  (tokens), BOS first
/// @return (tokens - 1)
template <class T>
std::vector<double> token_nlls(Transformer<T>& model, std::span<const Token> tokens) {
  std::vector<double> nlls;
  model.reset();
  for (std::size_t i = 0; i + 1 < tokens.size(); ++i)
    nlls.push_back(negative_log_likelihood(model.forward(tokens[i]).col(0), tokens[i + 1]));
  return nlls;
}

struct TextNll {
  double sum = 0;
  Index tokens = 0;  ///< predicted
  double mean() const { return sum / static_cast<double>(tokens); }
};

/// Over all documents, each as tokenizer.encode() gives it: with BOS in front, no end token, and cut at seq_len tokens, BOS included.
/// @param on_document  called with the index of each document before it is read
template <class T, class Tokenizer, class OnDocument>
TextNll text_nll(Transformer<T>& model, const Tokenizer& tokenizer, std::span<const std::string_view> documents,
                 OnDocument&& on_document) {
  TextNll text;
  for (std::size_t i = 0; i < documents.size(); ++i) {
    on_document(i);
    std::vector<Token> tokens = tokenizer.encode(documents[i]);
    tokens.resize(std::min(tokens.size(), static_cast<std::size_t>(model.config().seq_len)));
    for (const double nll : token_nlls(model, tokens)) text.sum += nll, ++text.tokens;
  }
  return text;
}

}  // namespace toy
