// The toy world's documents, trials and words.

#include <toy_transformer/curriculum.hpp>
#include <toy_transformer/story.hpp>
#include <toy_transformer/world.hpp>

#include "support/catch.hpp"
#include "support/thrown.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

using toy::Document;
using toy::Index;
using toy::Question;
using toy::Setting;
using toy::Token;
using toy::token_of;

Token at(const Document& document, Index position) { return document.tokens.at(static_cast<std::size_t>(position)); }

/// Where `object`'s place was said before `end`, by facts and by answers, found in the text alone.
std::vector<Index> statements(const Document& document, Token object, Index end) {
  std::vector<Index> found;
  for (Index t = 1; t + 4 < end; ++t) {
    const bool fact = toy::fact_verbs.has(at(document, t - 1)) && at(document, t) == token_of("the") && at(document, t + 1) == object &&
                      at(document, t + 2) == token_of("in");
    const bool answer = at(document, t - 1) == token_of("is") && at(document, t + 1) == object && at(document, t + 2) == token_of("?");
    if (fact) found.push_back(t + 4);
    if (answer && t + 5 < end) found.push_back(t + 5);
  }
  return found;
}

/// What holds for every question: its form, and that the place was said before, last where the question says, and always the same.
void check_question(const Document& document, const Question& question) {
  CHECK(at(document, question.where) == token_of("where"));
  CHECK(question.answer == question.where + 5);
  CHECK(at(document, question.answer - 1) == token_of("?"));
  CHECK(at(document, question.answer) == token_of("in"));
  CHECK(at(document, question.answer + 1) == token_of("the"));
  CHECK(toy::places.has(at(document, question.place())));
  const Token object = at(document, question.where + 3);
  CHECK(toy::objects.has(object));
  const std::vector<Index> said = statements(document, object, question.where);
  REQUIRE_FALSE(said.empty());
  CHECK(said.back() == question.stated);
  CHECK(question.first == (said.size() == 1));
  for (const Index position : said) CHECK(at(document, position) == at(document, question.place()));
}

TEST_CASE("Every question of a document can be answered from what was said before it") {
  for (std::uint64_t number = 0; number < 20; ++number) {
    const Document document = toy::make_document({.length = 200, .question_share = 0.6}, toy::random_bits(3, number));
    CHECK(document.tokens.size() == 200);
    CHECK(document.tokens.front() == toy::bos_token);
    CHECK(std::count(document.tokens.begin(), document.tokens.end(), toy::bos_token) == 1);
    CHECK_FALSE(document.questions.empty());
    for (const Question& question : document.questions) check_question(document, question);
  }
}

TEST_CASE("A held-out document asks for no fact twice, and is the same whenever it is made") {
  for (std::uint64_t number = 0; number < 20; ++number) {
    const Document document = toy::held_out_document(1, number);
    CHECK(document.tokens == toy::held_out_document(1, number).tokens);
    CHECK(document.tokens != toy::held_out_document(2, number).tokens);
    for (const Question& question : document.questions) {
      check_question(document, question);
      CHECK(question.first);
    }
  }
}

TEST_CASE("Each setting asks its last question when it says") {
  for (const Setting setting : {Setting::asked_at_the_end, Setting::asked_again_and_again, Setting::asked_after_compression}) {
    std::set<Index> lengths;
    for (std::uint64_t number = 0; number < 30; ++number) {
      const toy::Trial trial = toy::make_trial(setting, 1, number, 256);
      const Question& question = trial.question();
      const Index length = std::ssize(trial.document.tokens);
      for (const Question& each : trial.document.questions) check_question(trial.document, each);
      CHECK(question.place() == length - 1);
      CHECK(trial.answer()[2] == at(trial.document, length - 1));
      CHECK(length <= 256 + 8 * 8);  // late facts may add their sentences
      CHECK(length >= 256 - 16);
      CHECK(std::ssize(trial.prompt()) + std::ssize(trial.continuation()) == question.answer);
      if (setting == Setting::asked_at_the_end) {
        CHECK(question.first);
        CHECK(trial.continuation().empty());
      } else if (setting == Setting::asked_after_compression) {
        CHECK(question.first);
        CHECK(trial.continuation().size() == 5);
        CHECK(trial.continuation()[0] == token_of("where"));
      } else {
        CHECK_FALSE(question.first);
        CHECK(trial.prompt().size() == 128);
        CHECK(question.distance() > 256 / 4 - 16);
      }
      lengths.insert(question.distance() / 64);
    }
    CHECK(lengths.size() >= 3);  // near and far
  }
}

TEST_CASE("A story tells eight facts, and each of its riddles has its answer in it") {
  for (const Index length : {toy::shortest_story, Index{256}}) {
    const toy::Story story = toy::make_story(1, length);
    const Document document{.tokens = story.tokens, .questions = {}};
    CHECK(std::ssize(story.tokens) <= length);
    REQUIRE(story.riddles.size() == 8);
    std::set<Token> objects;
    for (const toy::Story::Riddle& riddle : story.riddles) {
      const std::vector<Index> said = statements(document, riddle.object, std::ssize(story.tokens) + 1);
      REQUIRE(said.size() == 1);
      CHECK(at(document, said.front()) == riddle.place);
      objects.insert(riddle.object);
    }
    CHECK(objects.size() == 8);
  }
}

TEST_CASE("A drill says its words twice, and only the second time counts") {
  for (std::uint64_t number = 0; number < 30; ++number) {
    const toy::Lesson lesson = toy::make_drill(43, toy::random_bits(9, number));
    REQUIRE(lesson.tokens.size() == 43);
    const std::size_t first = static_cast<std::size_t>(std::find(lesson.counts.begin(), lesson.counts.end(), true) - lesson.counts.begin());
    const std::size_t counted = static_cast<std::size_t>(std::count(lesson.counts.begin(), lesson.counts.end(), true));
    CHECK(counted >= 7);
    CHECK(lesson.counts == lesson.answer);
    for (std::size_t i = 0; i < counted; ++i) {
      CHECK(lesson.counts[first + i]);
      CHECK(lesson.tokens[first + i] == lesson.tokens[first + i - counted - 1]);
    }
  }
}

TEST_CASE("Words are tokens, and a word the world does not have is named") {
  const toy::WordTokenizer tokenizer;
  const std::vector<Token> tokens = tokenizer.encode(" anna left\nthe lamp in the attic . ");
  CHECK(tokens.front() == toy::bos_token);
  CHECK(toy::text_of(std::span(tokens).subspan(1)) == "anna left the lamp in the attic .");
  std::string text;
  for (std::size_t i = 1; i < tokens.size(); ++i) text += tokenizer.decode(tokens[i - 1], tokens[i]);
  CHECK(text == "anna left the lamp in the attic .");
  CHECK(test::says(test::message_of([&] { tokenizer.encode("anna left the sofa"); }), {"no word 'sofa'"}));
  std::set<std::string_view> distinct(toy::words.begin(), toy::words.end());
  CHECK(distinct.size() == toy::words.size());
}

TEST_CASE("Lines break at spaces, and words longer than a line where they must") {
  CHECK(toy::wrapped("one two three", 7) == "one two\nthree");
  CHECK(toy::wrapped("abcdefgh i", 4) == "abcd\nefgh\ni");
  CHECK(toy::wrapped("short", 80) == "short");
}

}  // namespace
