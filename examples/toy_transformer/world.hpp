// The toy world: a small language in which questions can be answered from what was said before, and nothing else.
//
//   fact       anna left the lamp in the attic .
//   question   where is the lamp ? in the attic .
//   the rest   ben saw a lamp .   the dog sleeps in the attic .   iris met kate in the hall .   leo and emma sang quietly .
//              the fox is hungry .   jack painted the horse red .   a key is lost .   kate thinks of the lamp .
//
// An answer stands once in the document (or, if it was asked for before, a few times): a cache that has lost those tokens
// cannot know it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "random.hpp"
#include "words.hpp"

namespace toy {

/// A question, by positions in its document.
struct Question {
  Index where = 0;   ///< of "where", the question's first word
  Index answer = 0;  ///< of "in", the answer's first word; its third is the place
  Index stated = 0;  ///< of the place in the last statement before: the fact, or an earlier answer
  bool first = true; ///< the fact had not been asked for before

  Index place() const { return answer + 2; }
  Index distance() const { return place() - stated; }
};

struct Document {
  std::vector<Token> tokens;  ///< BOS first
  std::vector<Question> questions;
};

struct DocumentOptions {
  Index length = 512;                  ///< [tokens]; the last sentence is cut
  Index min_facts = 3, max_facts = 8;  ///< each about an object of its own
  double early = 0.8;                  ///< facts come within this share of the document
  double question_share = 0.4;         ///< probability that a sentence is a question, if one can be asked
  double delayed = 0.5;                ///< probability that a fact is only asked for from a moment uniform in the rest
  bool once = false;                   ///< ask for no fact twice
};

/// Writes sentence after sentence.
class Writer {
 public:
  struct Fact {
    Token object = 0, place = 0;
    Index due = 0;       ///< position from which it is stated
    Index askable = 0;   ///< position from which it is asked for
    Index stated = -1;   ///< position of its place when last said, -1: not yet
    Index asked = 0;     ///< times
  };

  explicit Writer(std::mt19937_64 bits) : bits_(std::move(bits)) { document_.tokens.push_back(bos_token); }

  Index size() const { return std::ssize(document_.tokens); }
  double uniform() { return toy::uniform(bits_); }
  Index below(Index n) { return toy::below(n, bits_); }
  /// Uniform in [from, to].
  Index between(Index from, Index to) { return from + below(std::max<Index>(to - from, 0) + 1); }

  /// Facts of which no two share an object; when and what they are asked for is the caller's.
  std::vector<Fact> invent(Index number) {
    std::vector<Fact> facts;
    while (std::ssize(facts) < number) {
      const Fact fact{.object = any(objects), .place = any(places)};
      if (std::none_of(facts.begin(), facts.end(), [&](const Fact& f) { return f.object == fact.object; })) facts.push_back(fact);
    }
    return facts;
  }
  void state(Fact& fact) {
    say({any(names), any(fact_verbs), the, fact.object, in, the, fact.place, full_stop});
    fact.stated = size() - 2;
  }
  void ask(Fact& fact) {
    const Index where = size();
    say({token_of("where"), token_of("is"), the, fact.object, token_of("?"), in, the, fact.place, full_stop});
    document_.questions.push_back({.where = where, .answer = where + 5, .stated = fact.stated, .first = fact.asked++ == 0});
    fact.stated = size() - 2;
  }
  void say_anything() {
    constexpr Token a = token_of("a"), is = token_of("is"), and_ = token_of("and");
    switch (below(8)) {
      case 0: return say({any(names), any(verbs), a, any(objects), full_stop});
      case 1: return say({the, any(animals), any(rest_verbs), in, the, any(places), full_stop});
      case 2: return say({any(names), token_of("met"), any(names), in, the, any(places), full_stop});
      case 3: return say({any(names), and_, any(names), any(acts), any(adverbs), full_stop});
      case 4: return say({the, any(animals), is, any(adjectives), full_stop});
      case 5: return say({any(names), token_of("painted"), the, any(animals), any(colours), full_stop});
      case 6: return say({a, any(objects), is, any(adjectives), full_stop});
      default: return say({any(names), token_of("thinks"), token_of("of"), the, any(objects), full_stop});
    }
  }

  /// Questions whose answer the cut goes through are dropped.
  Document finish(Index length) {
    document_.tokens.resize(static_cast<std::size_t>(std::min(length, size())));
    std::erase_if(document_.questions, [&](const Question& q) { return q.place() >= size(); });
    return std::move(document_);
  }

 private:
  static constexpr Token the = token_of("the"), in = token_of("in"), full_stop = token_of(".");

  Token any(WordKind kind) { return kind.first + static_cast<Token>(below(kind.size)); }
  /// The arguments are braced, so they are drawn from left to right.
  void say(std::initializer_list<Token> sentence) { document_.tokens.insert(document_.tokens.end(), sentence); }

  std::mt19937_64 bits_;
  Document document_;
};

namespace detail {

/// States what is due, asks what can be asked, else says anything, until the document has `length` tokens.
inline void write_until(Writer& writer, std::vector<Writer::Fact>& facts, Index length, double question_share, bool once) {
  std::vector<Writer::Fact*> can_ask;
  while (writer.size() < length) {
    const auto due = std::find_if(facts.begin(), facts.end(), [&](const Writer::Fact& f) { return f.stated < 0 && f.due <= writer.size(); });
    if (due != facts.end()) {
      writer.state(*due);
      continue;
    }
    can_ask.clear();
    for (Writer::Fact& f : facts)
      if (f.stated >= 0 && f.askable <= writer.size() && !(once && f.asked > 0)) can_ask.push_back(&f);
    if (can_ask.empty() || writer.uniform() >= question_share) {
      writer.say_anything();
      continue;
    }
    if (writer.uniform() < 0.5) {  // half of the questions are about what was asked for least
      const Index least = (*std::min_element(can_ask.begin(), can_ask.end(), [](auto* a, auto* b) { return a->asked < b->asked; }))->asked;
      std::erase_if(can_ask, [&](const Writer::Fact* f) { return f->asked > least; });
    }
    writer.ask(*can_ask[static_cast<std::size_t>(writer.below(std::ssize(can_ask)))]);
  }
}

}  // namespace detail

/// What the model is trained on.
inline Document make_document(const DocumentOptions& options, std::mt19937_64 bits) {
  Writer writer(std::move(bits));
  std::vector<Writer::Fact> facts = writer.invent(writer.between(options.min_facts, options.max_facts));
  const Index latest = static_cast<Index>(options.early * static_cast<double>(options.length));
  for (Writer::Fact& fact : facts) {
    fact.due = &fact == facts.data() ? 0 : writer.below(std::max<Index>(latest, 1));
    if (writer.uniform() < options.delayed) fact.askable = writer.between(fact.due, options.length);
  }
  detail::write_until(writer, facts, options.length, options.question_share, options.once);
  return writer.finish(options.length);
}

/// Numbers of sequences of random_bits() that no training draws from.
inline constexpr std::uint64_t held_out = std::uint64_t{1} << 63;

/// What training is examined on: all 512 tokens long, each fact asked for once and late. Number 0, 1, ...
inline Document held_out_document(std::uint64_t seed, std::uint64_t number, Index length = 512) {
  return make_document({.length = length, .delayed = 1, .once = true}, random_bits(seed, held_out | number));
}

/// When the last question is asked, and so what a policy can know while it compresses.
enum class Setting {
  asked_at_the_end,         ///< the question, for a fact never asked for before, closes the prompt
  asked_again_and_again,    ///< half the document is prompt, the rest is read token by token; facts are asked for throughout, and the last
                            ///< question is for one that was asked for before, but not in the last quarter of the document
  asked_after_compression,  ///< the document is the prompt; then comes the question, for a fact never asked for before
};

/// A document that ends in a question: read the prompt in one pass, then the continuation token by token, then expect
/// the answer.
struct Trial {
  Document document;        ///< its last question is the one that counts; up to the place of its answer
  Index prompt_tokens = 0;

  const Question& question() const { return document.questions.back(); }
  std::span<const Token> prompt() const { return std::span(document.tokens).first(static_cast<std::size_t>(prompt_tokens)); }
  /// From behind the prompt to the "?".
  std::span<const Token> continuation() const {
    return std::span(document.tokens).subspan(static_cast<std::size_t>(prompt_tokens), static_cast<std::size_t>(question().answer - prompt_tokens));
  }
  /// "in the PLACE"
  std::span<const Token> answer() const { return std::span(document.tokens).subspan(static_cast<std::size_t>(question().answer), 3); }
};

/// @param length  of the document, question and answer included: 4 to 8 facts fit from about 128 on [tokens]
inline Trial make_trial(Setting setting, std::uint64_t seed, std::uint64_t number, Index length = 512) {
  Writer writer(random_bits(~seed, held_out | number));
  const bool again = setting == Setting::asked_again_and_again;
  std::vector<Writer::Fact> facts = writer.invent(writer.between(4, 8));
  const Index body = length - 8;  // where is the lamp ? in the attic
  const std::size_t last = static_cast<std::size_t>(writer.below(std::ssize(facts)));
  for (Writer::Fact& fact : facts) {
    // The last question's fact among those that are asked again: stated and asked for early enough to be asked for twice.
    const double early = again && &fact == &facts[last] ? 0.3 : 0.8;
    fact.due = &fact == facts.data() ? 0 : writer.below(static_cast<Index>(early * static_cast<double>(body)));
    fact.askable = again ? 0 : &fact == &facts[last] ? length : writer.between(fact.due, body);
  }
  if (again) {
    const Index quiet = length - length / 4;
    detail::write_until(writer, facts, quiet, 0.5, false);
    facts[last].askable = length;
    if (facts[last].asked == 0) writer.ask(facts[last]);
    detail::write_until(writer, facts, body - 8, 0.5, false);
  } else {
    detail::write_until(writer, facts, body - 8, 0.4, true);
  }
  for (Writer::Fact& fact : facts)
    if (fact.stated < 0) writer.state(fact);
  writer.ask(facts[last]);
  const Index to_place = writer.size() - 1;
  Trial trial{.document = writer.finish(to_place)};
  const Question& question = trial.question();
  trial.prompt_tokens = setting == Setting::asked_at_the_end ? question.answer : again ? length / 2 : question.where;
  return trial;
}

}  // namespace toy
