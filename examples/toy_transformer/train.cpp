// Trains the demo's built-in model from nothing, on documents of the toy world made as it goes.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <limits>
#include <string>

#include "arguments.hpp"
#include "checkpoint.hpp"
#include "trainer.hpp"

namespace {

using toy::Index;

constexpr const char* usage = R"(toy_train: trains the toy world's model, a few minutes on two cores

  --out FILE        where the weights go, and every 100 steps the state of the training, as FILE.state (toy_world.bin)
  --seed N          of the weights to start from and of the documents (1)
  --resume          go on from FILE.state
  --stop-after N    steps; the state is saved, to be resumed (none)
  --documents N     held-out ones for the examination at the end (300)
  --help
)";

struct Options {
  std::string out = "toy_world.bin";
  std::uint64_t seed = 1;
  Index stop_after = std::numeric_limits<Index>::max(), documents = 300;
  bool resume = false, help = false;
};

Options parse(toy::Arguments arguments) {
  Options options;
  while (arguments.next()) {
    if (arguments.is_switch("--help")) options.help = true;
    else if (arguments.is_switch("--resume")) options.resume = true;
    else if (arguments.is("--out")) options.out = arguments.text();
    else if (arguments.is("--seed")) options.seed = arguments.integer<std::uint64_t>(0);
    else if (arguments.is("--stop-after")) options.stop_after = arguments.integer<Index>(1);
    else if (arguments.is("--documents")) options.documents = arguments.integer<Index>(1, 1'000'000);
    else arguments.unknown();
  }
  return options;
}

void print_progress(const toy::Trainer::Progress& p, double seconds, std::size_t stages) {
  // About a thousand steps all in all; the last stage's cost three times as much as the others'.
  const double total = 200 * 3 + std::max<double>(780, static_cast<double>(p.steps) + 20);
  const double done = p.stage + 1 == stages ? total - 3 * static_cast<double>(200 - p.steps_in_stage) : static_cast<double>(p.steps);
  fmt::print(stderr, "step {}, {} tokens, stage {} of {}: loss {:.3f}, right {:.1f} %; about {:.0f} s left\n", p.steps, p.tokens, p.stage + 1, stages, p.loss,
             100 * p.accuracy, seconds * (total / std::max(done, 1.0) - 1));
}

void run(const Options& options) {
  const std::string state = options.out + ".state";
  const auto& stages = toy::toy_world_stages();
  toy::Trainer trainer(toy::toy_world_config(), stages, options.seed);
  if (options.resume) trainer.resume(state);

  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  double reported = 0;
  while (!trainer.done() && trainer.progress().steps < options.stop_after) {
    trainer.step();
    if (trainer.progress().steps % 100 == 0) trainer.save(state);
    if (seconds() > reported + 2 && !trainer.done()) print_progress(trainer.progress(), reported = seconds(), stages.size());
  }
  const toy::Trainer::Progress& progress = trainer.progress();
  if (!trainer.done()) {
    trainer.save(state);
    fmt::print("stopped after {} steps; --resume goes on from {}\n", progress.steps, state);
    return;
  }
  toy::save_checkpoint(options.out, trainer.weights());
  std::filesystem::remove(state);
  fmt::print("seed {}, {} steps, {} tokens, {:.0f} s: {}\n\n| distance of the fact | questions | right |\n|---|---:|---:|\n", options.seed, progress.steps,
             progress.tokens, seconds(), options.out);
  const toy::Examination examination = toy::examine(trainer.weights(), options.seed, options.documents);
  for (std::size_t bin = 0; bin < examination.asked.size(); ++bin) {
    const Index from = static_cast<Index>(bin) * toy::Examination::bin_width, asked = examination.asked[bin];
    fmt::print("| {} to {} | {} | {:.1f} % |\n", from, bin + 1 == examination.asked.size() ? "" : std::to_string(from + toy::Examination::bin_width - 1), asked,
               100 * static_cast<double>(examination.right[bin]) / static_cast<double>(std::max<Index>(asked, 1)));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Options options = parse(toy::Arguments({argv + 1, argv + argc}));
    if (options.help) fmt::print("{}", usage);
    else run(options);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    fmt::print(stderr, "toy_train: {}\n", error.what());
  }
  return 2;
}
