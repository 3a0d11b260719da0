// The demo's model, piece by piece, and whole against what llama2.c and other programs compute with stories260K.

#include <toy_transformer/checkpoint.hpp>
#include <toy_transformer/generate.hpp>
#include <toy_transformer/held_strip.hpp>
#include <toy_transformer/nll.hpp>
#include <toy_transformer/options.hpp>
#include <toy_transformer/printable.hpp>
#include <toy_transformer/random_model.hpp>
#include <toy_transformer/tokenizer.hpp>
#include <toy_transformer/transformer.hpp>

#include "support/catch.hpp"
#include "support/golden.hpp"
#include "support/positions.hpp"
#include "support/random.hpp"
#include "support/shared_dir.hpp"
#include "support/tolerance.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

using test::Random;
using toy::Config;
using toy::Index;
using toy::Token;
using toy::Tokenizer;
using toy::Transformer;
using toy::Weights;

/// A file that lasts as long as this does.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& bytes)
      : path_(std::filesystem::temp_directory_path() /
              ("toy_transformer_test_" + std::to_string(std::random_device{}()))) {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() { std::filesystem::remove(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

template <class Value>
std::string bytes_of(Value value) {
  std::string bytes(sizeof(Value), '\0');
  std::memcpy(bytes.data(), &value, sizeof(Value));
  return bytes;
}

/// The message of the Error that `call` throws; empty if it throws none.
template <class Error, class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}
bool is_one_line_about(const std::string& message, const std::string& what) {
  return message.find(what) != std::string::npos && message.find('\n') == std::string::npos;
}

Config small_config() {
  return {
      .dim = 16, .hidden_dim = 24, .num_layers = 3, .query_heads = 4, .kv_heads = 2, .vocab_size = 31, .seq_len = 40};
}

using Header = std::vector<std::int32_t>;
Header header_of(const Config& c) {
  Header header;
  for (const Index size : {c.dim, c.hidden_dim, c.num_layers, c.query_heads, c.kv_heads,
                           c.shared_classifier ? c.vocab_size : -c.vocab_size, c.seq_len})
    header.push_back(static_cast<std::int32_t>(size));
  return header;
}

/// The file format once more, from the writer's side.
std::string checkpoint_bytes(const Weights& w, const Header& header) {
  std::string bytes;
  for (const std::int32_t number : header) bytes += bytes_of(number);
  const auto add = [&bytes](const auto& tensor) {
    for (Index row = 0; row < tensor.rows(); ++row)
      for (Index col = 0; col < tensor.cols(); ++col) bytes += bytes_of<float>(tensor(row, col));
  };
  add(w.token_embedding);
  for (const auto& layer : w.layers) add(layer.rms_attention);
  for (const auto& layer : w.layers) add(layer.wq);
  for (const auto& layer : w.layers) add(layer.wk);
  for (const auto& layer : w.layers) add(layer.wv);
  for (const auto& layer : w.layers) add(layer.wo);
  for (const auto& layer : w.layers) add(layer.rms_ffn);
  for (const auto& layer : w.layers) add(layer.w1);
  for (const auto& layer : w.layers) add(layer.w2);
  for (const auto& layer : w.layers) add(layer.w3);
  add(w.rms_final);
  add(Eigen::MatrixXf::Ones(w.config.seq_len, w.config.head_dim()));
  add(w.own_classifier);
  return bytes;
}
std::string checkpoint_bytes(const Weights& weights) { return checkpoint_bytes(weights, header_of(weights.config)); }

std::string error_of_checkpoint(const std::string& bytes) {
  const TemporaryFile file(bytes);
  return error_of<std::runtime_error>([&] { toy::load_checkpoint(file.path()); });
}

std::string tokenizer_entry(std::string_view text, float score = 0, std::optional<std::int32_t> length = {}) {
  return bytes_of(score) + bytes_of(length.value_or(static_cast<std::int32_t>(text.size()))) + std::string(text);
}
/// The 259 tokens that every vocabulary starts with.
std::string tokenizer_bytes() {
  std::string bytes = bytes_of<std::int32_t>(16);
  for (const char* text : {"<unk>", "\n<s>\n", "\n</s>\n"}) bytes += tokenizer_entry(text);
  for (int byte = 0; byte < 256; ++byte) {
    char name[7];
    std::snprintf(name, sizeof(name), "<0x%02X>", static_cast<unsigned>(byte));
    bytes += tokenizer_entry(name);
  }
  return bytes;
}
std::string error_of_tokenizer(const std::string& bytes) {
  const TemporaryFile file(bytes);
  return error_of<std::runtime_error>([&] { Tokenizer::load(file.path()); });
}

std::string decoded(const Tokenizer& tokenizer, const std::vector<Token>& tokens) {
  std::string text;
  for (std::size_t i = 1; i < tokens.size(); ++i) text += tokenizer.decode(tokens[i - 1], tokens[i]);
  return text;
}

std::vector<Token> random_tokens(Random& random, Index count, Index vocab_size) {
  std::vector<Token> tokens;
  for (Index i = 0; i < count; ++i) tokens.push_back(static_cast<Token>(random.below(vocab_size)));
  return tokens;
}

std::string error_of_options(const std::vector<const char*>& arguments) {
  return error_of<toy::UsageError>([&] { toy::parse_options(arguments); });
}

/// The trained model, its tokenizer and the texts, where they are at hand.
struct Stories {
  std::shared_ptr<const Weights> weights;
  Tokenizer tokenizer;
  std::filesystem::path model_folder, texts;
};
std::optional<Stories> load_stories(const std::string& what) {
  const auto folder = test::find_shared("models/stories260K", what);
  const auto texts = test::find_shared("data/tinystories-valid-stories.txt", what);
  if (!folder || !texts) return std::nullopt;
  return Stories{toy::load_checkpoint(*folder / "stories260K.bin"), Tokenizer::load(*folder / "tok512.bin"), *folder,
                 *texts};
}

/// One story's tokens, text and per-token likelihoods against a golden run with the full cache.
void check_story(const std::string& name, std::size_t story) {
  CAPTURE(name, story);
  const auto stories = load_stories("single stories");
  const auto folder = test::find_shared("golden_model", "single stories");
  if (!stories || !folder) return;
  const std::string text = toy::read_text(stories->texts);
  const auto documents = toy::split_documents(text);
  REQUIRE(documents.size() == 336);
  const test::GoldenCase golden(*folder / name);
  REQUIRE(golden.text("text") == "story " + std::to_string(story));

  const std::vector<Token> tokens = stories->tokenizer.encode(documents[story]);
  CHECK(tokens == golden.tensor<std::int32_t>("in_tokens").data);
  CHECK(decoded(stories->tokenizer, tokens) == documents[story]);

  Transformer<float> model(stories->weights, "full", kvsnip::unlimited_budget);
  const std::vector<double> nlls = toy::token_nlls(model, tokens);
  const std::vector<float> expected = golden.tensor<float>("out_nll").data;
  REQUIRE(nlls.size() == expected.size());
  double largest = 0;
  for (std::size_t i = 0; i < nlls.size(); ++i)
    largest = std::max(largest, std::abs(nlls[i] - static_cast<double>(expected[i])));
  CHECK(largest < 2e-4);
}

void check_bit_identity(const std::shared_ptr<const Weights>& weights, const std::vector<Token>& tokens) {
  const Index budget = static_cast<Index>(tokens.size());
  Transformer<float> full(weights, "full", budget), scissorhands(weights, "scissorhands", budget);
  for (const Token token : tokens) REQUIRE(full.forward(token) == scissorhands.forward(token));
}

}  // namespace

TEST_CASE("A checkpoint gives back the weights that were written") {
  Config config = small_config();
  config.shared_classifier = GENERATE(true, false);
  const auto written = toy::random_weights(config, 5);
  const TemporaryFile file(checkpoint_bytes(*written));
  const auto read = toy::load_checkpoint(file.path());
  CHECK(read->token_embedding == written->token_embedding);
  REQUIRE(read->layers.size() == written->layers.size());
  for (std::size_t i = 0; i < read->layers.size(); ++i) {
    const toy::Layer &a = read->layers[i], &b = written->layers[i];
    CHECK((a.wq == b.wq && a.wk == b.wk && a.wv == b.wv && a.wo == b.wo));
    CHECK((a.w1 == b.w1 && a.w2 == b.w2 && a.w3 == b.w3));
  }
  CHECK(read->classifier() == written->classifier());
  CHECK((read->classifier() == read->token_embedding) == config.shared_classifier);

  const std::vector<Token> tokens{1, 17, 4, 30};
  CHECK(Transformer<float>(read, "full", 8).forward(tokens) == Transformer<float>(written, "full", 8).forward(tokens));
}

TEST_CASE("A checkpoint of our own keeps heads of any width, and is refused like the others") {
  Config config = small_config();
  config.own_head_dim = 10;
  config.shared_classifier = GENERATE(true, false);
  const auto written = toy::random_weights(config, 5);
  const TemporaryFile file("");
  toy::save_checkpoint(file.path(), *written);
  const auto read = toy::load_checkpoint(file.path());
  CHECK(read->config == config);
  toy::for_each_tensor([](const auto& a, const auto& b) { CHECK((a.size() == 0 || a == b)); }, *read, *written);

  const std::string good = toy::read_text(file.path());
  CHECK(good.substr(0, 4) == "KVS1");
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, 31)), "shorter than its header of 32 bytes"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, good.size() - 4)), "bytes follow"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, 32) + bytes_of<std::int32_t>(9) + good.substr(36)), "head size 9 is odd"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, 32) + bytes_of<std::int32_t>(0) + good.substr(36)), "head_dim is 0"));
  CHECK(is_one_line_about(error_of<std::runtime_error>([&] { toy::save_checkpoint(file.path() / "no_folder", *written); }), "cannot be written"));
}

TEST_CASE("A file that is no checkpoint is refused in one line") {
  const auto weights = toy::random_weights(small_config(), 5);
  const std::string good = checkpoint_bytes(*weights);
  REQUIRE(error_of_checkpoint(good).empty());

  CHECK(is_one_line_about(error_of_checkpoint(""), "shorter than its header"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, 27)), "shorter than its header"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, 28)), "0 bytes follow"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, good.size() - 4)), "bytes follow"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, good.size() - 1)), "bytes follow"));
  CHECK(is_one_line_about(error_of_checkpoint(good + '\0'), "bytes follow"));
  CHECK(is_one_line_about(error_of_checkpoint(good + bytes_of(0.0f)), "bytes follow"));
  CHECK(is_one_line_about(error_of_checkpoint("Once upon a time there was a text that is no model at all."), "dim"));
  CHECK(is_one_line_about(error_of_checkpoint(good.substr(0, 100) + bytes_of(NAN) + good.substr(104)), "not finite"));

  const auto error_with = [&](std::size_t field, std::int32_t value) {
    Header header = header_of(weights->config);
    header[field] = value;
    return error_of_checkpoint(checkpoint_bytes(*weights, header));
  };
  const std::vector<std::string> names{"dim", "hidden_dim", "layers", "heads", "kv_heads", "vocab", "seq_len"};
  for (std::size_t field = 0; field < names.size(); ++field) {
    CAPTURE(names[field]);
    for (const std::int32_t value :
         {0, std::numeric_limits<std::int32_t>::max(), std::numeric_limits<std::int32_t>::min()})
      CHECK(is_one_line_about(error_with(field, value), ": " + names[field] + " is " + std::to_string(value)));
    if (names[field] != "vocab") CHECK(is_one_line_about(error_with(field, -1), ": " + names[field] + " is -1"));
  }
  CHECK(is_one_line_about(error_with(3, 6), "6 heads do not divide dim 16"));
  CHECK(is_one_line_about(error_with(4, 3), "3 kv_heads do not divide heads 4"));
  CHECK(is_one_line_about(error_with(3, 16), "head size 1 is odd"));
  CHECK(is_one_line_about(error_with(5, -31), "bytes follow"));  // promises an output matrix that is not there
}

TEST_CASE("A header that claims more than any memory holds is refused before it is believed") {
  const std::int32_t most = 1 << 20;
  const Header header{most, most, most, 4, 4, -most, most};
  const std::string bytes = checkpoint_bytes(*toy::random_weights(small_config(), 5), header);
  CHECK(is_one_line_about(error_of_checkpoint(bytes),
                          "its header implies 8070455205173395456 floats"));  // not std::bad_alloc
}

TEST_CASE("What is not a regular file is neither a checkpoint nor a tokenizer nor a text") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path();
  for (const auto& [path, reason] :
       {std::pair(folder, "not a regular file"), std::pair(folder / "no_such_file_of_toys", "no such file")}) {
    CAPTURE(path);
    const std::string expected = path.string() + ": " + reason;
    CHECK(error_of<std::runtime_error>([&, p = path] { toy::load_checkpoint(p); }) == expected);
    CHECK(error_of<std::runtime_error>([&, p = path] { Tokenizer::load(p); }) == expected);
    CHECK(error_of<std::runtime_error>([&, p = path] { toy::read_text(p); }) == expected);
  }
}

TEST_CASE("A text comes back from its tokens, whatever its bytes") {
  std::string merges = tokenizer_bytes();
  for (const char* text : {" ", "a", "b", "ab", " a", "\xC3\xA9"})
    merges += tokenizer_entry(text, -static_cast<float>(std::strlen(text)));
  const TemporaryFile file(merges);
  Random random(3);
  const Tokenizer tokenizer = Tokenizer::load(file.path());
  CHECK(tokenizer.encode("") == std::vector<Token>{toy::bos_token});
  for (int i = 0; i < 400; ++i) {
    std::string text;
    const Index length = random.between(1, 40);
    for (Index j = 0; j < length; ++j)
      text += static_cast<char>(random.one_in(2) ? random.pick({' ', 'a', 'b', 0xC3, 0xA9}) : random.below(256));
    REQUIRE(decoded(tokenizer, tokenizer.encode(text)) == text);
  }
}

TEST_CASE("Tokens merge by score, the leftmost pair first, and characters without a token become bytes") {
  // 259 ' ', 260 a, 261 b, 262 aa, 263 ab, 264 aab, 265 e with an accent
  std::string bytes = tokenizer_bytes();
  for (const auto& [text, score] :
       {std::pair(" ", 0.f), {"a", 0.f}, {"b", 0.f}, {"aa", -1.f}, {"ab", -2.f}, {"aab", -3.f}, {"\xC3\xA9", 0.f}})
    bytes += tokenizer_entry(text, score);
  const TemporaryFile file(bytes);
  const Tokenizer tokenizer = Tokenizer::load(file.path());
  CHECK(tokenizer.size() == 266);
  CHECK(tokenizer.encode("aaab") == std::vector<Token>{1, 259, 262, 263});  // aa before ab, the left aa
  CHECK(tokenizer.encode("aab") == std::vector<Token>{1, 259, 264});
  CHECK(tokenizer.encode("\xC3\xA9z") == std::vector<Token>{1, 259, 265, 3 + 'z'});
  CHECK(tokenizer.encode("\xE2\x82\xAC") == std::vector<Token>{1, 259, 3 + 0xE2, 3 + 0x82, 3 + 0xAC});
}

TEST_CASE("A file that is no tokenizer is refused in one line") {
  const std::string good = tokenizer_bytes();
  REQUIRE(error_of_tokenizer(good).empty());
  CHECK(is_one_line_about(error_of_tokenizer(""), "shorter than its header"));
  CHECK(is_one_line_about(error_of_tokenizer(bytes_of<std::int32_t>(-1)), "longest token of -1"));
  CHECK(is_one_line_about(error_of_tokenizer(bytes_of<std::int32_t>(1 << 30)), "longest token of 1073741824"));
  CHECK(is_one_line_about(error_of_tokenizer(good.substr(0, good.size() - 1)), "token 258 is cut short"));
  CHECK(is_one_line_about(error_of_tokenizer(good + "tail"), "token 259 is cut short"));
  CHECK(is_one_line_about(error_of_tokenizer(good + tokenizer_entry("x", 0, -1)), "token 259 has length -1"));
  CHECK(is_one_line_about(error_of_tokenizer(good + tokenizer_entry("x", 0, 17)), "token 259 has length 17"));
  CHECK(is_one_line_about(error_of_tokenizer(good + tokenizer_entry("x", 0, 16)), "token 259 is cut short"));
  CHECK(is_one_line_about(error_of_tokenizer(good + tokenizer_entry("x", NAN)), "token 259 has a score"));
  CHECK(is_one_line_about(error_of_tokenizer(bytes_of<std::int32_t>(8) + tokenizer_entry("<unk>")),
                          "token 3 is not <0x00>"));
}

TEST_CASE("The sampler takes the likeliest token at temperature 0, and else draws with the softmax's frequencies") {
  const Eigen::Vector4f logits(0.5f, 2.0f, -1.0f, 1.5f);
  CHECK(toy::Sampler(0, 1)(logits) == 1);

  const double temperature = GENERATE(0.5, 1.0, 3.0);
  CAPTURE(temperature);
  toy::Sampler sampler(temperature, 11), again(temperature, 11);
  Eigen::Vector4d counts = Eigen::Vector4d::Zero();
  const int draws = 20000;
  for (int i = 0; i < draws; ++i) {
    const Token token = sampler(logits);
    REQUIRE(again(logits) == token);
    counts[token] += 1;
  }
  Eigen::Vector4d expected = (logits.cast<double>() / temperature).array().exp();
  expected /= expected.sum();
  CHECK((counts / draws - expected).cwiseAbs().maxCoeff() < 0.015);  // four standard errors
}

TEST_CASE("Draws are the same on every platform, and extreme temperatures do no harm") {
  std::mt19937_64 bits;
  bits.discard(9999);  // the standard gives the 10000th number
  CHECK(toy::uniform(bits) == static_cast<double>(9981545732273789042u >> 11) / 9007199254740992.0);

  const Eigen::Vector3f logits(-80, 90, 89);
  CHECK(toy::Sampler(1e-310, 1)(logits) == 1);
  CHECK_NOTHROW(toy::Sampler(1e300, 1)(logits));
  CHECK_THROWS_AS(toy::Sampler(-1, 1), std::invalid_argument);
  CHECK_THROWS_AS(toy::Sampler(NAN, 1), std::invalid_argument);
  CHECK_THROWS_AS(toy::Sampler(1, 1)(Eigen::Vector3f(0, NAN, 0)), std::runtime_error);
}

TEST_CASE("Documents end at lines that are exactly the separator") {
  using Documents = std::vector<std::string_view>;
  CHECK(toy::split_documents("").empty());
  CHECK(toy::split_documents("one") == Documents{"one"});
  CHECK(toy::split_documents("one\ntwo\n<|endoftext|>\n\nthree\n") == Documents{"one\ntwo", "three"});
  CHECK(toy::split_documents("<|endoftext|>\n<|endoftext|>\n\n<|endoftext|>").empty());
  CHECK(toy::split_documents("a <|endoftext|>\n<|endoftext|> b\n<|endoftext|>") ==
        Documents{"a <|endoftext|>\n<|endoftext|> b"});
}

TEST_CASE("What is printed is UTF-8 without control characters") {
  const auto printed = [](std::string_view bytes) {
    toy::Printable printable;
    std::string text;
    for (const char c : bytes) text += printable.push(std::string_view(&c, 1));
    return text + printable.finish();
  };
  CHECK(printed("a\tb\n") == "a\tb\n");
  CHECK(printed("\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80") == "\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80");
  CHECK(printed("\x1B[2J\x7F\r\xC2\x9B!") == "[2J!");
  CHECK(printed("\xC3(\x80\xFF\xE2\x82") == "\xEF\xBF\xBD(\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
}

TEST_CASE("The strip of held positions, by hand") {
  const std::vector<Index> none, some{0, 1, 2, 4, 9, 3, 7};
  CHECK(toy::held_strip(none, 3) == "   ");
  CHECK(toy::held_strip(some, 10) == "#####  # #");
  CHECK(toy::held_strip(some, 12, 4) == "#:..");
  CHECK(toy::held_strip(some, 12, 2) == "#.");
  CHECK(toy::held_strip(some, 10, 3) == "#.:");  // stretches of 4, 3 and 3
  CHECK(toy::held_strip(std::vector<Index>{3}, 5, 2) == " :");  // of 3 and 2
}

TEST_CASE("The command line is read, and what is wrong with it said in one line") {
  const std::vector<const char*> all{"--model",
                                     "m",
                                     "--tokenizer=t",
                                     "--prompt",
                                     "a = b",
                                     "--steps=7",
                                     "--temperature",
                                     "0.5",
                                     "--seed",
                                     "9",
                                     "--policy=scissorhands(history_window=100)",
                                     "--budget",
                                     "32",
                                     "--type",
                                     "half",
                                     "--show",
                                     "--quiet"};
  const toy::Options options = toy::parse_options(all);
  CHECK((options.model == "m" && options.tokenizer == "t" && options.prompt == "a = b" && options.steps == 7));
  CHECK((options.temperature == 0.5 && options.seed == 9 && options.policy == "scissorhands(history_window=100)"));
  CHECK((options.budget == 32 && options.type == "half" && options.show && options.quiet && !options.ignore_eos));

  CHECK(is_one_line_about(error_of_options({"--colour"}), "unknown argument '--colour'"));
  CHECK(is_one_line_about(error_of_options({"story"}), "unknown argument 'story'"));
  CHECK(is_one_line_about(error_of_options({"--budget"}), "--budget needs a value"));
  CHECK(is_one_line_about(error_of_options({"--budget", "many"}), "'many' is not a whole number"));
  CHECK(is_one_line_about(error_of_options({"--budget", "12x"}), "'12x' is not a whole number"));
  CHECK(is_one_line_about(error_of_options({"--budget", ""}), "'' is not a whole number"));
  CHECK(is_one_line_about(error_of_options({"--budget", "0"}), "0 is not in 1 to"));
  CHECK(is_one_line_about(error_of_options({"--steps", "99999999999999999999"}), "is not in 1 to"));
  CHECK(is_one_line_about(error_of_options({"--temperature", "warm"}), "'warm' is not a number"));
  CHECK(is_one_line_about(error_of_options({"--temperature", "nan"}), "'nan' is not a number"));
  CHECK(is_one_line_about(error_of_options({"--temperature", "-1"}), "-1 is not in 0 to 100"));
  CHECK(is_one_line_about(error_of_options({"--type", "int3"}), "'int3' is none of"));
  CHECK(is_one_line_about(error_of_options({"--show=yes"}), "--show takes no value"));
  CHECK(is_one_line_about(error_of_options({"--model", "m"}), "--model and --tokenizer go together"));
}

TEST_CASE("The transformer refuses tokens it does not have, and no tokens") {
  Transformer<float> model(toy::random_weights(small_config(), 5), "full", 8);
  CHECK_THROWS_AS(model.forward(-1), std::invalid_argument);
  CHECK_THROWS_AS(model.forward(31), std::invalid_argument);
  CHECK_THROWS_AS(model.forward(std::vector<Token>{}), std::invalid_argument);
  CHECK(model.tokens_seen() == 0);
}

TEST_CASE("A prompt in one pass, in pieces and token by token gives the same logits up to rounding") {
  Random random(7);
  const auto weights = toy::random_weights(small_config(), 5);
  const std::vector<Token> tokens = random_tokens(random, 97, weights->config.vocab_size);
  const std::string policy = GENERATE("full", "scissorhands", "snapkv(observation_window=16)+scissorhands");
  const Index budget = 128;
  CAPTURE(policy);

  Transformer<float> whole(weights, policy, budget), pieces(weights, policy, budget), single(weights, policy, budget);
  const Eigen::MatrixXf expected = whole.forward(tokens, {.all_logits = true});
  REQUIRE(expected.cols() == 97);
  for (std::size_t begin = 0; begin < tokens.size(); begin += 20) {
    const std::size_t count = std::min<std::size_t>(20, tokens.size() - begin);
    const Eigen::MatrixXf logits = pieces.forward(std::span(tokens).subspan(begin, count),
                                                  {.more = begin + count < tokens.size(), .all_logits = true});
    CHECK(test::largest_difference(logits, expected.middleCols(static_cast<Index>(begin), static_cast<Index>(count))) <
          1e-4);
  }
  for (std::size_t i = 0; i < tokens.size(); ++i)
    REQUIRE(test::largest_difference(single.forward(tokens[i]), expected.col(static_cast<Index>(i))) < 1e-4);
}

TEST_CASE("A prompt longer than the budget leaves the same positions and logits in pieces as in one pass") {
  Random random(8);
  const auto weights = toy::random_weights(small_config(), 5);
  const std::vector<Token> tokens = random_tokens(random, 97, weights->config.vocab_size);
  Transformer<float> whole(weights, "streaming_llm", 32), pieces(weights, "streaming_llm", 32);
  whole.forward(tokens);
  for (std::size_t begin = 0; begin < tokens.size(); begin += 20)
    pieces.forward(std::span(tokens).subspan(begin, std::min<std::size_t>(20, tokens.size() - begin)),
                   {.more = begin + 20 < tokens.size()});
  for (Token token = 0; token < 30; ++token)
    REQUIRE(test::largest_difference(whole.forward(token), pieces.forward(token)) < 1e-4);
  for (std::size_t layer = 0; layer < whole.caches().size(); ++layer)
    for (Index h = 0; h < weights->config.kv_heads; ++h)
      CHECK(test::sorted(whole.caches()[layer].positions(h)) == test::sorted(pieces.caches()[layer].positions(h)));
}

TEST_CASE("Only distances between positions count, beyond the trained length too") {
  // Three layers that each see 8 tokens see 22 in all: a text of period 30 repeats its logits, whatever the position.
  const auto weights = toy::random_weights(small_config(), 5);
  Transformer<float> model(weights, "streaming_llm(num_sinks=0)", 8);
  std::vector<Eigen::MatrixXf> period;
  for (Index position = 0; position < 600; ++position) {
    const Eigen::MatrixXf logits = model.forward(static_cast<Token>(position % 30));
    if (position >= 30 && position < 60) period.push_back(logits);
    if (position >= 60)
      REQUIRE(test::largest_difference(logits, period[static_cast<std::size_t>(position % 30)]) < 1e-4);
  }
}

TEST_CASE("A reset transformer repeats itself") {
  Random random(9);
  const auto weights = toy::random_weights(small_config(), 5);
  const std::vector<Token> tokens = random_tokens(random, 70, weights->config.vocab_size);
  Transformer<Eigen::half> model(weights, "scissorhands", 24);
  const std::vector<double> first = toy::token_nlls(model, tokens);
  CHECK(toy::token_nlls(model, tokens) == first);
}

TEST_CASE("Generation goes on far beyond the trained length in constant memory") {
  const auto weights = toy::random_weights(small_config(), 5);
  Transformer<Eigen::bfloat16> model(weights, "scissorhands", 64);
  toy::Sampler sampler(1, 2);
  std::vector<Index> bytes;  // after each step
  const std::vector<Token> prompt{toy::bos_token};
  toy::generate(model, sampler, prompt, {.steps = 2000, .ignore_eos = true},
                [&](Token, Token) { bytes.push_back(model.bytes().total()); });
  REQUIRE(model.tokens_seen() == 2000);
  REQUIRE(bytes.size() == 2000);
  CHECK(std::count(bytes.begin() + 500, bytes.end(), bytes.back()) == 1500);
  CHECK(model.full_cache_bytes() == 2000 * 3 * 2 * 4 * 2 * 2);  // layers, kv_heads, head_dim, K and V, bytes
  for (const auto& cache : model.caches())
    for (Index h = 0; h < weights->config.kv_heads; ++h) {
      const std::vector<Index> held = test::sorted(cache.positions(h));
      REQUIRE(held.size() == 64);
      CHECK((held[0] == 0 && held[3] == 3 && held[63] == 1999 && held[54] == 1990));
    }
}

TEST_CASE("Every policy that has a name runs in the model, and in constant memory if it evicts while decoding") {
  const auto weights = toy::random_weights(small_config(), 5);
  for (const kvsnip::PolicyInfo& info : kvsnip::policies()) {
    std::string spec(info.name);
    if (info.decorates) spec += "(snapkv(observation_window=16)+h2o(recent_window=16))";
    if (spec == "snapkv") spec += "(observation_window=16)";
    if (spec == "finch") spec += "(observation_window=16)";
    if (spec == "lag_kv") spec += "(lag_size=8, num_sinks=4)";
    if (spec == "sim_layer_kv") spec += "(recent_window=16, threshold=0)";  // lazy whatever it sees: others grow
    if (info.name == "periodic") spec = "periodic(snapkv(observation_window=16), interval=16)";
    CAPTURE(spec);
    Transformer<float> model(weights, spec, 64);
    toy::Sampler sampler(1, 2);
    std::vector<Index> bytes;
    const std::vector<Token> prompt(100, toy::bos_token);
    toy::generate(model, sampler, prompt, {.steps = 1000, .ignore_eos = true}, [&](Token, Token) { bytes.push_back(model.bytes().total()); });
    REQUIRE(model.tokens_seen() == 1000);
    if (model.caches().front().policy().evicts(kvsnip::Phase::decode)) CHECK(*std::max_element(bytes.end() - 400, bytes.end()) <= *std::max_element(bytes.begin(), bytes.begin() + 500));
    else CHECK(model.caches().front().size(0) > 64);
  }
}

TEST_CASE("The text has as many tokens as asked for, prompt included") {
  const auto weights = toy::random_weights(small_config(), 5);
  const std::vector<Token> prompt{1, 15, 16, 17};
  const auto length = [&](Index steps, Index* seen = nullptr) {
    Transformer<float> model(weights, "full", 64);
    toy::Sampler sampler(1, 2);
    std::vector<Token> text;
    toy::generate(model, sampler, prompt, {.steps = steps, .ignore_eos = true},
                  [&](Token, Token token) { text.push_back(token); });
    for (std::size_t i = 0; i < std::min<std::size_t>(3, text.size()); ++i) CHECK(text[i] == prompt[i + 1]);
    if (seen != nullptr) *seen = model.tokens_seen();
    return static_cast<Index>(text.size());
  };
  for (const Index steps : {1, 2, 3, 4, 5, 20}) {
    Index seen = 0;
    CHECK(length(steps, &seen) == steps);
    CHECK(seen == steps);  // the last token is not fed, BOS is
  }
}

TEST_CASE("A text ends where the model ends it, or goes on if asked to") {
  // After token t comes t + 1: every block adds nothing, and the output matrix is the embedding, shifted by one row.
  Config config = small_config();
  config.vocab_size = 8;
  config.shared_classifier = false;
  const auto weights = std::make_shared<Weights>(*toy::random_weights(config, 5));
  for (auto& layer : weights->layers) layer.wo.setZero(), layer.w2.setZero();
  weights->token_embedding.setIdentity();
  weights->own_classifier.setZero();
  for (Index token = 0; token < 8; ++token) weights->own_classifier((token + 1) % 8, token) = 1;

  const auto text = [&](bool ignore_eos) {
    Transformer<float> model(weights, "full", 64);
    toy::Sampler greedy(0, 1);
    std::vector<Token> tokens;
    toy::generate(model, greedy, std::vector<Token>{toy::bos_token, 5}, {.steps = 7, .ignore_eos = ignore_eos},
                  [&](Token, Token token) { tokens.push_back(token); });
    return tokens;
  };
  CHECK(text(false) == std::vector<Token>{5, 6, 7, 0});
  CHECK(text(true) == std::vector<Token>{5, 6, 7, 0, 1, 2, 3});
}

TEST_CASE("stories260K writes the story that llama2.c writes") {
  const auto stories = load_stories("the greedy story");
  if (!stories) return;
  Transformer<float> model(stories->weights, "full", kvsnip::unlimited_budget);
  toy::Sampler greedy(0, 1);
  std::string text;
  toy::generate(model, greedy, stories->tokenizer.encode(""), {},
                [&](Token previous, Token token) { text += stories->tokenizer.decode(previous, token); });
  CHECK(text + "\n" == toy::read_text(stories->model_folder / "greedy-n256.txt"));
}

TEST_CASE("stories260K's tokens and likelihoods are those of other programs") { check_story("model_decode_01", 18); }

TEST_CASE("A budget that fits every token gives the full cache's logits, bit for bit") {
  Random random(10);
  const auto weights = toy::random_weights(small_config(), 5);
  check_bit_identity(weights, random_tokens(random, 150, weights->config.vocab_size));
}

#if defined(NDEBUG)  // minutes in a debug build
TEST_CASE("stories260K's tokens and likelihoods are those of other programs, longer stories") {
  check_story("model_decode_14", 15);
  check_story("model_decode_27", 38);
}

TEST_CASE("A budget that fits a whole story gives the full cache's logits, bit for bit") {
  const auto stories = load_stories("a story under a large budget");
  if (!stories) return;
  const std::string text = toy::read_text(stories->texts);
  check_bit_identity(stories->weights, stories->tokenizer.encode(toy::split_documents(text)[18]));
}

TEST_CASE("stories260K foretells 336 stories at 1.2137 nats per token") {
  const auto stories = load_stories("the likelihood of 336 stories");
  if (!stories) return;
  const std::string text = toy::read_text(stories->texts);
  Transformer<float> model(stories->weights, "full", kvsnip::unlimited_budget);
  const toy::TextNll nll = toy::text_nll(model, stories->tokenizer, toy::split_documents(text), [](std::size_t) {});
  CHECK(nll.tokens == 115245);
  CHECK(std::abs(nll.mean() - 1.2137) < 0.002);
}
#endif
