// What a report is made of: the recorder, and how recordings and figures are written down. report_in_browser.cmake looks at
// the page.
#include <report/recorder.hpp>
#include <report/report.hpp>
#include <toy_transformer/random_model.hpp>

#include "support/catch.hpp"
#include "support/random.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

using test::Random;
using toy::Index;

std::shared_ptr<const toy::Weights> small_model() {
  return toy::random_weights(
      {.dim = 16, .hidden_dim = 24, .num_layers = 3, .query_heads = 4, .kv_heads = 2, .vocab_size = 31, .seq_len = 96}, 7);
}
std::vector<toy::Token> random_tokens(Random& random, Index count) {
  std::vector<toy::Token> tokens;
  while (static_cast<Index>(tokens.size()) < count) tokens.push_back(static_cast<toy::Token>(random.below(31)));
  return tokens;
}

/// Keeps the newest, and hands on every row it is shown: by kv_head and query position, the weight of each position.
struct ShowRows {
  using Rows = std::map<std::pair<Index, Index>, std::map<Index, float>>;
  std::shared_ptr<Rows> rows = std::make_shared<Rows>();

  void score(Index, const kvsnip::SlotsView& slots, std::span<float> out) const { std::copy(slots.positions.begin(), slots.positions.end(), out.begin()); }
  void observe(Index kv_head, const kvsnip::AttentionRows& seen) {
    for (Index j = 0; j < seen.num_queries(); ++j)
      for (Index slot = 0; slot < seen.mean.rows(); ++slot)
        (*rows)[{kv_head, seen.first_position + j}][seen.positions[static_cast<std::size_t>(slot)]] = seen.mean(slot, j);
  }
  void reset(const kvsnip::Shape&) {}
};

/// "3-9 17" as positions.
std::vector<Index> positions_of(const std::string& ranges) {
  std::vector<Index> positions;
  std::istringstream words(ranges);
  for (std::string word; words >> word;) {
    const std::size_t dash = word.find('-');
    const Index first = std::stol(word), last = dash == std::string::npos ? first : std::stol(word.substr(dash + 1));
    for (Index p = first; p <= last; ++p) positions.push_back(p);
  }
  return positions;
}

}  // namespace

TEST_CASE("A recorder's weights are the rows a policy is shown") {
  auto weights = std::make_shared<toy::Weights>(*small_model());
  weights->config.num_layers = 1;
  weights->layers.resize(1, toy::Layer(weights->config));
  const ShowRows policy;
  toy::Transformer<Eigen::half> model(weights, kvsnip::AnyPolicy(policy), 12);
  toy::Recorder<Eigen::half> recorder(model);
  Random random(1);
  model.forward(random_tokens(random, 20));
  for (int i = 0; i < 30; ++i) model.forward(random_tokens(random, 1));
  model.forward(random_tokens(random, 3));
  model.forward(random_tokens(random, 1));  // the rows of a decode step come with the next

  std::vector<std::vector<Index>> held(2);
  Index seen = 0, compared = 0;
  for (const toy::Recording::Step& step : recorder.recording().steps) {
    for (std::size_t h = 0; h < 2; ++h) {
      for (Index t = 0; t < step.new_tokens; ++t) held[h].push_back(seen + t);
      REQUIRE(step.weights[h].size() == held[h].size());
      const auto row = policy.rows->find({static_cast<Index>(h), seen + step.new_tokens - 1});
      if (row == policy.rows->end()) {
        REQUIRE(&step == &recorder.recording().steps.back());
        continue;
      }
      for (std::size_t i = 0; i < held[h].size(); ++i) {
        const auto weight = row->second.find(held[h][i]);
        CAPTURE(seen, h, held[h][i]);
        CHECK(std::abs(step.weights[h][i] - (weight == row->second.end() ? 0 : weight->second)) < 1e-6);
        ++compared;
      }
    }
    held = step.held;
    seen += step.new_tokens;
  }
  CHECK(seen == 54);
  CHECK(compared > 2 * 32 * 12);
}

TEST_CASE("A recorder changes nothing and sees what the caches hold, whatever the policy") {
  std::vector<std::string> specs{"snapkv(observation_window=4)+scissorhands", "scissorhands(mode=count)", "periodic(snapkv(observation_window=4), interval=4)",
                                 "ada_kv(snapkv(observation_window=4))", "merging(h2o(recent_window=4))"};
  for (const char* name : {"full", "streaming_llm", "scissorhands", "tova", "random", "key_norm"}) specs.push_back(name);
  for (const std::string& spec : specs) {
    CAPTURE(spec);
    toy::Transformer<Eigen::half> model(small_model(), spec, 16), unseen = model;
    toy::Recorder<Eigen::half> recorder(model);
    Random random(2);
    for (const Index count : {5, 1, 30, 1, 1, 1, 1, 1, 1, 1, 1, 1}) {
      const std::vector<toy::Token> tokens = random_tokens(random, count);
      REQUIRE(model.forward(tokens) == unseen.forward(tokens));
      const toy::Recording::Step& step = recorder.recording().steps.back();
      CHECK(step.new_tokens == count);
      REQUIRE(step.held.size() == 6);
      REQUIRE(step.weights.size() == 6);
      for (std::size_t head = 0; head < 6; ++head) {
        const auto positions = unseen.caches()[head / 2].positions(static_cast<Index>(head % 2));
        CHECK(std::is_sorted(step.held[head].begin(), step.held[head].end()));
        CHECK(std::is_permutation(positions.begin(), positions.end(), step.held[head].begin(), step.held[head].end()));
        double sum = 0;
        for (const double weight : step.weights[head]) sum += weight;
        CHECK(std::abs(sum - 1) < 1e-5);
      }
    }
  }
}

TEST_CASE("A recording is written as what each step evicts") {
  toy::Recording recording{.facts = {{"policy", "\"x\""}}, .num_layers = 1, .kv_heads = 2, .texts = {"a", "b", "c"}, .steps = {}};
  recording.steps.push_back({.new_tokens = 2, .held = {{0, 1}, {1}}, .weights = {{0.5, 0.5}, {1, 0}}});
  recording.steps.push_back({.new_tokens = 1, .held = {{2}, {1, 2}}, .weights = {{0, 0.061, 0.939}, {0.06, 0.94}}});
  CHECK(toy::recording_json(recording) == "{\"facts\": [[\"policy\", \"\\u0022x\\u0022\"]], \"layers\": 1, \"kv_heads\": 2, \"tokens\": [\"a\",\"b\",\"c\"],\n"
                                          "\"steps\": [\n{\"new\": 2, \"gone\": [\"\",\"0\"], \"weights\": [\"z84z84\",\"zG80\"]},\n"
                                          "{\"new\": 1, \"gone\": [\"0-1\",\"\"], \"weights\": [\"0z0zzF9\",\"yzFA\"]}]}");
  recording.steps.front().weights.clear();
  CHECK(toy::recording_json(recording).find("\"gone\": [\"\",\"0\"], \"weights\": []") != std::string::npos);
}

TEST_CASE("Ranges name exactly the positions that are gone, no two of them neighbours") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    std::vector<Index> before, after, gone;
    const Index leaves = random.between(1, 4);
    for (Index p = 0; p < 40; ++p) {
      if (random.one_in(3)) continue;
      before.push_back(p);
      (random.one_in(leaves) ? gone : after).push_back(p);
    }
    const std::string ranges = toy::detail::gone_ranges(before, after);
    CAPTURE(ranges);
    CHECK(positions_of(ranges) == gone);
    Index runs = 0;
    for (std::size_t i = 0; i < gone.size(); ++i) runs += i == 0 || gone[i] != gone[i - 1] + 1;
    CHECK(std::count(ranges.begin(), ranges.end(), ' ') == std::max<Index>(runs - 1, 0));
  }
}

TEST_CASE("Weights are written to the nearest 1/1000, out of bounds as the bound") {
  CHECK(toy::detail::weight_digits(std::vector<double>{0, 0.0004, 0.0006, 0.0099, 0.01, 0.0356, 0.0604, 0.0605, 1, -1, 2}) == "001AAayz0zzG80zG8");
}

TEST_CASE("A JSON string shows any bytes, and nothing in it ends a script") {
  CHECK(toy::json_string("plain") == "\"plain\"");
  CHECK(toy::json_string("\"\\\n\x7F") == "\"\\u0022\\u005c\\u000a\\u007f\"");
  CHECK(toy::json_string("</script><!--") == "\"\\u003c/script>\\u003c!--\"");
  CHECK(toy::json_string(std::string(1, '\0')) == "\"\\u0000\"");
  for (const char* whole : {"\xC3\xA9", "\xE2\x86\xB5", "\xED\x9F\xBF", "\xF0\x9F\x98\x80", "\xF4\x8F\xBF\xBF"}) CHECK(toy::json_string(whole) == "\"" + std::string(whole) + "\"");
  const std::string open = "\xE2\x80\xB9", close = "\xE2\x80\xBA";
  const auto shown = [&](std::initializer_list<const char*> bytes) {
    std::string out;
    for (const char* byte : bytes) out += open + byte + close;
    return out;
  };
  CHECK(toy::json_string("a\xC3") == "\"a" + shown({"C3"}) + "\"");                          // cut short
  CHECK(toy::json_string("\xC3\"") == "\"" + shown({"C3"}) + "\\u0022\"");                   // what follows is not swallowed
  CHECK(toy::json_string("\xA9") == "\"" + shown({"A9"}) + "\"");                            // begins nothing
  CHECK(toy::json_string("\xC0\xBC") == "\"" + shown({"C0", "BC"}) + "\"");                  // '<' in two bytes
  CHECK(toy::json_string("\xE0\x80\xBC") == "\"" + shown({"E0", "80", "BC"}) + "\"");        // in three
  CHECK(toy::json_string("\xED\xA0\x80") == "\"" + shown({"ED", "A0", "80"}) + "\"");        // a surrogate
  CHECK(toy::json_string("\xF4\x90\x80\x80") == "\"" + shown({"F4", "90", "80", "80"}) + "\"");  // beyond U+10FFFF
}

TEST_CASE("A figure has six digits everywhere, a whole number all of its, and what is no number is null") {
  CHECK(toy::json_number(0.6812345678) == "0.681235");
  CHECK(toy::json_number(1234567.5) == "1.23457e+06");
  CHECK(toy::json_number(1234567) == "1234567");
  CHECK(toy::json_number(-3) == "-3");
  CHECK(toy::json_number(std::numeric_limits<double>::quiet_NaN()) == "null");
  CHECK(toy::json_number(std::numeric_limits<double>::infinity()) == "null");
}

TEST_CASE("The report embeds the figures as --json writes them") {
  const std::vector<toy::QualityPoint> points{
      {.measure = "answers", .policy = "full", .budget = 8, .bytes = 1000001, .value = 1},
      {.measure = "answers", .policy = "</script>", .budget = 4, .bytes = 65536, .value = 0.1234567, .low = 0.1, .high = 0.2, .higher_is_better = false}};
  const std::string json = toy::quality_json(points);
  CHECK(json == "[\n"
                "{\"measure\": \"answers\", \"better\": \"higher\", \"policy\": \"full\", \"budget\": 8, \"bytes\": 1000001, \"value\": 1, \"low\": null, \"high\": null},\n"
                "{\"measure\": \"answers\", \"better\": \"lower\", \"policy\": \"\\u003c/script>\", \"budget\": 4, \"bytes\": 65536, \"value\": 0.123457, \"low\": 0.1, \"high\": 0.2}\n]");
  std::ostringstream page;
  toy::write_report(page, nullptr, points);
  CHECK(page.str().find("{\"recording\": null,\n\"quality\": " + json + "}\n</script>") != std::string::npos);
  CHECK(toy::quality_json({}) == "[\n]");
}

TEST_CASE("A report of 400 steps of 20 heads stays under a megabyte") {
  const toy::Config config{.dim = 64, .hidden_dim = 172, .num_layers = 5, .query_heads = 8, .kv_heads = 4, .vocab_size = 259, .seq_len = 512};
  toy::Transformer<Eigen::half> model(toy::random_weights(config, 1), "scissorhands", 64);
  toy::Recorder<Eigen::half> recorder(model);
  Random random(3);
  for (Index t = 0; t < 400; ++t) {
    model.forward(static_cast<toy::Token>(3 + random.below(256)));
    recorder.add_text("word ");
  }
  std::ostringstream page;
  toy::write_report(page, &recorder.recording());
  CHECK(page.str().size() < 1000000);
  CHECK(page.str().size() > 400 * 20 * 60);  // it is all there
}
