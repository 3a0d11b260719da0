// The toy world's questions put to a model.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transformer.hpp"
#include "world.hpp"

namespace toy {

/// Reads a prompt in one pass and the rest token by token, then "in the", and says which word the model finds likeliest
/// next: the answer's place, if it knows. `model` is reset first.
template <class T>
Token ask(Transformer<T>& model, std::span<const Token> prompt, std::span<const Token> rest = {}) {
  model.reset();
  model.forward(prompt);
  for (const Token token : rest) model.forward(token);
  model.forward(token_of("in"));
  Index likeliest;
  model.forward(token_of("the")).col(0).maxCoeff(&likeliest);
  return static_cast<Token>(likeliest);
}

/// A story, then what can be asked about it.
struct Story {
  std::vector<Token> tokens;  ///< BOS first; no question among them
  struct Riddle {
    Token object, place;
    std::vector<Token> question() const { return {token_of("where"), token_of("is"), token_of("the"), object, token_of("?")}; }
  };
  std::vector<Riddle> riddles;  ///< in the order in which the facts are told
};

inline constexpr Index shortest_story = 96;

/// @param length  [tokens], >= shortest_story
inline Story make_story(std::uint64_t seed, Index length) {
  Writer writer(random_bits(seed, held_out));
  std::vector<Writer::Fact> facts = writer.invent(8);
  for (Writer::Fact& fact : facts) fact.due = writer.below(length - 72);
  detail::write_until(writer, facts, length - 8, 0, true);
  std::sort(facts.begin(), facts.end(), [](const auto& a, const auto& b) { return a.stated < b.stated; });
  Story story{.tokens = writer.finish(length).tokens, .riddles = {}};
  for (const Writer::Fact& fact : facts) story.riddles.push_back({fact.object, fact.place});
  return story;
}

/// Lines of at most `width` columns, broken at spaces.
inline std::string wrapped(std::string_view text, std::size_t width) {
  std::string out;
  while (text.size() > width) {
    const std::size_t space = text.rfind(' ', width);
    const std::size_t end = space == std::string_view::npos || space == 0 ? width : space;
    out.append(text.substr(0, end)) += '\n';
    text.remove_prefix(space == end ? end + 1 : end);
  }
  return out.append(text);
}

}  // namespace toy
