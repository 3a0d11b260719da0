// What a model's caches held and attended to, step by step, and how the report writes it down.
#pragma once

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../toy_transformer/weights.hpp"
#include "json.hpp"

namespace toy {

/// One sequence from its start. Heads are those of all layers: head layer * kv_heads + kv_head.
struct Recording {
  struct Step {
    Index new_tokens = 0;                      ///< read in this step
    std::vector<std::vector<Index>> held;      ///< (heads)(slots) positions when the step was over, ascending
    std::vector<std::vector<double>> weights;  ///< (heads)(positions held before the step, and the new ones), ascending: what the
                                               ///< step's last query gave each, mean over the query group. Or empty: not known
  };

  std::vector<std::pair<std::string, std::string>> facts;  ///< what to say about the run: {"policy", "scissorhands"}
  Index num_layers = 0, kv_heads = 0;
  std::vector<std::string> texts;  ///< (tokens) bytes; position p's is texts[p]
  std::vector<Step> steps;
};

namespace detail {

/// "3-9 17": the positions of `before` that are not in `after`, both ascending.
inline std::string gone_ranges(std::span<const Index> before, std::span<const Index> after) {
  std::vector<Index> gone;
  std::set_difference(before.begin(), before.end(), after.begin(), after.end(), std::back_inserter(gone));
  std::string out;
  for (std::size_t first = 0, end; first < gone.size(); first = end) {
    end = first + 1;
    while (end < gone.size() && gone[end] == gone[end - 1] + 1) ++end;
    out += fmt::format("{}{}", out.empty() ? "" : " ", gone[first]);
    if (end - first > 1) out += fmt::format("-{}", gone[end - 1]);
  }
  return out;
}

/// Weights in units of 1/1000, nearest, a digit of base 62 each (0-9 A-Z a-z); from 61 on 'z' and two digits.
inline std::string weight_digits(std::span<const double> weights) {
  constexpr std::string_view digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  std::string out;
  for (const double weight : weights) {
    const std::size_t units = static_cast<std::size_t>(std::lround(1000 * std::clamp(weight, 0.0, 1.0)));
    if (units < 61) out += digits[units];
    else out.append({'z', digits[units / 62], digits[units % 62]});
  }
  return out;
}

inline std::string json_strings(std::span<const std::string> texts) {
  std::string out = "[";
  for (const std::string& text : texts) out += (out.size() > 1 ? "," : "") + json_string(text);
  return out + "]";
}

}  // namespace detail

/// A step says which positions it lost, not which it holds: 64 slots of 20 heads over 400 steps take 100 kB so.
///
///   {"facts": [["policy", "full"]], "layers": 5, "kv_heads": 4, "tokens": ["Once", ...],
///    "steps": [{"new": 17, "gone": ["3-9 12", ...by head], "weights": ["z7f0a1", ...by head]}, ...]}
inline std::string recording_json(const Recording& recording) {
  const std::size_t heads = static_cast<std::size_t>(recording.num_layers * recording.kv_heads);
  Index seen = 0;
  std::vector<std::vector<Index>> held(heads);
  std::string steps;
  for (const Recording::Step& step : recording.steps) {
    std::vector<std::string> gone, weights;
    for (std::size_t head = 0; head < heads; ++head) {
      std::vector<Index>& positions = held[head];
      positions.resize(positions.size() + static_cast<std::size_t>(step.new_tokens));
      std::iota(positions.end() - step.new_tokens, positions.end(), seen);
      gone.push_back(detail::gone_ranges(positions, step.held[head]));
      if (!step.weights.empty()) weights.push_back(detail::weight_digits(step.weights[head]));
    }
    held = step.held;
    seen += step.new_tokens;
    steps += fmt::format("{}\n{{\"new\": {}, \"gone\": {}, \"weights\": {}}}", steps.empty() ? "" : ",", step.new_tokens, detail::json_strings(gone),
                         detail::json_strings(weights));
  }
  std::string facts;
  for (const auto& [name, value] : recording.facts)
    facts += fmt::format("{}[{}, {}]", facts.empty() ? "" : ", ", json_string(name), json_string(value));
  return fmt::format("{{\"facts\": [{}], \"layers\": {}, \"kv_heads\": {}, \"tokens\": {},\n\"steps\": [{}]}}", facts, recording.num_layers,
                     recording.kv_heads, detail::json_strings(recording.texts), steps);
}

}  // namespace toy
