// A trained model, run through our caches, says the same about real text as the reference's model through its caches.
//
// The cases are found at run time. A run makes thousands of choices by float scores and a few of them are bound to be
// close: a case lists the steps where they are. Before the first of those everything must agree, token by token; a run
// that parts from the reference after it is right as well, and then only the mean is compared. Where equal scores are the
// rule (key norms in layer 0, odd positions) the reference's choices are dictated, and must be among the best by our scores.

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <toy_transformer/checkpoint.hpp>
#include <toy_transformer/nll.hpp>
#include <toy_transformer/transformer.hpp>
#include <vector>

#include "support/catch.hpp"
#include "support/dictated.hpp"
#include "support/golden_run.hpp"
#include "support/positions.hpp"
#include "support/shared_dir.hpp"
#include "support/slot_model.hpp"
#include "support/tolerance.hpp"

namespace {

using kvsnip::Index;
using test::Array;
using test::Findings;
using test::GoldenCase;
using test::GoldenRunner;
using test::sorted;
using Model = toy::Transformer<float>;

constexpr double token_tolerance = 2e-4, mean_tolerance = 2e-5, parted_mean_tolerance = 0.01;
constexpr const char* checkpoint = "models/stories260K/stories260K.bin";

std::shared_ptr<const toy::Weights> stories260k() {
  static const std::shared_ptr<const toy::Weights> weights = toy::load_checkpoint(test::shared_dir() / checkpoint);
  return weights;
}

/// The reference's recent_global never writes a global slot after the prompt: those that a shorter prompt left free
/// stay so for ever. For us that is as many sinks and slots less.
Index num_slots_never_used(const GoldenCase& golden) {
  if (golden.text("strategy") != "recent_global") return 0;
  return std::max<Index>(golden.integer("global_tokens") - golden.integer("prompt_length"), 0);
}

std::string policy_spec(const GoldenCase& golden) {
  const std::string& strategy = golden.text("strategy");
  if (strategy == "recent_global")
    return "streaming_llm(num_sinks=" + std::to_string(golden.integer("global_tokens") - num_slots_never_used(golden)) +
           ")";
  if (strategy == "snapkv")
    return "snapkv(observation_window=" + golden.text("window_size") + ",kernel_size=" + golden.text("kernel_size") +
           ")";
  if (strategy == "scissorhands")
    return "scissorhands(history_window=" + golden.text("history_window") +
           ",recent_window=" + golden.text("recent_window") + ",num_sinks=" + golden.text("global_tokens") +
           ",drop=" + golden.text("drop") + ",mode=" + golden.text("mode") + ")";
  if (strategy == "heavy_hitter") {
    const std::string window = golden.text("history_window_size") == "1" ? "0" : golden.text("history_window_size");  // 1 is all rows there
    const std::string h2o = "h2o(score=mean,prompt_as_one_row=true,history_window=" + window + ",threshold=" + golden.text("attn_thresholding") +
                            ",num_sinks=" + golden.text("global_tokens") + ",recent_window=" + std::to_string(golden.integer("recent_window") + 1) + ",refill_interval=1)";
    if (golden.text("kind") != "model_prompt") return h2o;
    return "snapkv(observation_window=16,kernel_size=5,pool_over=row,count_padding=false,num_sinks=" + golden.text("global_tokens") + ")+" + h2o;
  }
  return "full";
}

/// The reference evicts live tokens while slots are free: its scores of 0 tie with theirs, and the lowest slot goes. That our
/// rules forbid: a test double does it.
bool evicts_with_free_slots(const GoldenCase& golden) {
  return golden.text("strategy") == "heavy_hitter" && golden.integer("attn_thresholding") == 1 && golden.text("kind") != "model_prompt";
}

/// A policy that is told the reference's choices; none where the reference's own are ours.
std::optional<kvsnip::AnyPolicy> dictated_policy(const GoldenCase& golden, const std::shared_ptr<test::Dictation>& dictation) {
  const std::string& strategy = golden.text("strategy");
  const auto dictated = [&]<class P>(const P*) {  // the reference's recent_window leaves the incoming token out
    return kvsnip::AnyPolicy(test::Dictated(
        P{{.num_sinks = golden.integer("global_tokens"), .recent_window = golden.integer("recent_window") + 1, .refill_interval = 1}}, dictation));
  };
  if (strategy == "l2") return dictated(static_cast<const kvsnip::KeyNorm*>(nullptr));
  if (strategy == "keep_it_odd") return dictated(static_cast<const kvsnip::KeepItOdd*>(nullptr));
  if (strategy == "heavy_hitter" && golden.integer("attn_thresholding") == 1 && !evicts_with_free_slots(golden))
    return kvsnip::AnyPolicy(test::Dictated(kvsnip::make_policy(policy_spec(golden)), dictation));
  return std::nullopt;
}
/// [layers, rows, slots]: the positions of every kv_head, layer by layer.
std::vector<std::vector<Index>> choices_of_prompt(const Array<std::int32_t>& positions, Index kv_heads) {
  std::vector<std::vector<Index>> choices;
  for (Index i = 0; i < positions.dim(0) * kv_heads; ++i) {
    choices.emplace_back();
    for (Index slot = 0; slot < positions.dim(2); ++slot)
      choices.back().push_back(positions(i / kv_heads, std::min(i % kv_heads, positions.dim(1) - 1), slot));
  }
  return choices;
}
/// [steps, layers, rows]: the slot that every kv_head's token goes to, layer by layer.
std::vector<std::vector<Index>> choices_of_step(const Array<std::uint8_t>& slots, Index step, Index kv_heads) {
  std::vector<std::vector<Index>> choices;
  for (Index i = 0; i < slots.dim(1) * kv_heads; ++i)
    choices.push_back({slots(step, i / kv_heads, std::min(i % kv_heads, slots.dim(2) - 1))});
  return choices;
}

/// Where our run left the reference's: the position of the first token it shows in, and whether that may be.
class Parting {
 public:
  explicit Parting(const GoldenCase& golden) : prompt_length_(golden.integer("prompt_length")) {
    const std::vector<Index> steps = golden.integers("close_call_steps");
    if (golden.text("close_call_steps").starts_with("prompt"))
      allowed_after_ = prompt_length_ - 1;
    else if (!steps.empty())
      allowed_after_ = prompt_length_ + steps.front();
  }
  /// Something differs at `position`. @return whether it need not be reported
  bool note(Index position) {
    if (!parted_at_ && allowed_after_ && position > *allowed_after_) parted_at_ = position;
    return parted_at_.has_value();
  }
  bool parted() const { return parted_at_.has_value(); }
  Index step() const { return *parted_at_ - prompt_length_; }

 private:
  Index prompt_length_;
  std::optional<Index> allowed_after_, parted_at_;
};

/// [layers, rows, slots] with -1 for free slots, against what is held; one row stands for all kv_heads.
void check_positions(const Model& model, const Array<std::int32_t>& want, Index at, const std::string& when,
                     Parting& parting, Findings& findings) {
  for (Index layer = 0; layer < want.dim(0); ++layer)
    for (Index h = 0; h < model.config().kv_heads; ++h) {
      std::vector<Index> expected;
      for (Index slot = 0; slot < want.dim(2); ++slot)
        if (const Index position = want(layer, std::min(h, want.dim(1) - 1), slot); position >= 0)
          expected.push_back(position);
      const bool same = sorted(model.caches().begin()[layer].positions(h)) == sorted(expected);
      findings.check(same || parting.note(at), when, " layer ", layer, ", kv_head ", h, " holds other positions");
    }
}
/// [steps, layers, rows]: the slot that each step's token went to; ours has its number less `offset`.
void check_slots(const Model& model, const Array<std::uint8_t>& want, Index offset, Index step, Index position,
                 Parting& parting, Findings& findings) {
  for (Index layer = 0; layer < want.dim(1); ++layer)
    for (Index h = 0; h < model.config().kv_heads; ++h) {
      const Index slot = want(step, layer, std::min(h, want.dim(2) - 1)) - offset;
      const auto positions = model.caches().begin()[layer].positions(h);
      const bool written = slot >= 0 && slot < std::ssize(positions) && positions.begin()[slot] == position;
      findings.check(written || parting.note(position), "step ", step, ": layer ", layer, ", kv_head ", h,
                     " did not write slot ", slot);
    }
}

double mean(const std::vector<double>& values, Index from) {
  return std::accumulate(values.begin() + from, values.end(), 0.0) / static_cast<double>(std::ssize(values) - from);
}

void check_run(const GoldenCase& golden, Findings& findings) {
  const bool greedy = golden.text("kind") == "model_greedy";
  const Array<std::int32_t> tokens = golden.tensor<std::int32_t>(greedy ? "out_tokens" : "in_tokens");
  const Array<float> nll = golden.tensor<float>("out_nll");
  const Index prompt = golden.integer("prompt_length"), steps = golden.integer("decode_steps"),
              num_tokens = golden.integer("n_tokens");
  const Index unused = num_slots_never_used(golden);
  const auto dictation = std::make_shared<test::Dictation>();
  const auto dictated = dictated_policy(golden, dictation);
  Model model(stories260k(), dictated ? *dictated : kvsnip::make_policy(policy_spec(golden)),
              golden.integer("max_cache_length") - unused);
  const Index kv_heads = model.config().kv_heads;
  Parting parting(golden);
  std::vector<double> nlls;

  // The logits after position i are about token i + 1, unless that was the last one.
  const auto compare = [&](const Eigen::MatrixXf& logits, Index column, Index i) {
    if (i + 1 >= num_tokens) return;
    nlls.push_back(toy::negative_log_likelihood(logits.col(column), tokens(i + 1)));
    findings.check(test::close(nlls.back(), nll(i), 0, token_tolerance) || parting.note(i), "token ", i + 1,
                   ": -log p is ", nlls.back(), ", expected ", nll(i));
    if (!greedy || i + 1 < prompt || parting.parted()) return;
    Index likeliest = 0;
    logits.col(column).maxCoeff(&likeliest);
    findings.check(likeliest == tokens(i + 1), "token ", i + 1, " would be ", likeliest, ", expected ", tokens(i + 1));
  };

  const std::span<const toy::Token> all(tokens.data);
  if (golden.has_tensor("out_pos_after_prompt"))
    dictation->expect(choices_of_prompt(golden.tensor<std::int32_t>("out_pos_after_prompt"), kv_heads));
  const Eigen::MatrixXf& prompt_logits =
      model.forward(all.first(static_cast<std::size_t>(prompt)), {.all_logits = true});
  for (Index i = 0; i < prompt; ++i) compare(prompt_logits, i, i);
  if (golden.has_tensor("out_pos_after_prompt"))
    check_positions(model, golden.tensor<std::int32_t>("out_pos_after_prompt"), prompt, "after the prompt", parting,
                    findings);

  std::optional<Array<std::uint8_t>> slots;
  if (golden.has_tensor("out_evicted_slot")) slots = golden.tensor<std::uint8_t>("out_evicted_slot");
  for (Index step = 0; step < steps; ++step) {
    const Index position = prompt + step;
    if (slots) dictation->expect(choices_of_step(*slots, step, kv_heads));
    compare(model.forward(tokens(position)), 0, position);
    if (slots) check_slots(model, *slots, unused, step, position, parting, findings);
  }
  if (golden.has_tensor("out_final_pos"))
    check_positions(model, golden.tensor<std::int32_t>("out_final_pos"), prompt + steps, "at the end", parting,
                    findings);

  if (dictated) findings.check(dictation->asked > 0 && dictation->worst <= 1e-5, "a choice of the reference is worse than another by ", dictation->worst);

  const Index first_scored = golden.text("kind") == "model_prompt" ? prompt : 0;
  const double got = mean(nlls, first_scored), want = mean({nll.data.begin(), nll.data.end()}, first_scored);
  findings.check(std::ssize(nlls) == nll.dim(0), nlls.size(), " tokens were scored, expected ", nll.dim(0));
  findings.check(test::close(got, want, 0, parting.parted() ? parted_mean_tolerance : mean_tolerance), "the mean is ",
                 got, ", expected ", want);
  findings.check(test::close(want, golden.number("mean_nll"), 0, mean_tolerance),
                 "the case's mean_nll is not the mean of its out_nll: ", want);
  if (parting.parted())
    std::cout << "golden_model: " << golden.name() << " parts from the reference after a close call, at step "
              << parting.step() << '\n';
}

/// The same token by token, with the double in the place of our caches.
void check_run_with_free_slots(const GoldenCase& golden, Findings& findings) {
  const bool greedy = golden.text("kind") == "model_greedy";
  const auto tokens = golden.tensor<std::int32_t>(greedy ? "out_tokens" : "in_tokens"), final_positions = golden.tensor<std::int32_t>("out_final_pos");
  const auto nll = golden.tensor<float>("out_nll");
  const auto slots = golden.tensor<std::uint8_t>("out_evicted_slot");
  const auto h2o = kvsnip::make_policy(policy_spec(golden));
  test::SlotModel model(stories260k(), *h2o.as<kvsnip::H2O>(), golden.integer("max_cache_length"), golden.integer("global_tokens"), golden.integer("recent_window"));
  const Index prompt = golden.integer("prompt_length"), end = prompt + golden.integer("decode_steps"), heads = model.config().kv_heads;
  Parting parting(golden);
  std::vector<double> nlls;
  for (Index position = 0; position < end; ++position) {
    const Eigen::VectorXf logits = model.forward(tokens(position));
    for (Index layer = 0; layer < model.config().num_layers && position >= prompt; ++layer)
      for (Index h = 0; h < heads; ++h)
        findings.check(model.last_slot(layer, h) == slots(position - prompt, layer, h) || parting.note(position), "step ", position - prompt, ": layer ", layer, ", kv_head ", h,
                       " wrote slot ", model.last_slot(layer, h), ", expected ", static_cast<int>(slots(position - prompt, layer, h)));
    if (position + 1 >= golden.integer("n_tokens")) break;
    nlls.push_back(toy::negative_log_likelihood(logits, tokens(position + 1)));
    findings.check(test::close(nlls.back(), nll(position), 0, token_tolerance) || parting.note(position), "token ", position + 1, ": -log p is ", nlls.back(), ", expected ",
                   nll(position));
  }
  const double got = mean(nlls, 0), want = mean({nll.data.begin(), nll.data.end()}, 0);
  findings.check(std::ssize(nlls) == nll.dim(0), nlls.size(), " tokens were scored, expected ", nll.dim(0));
  findings.check(test::close(got, want, 0, parting.parted() ? parted_mean_tolerance : mean_tolerance), "the mean is ", got, ", expected ", want);
  if (parting.parted()) std::cout << "golden_model: " << golden.name() << " parts from the reference after a close call, at step " << parting.step() << '\n';
}

GoldenRunner runner_for(const GoldenCase& golden) {
  const std::string strategy = golden.text("strategy"), label = golden.text("kind") + " " + strategy;
  const bool covered = strategy == "full" || strategy == "recent_global" || strategy == "scissorhands" || strategy == "snapkv" ||
                       strategy == "l2" || strategy == "keep_it_odd" || strategy == "heavy_hitter";
  if (evicts_with_free_slots(golden)) return {label + ", thresholded", check_run_with_free_slots};
  return {label, covered ? check_run : nullptr};
}

}  // namespace

TEST_CASE("stories260K foretells real text as the reference model does, with every policy") {
  if (test::find_shared(checkpoint, "golden_model cases")) test::run_golden_cases("golden_model", runner_for);
}
