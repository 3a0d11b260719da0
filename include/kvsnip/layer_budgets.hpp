// How many slots each layer may keep: plain functions, since a cache is one layer and knows of no other. Opt-in.
//
//   const auto budgets = kvsnip::layer_budgets::pyramid(32, 1024, {.prompt = 8192});
//   for (const Index budget : budgets) caches.emplace_back(shape, budget, policy);
//
// All return one budget a layer, in slots of a kv_head.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip::layer_budgets {

inline std::vector<Index> uniform(Index num_layers, Index budget) {
  detail::require(num_layers >= 1, "uniform: num_layers must be >= 1, got ", num_layers);
  detail::require(budget >= 1, "uniform: budget must be >= 1, got ", budget);
  return std::vector<Index>(static_cast<std::size_t>(num_layers), budget);
}

struct PyramidOptions {
  Index prompt = unlimited_budget;  ///< tokens there are: no layer gets more [tokens]
  Index observation_window = 8;     ///< what every layer keeps whole [tokens], >= 0
  double beta = 20;                 ///< the last layer gets 1 / beta of the mean, > 1; the paper uses 20
  /// The schedule shares out what the windows leave, in whole steps, and a prompt shorter than twice that is shared evenly
  /// (the paper's code). False: the window is part of the schedule, which is rounded layer by layer, and all is even if the
  /// last layer's share would not hold it (kvpress).
  bool window_apart = true;
  bool even_if_short = true;        ///< false: the pyramid whatever the prompt, with window_apart (AdaKV's code)
};

/// PyramidKV: lower layers attend widely and get more, the schedule falls by equal steps.
/// Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", arXiv:2406.02069, section 4.
/// @param budget  the mean, windows included; with whole steps the sum exceeds num_layers x budget by a few slots
inline std::vector<Index> pyramid(Index num_layers, double budget, const PyramidOptions& o = {}) {
  detail::require(num_layers >= 2, "pyramid: num_layers must be >= 2, got ", num_layers);
  detail::require(o.beta > 1, "pyramid: beta must be > 1, got ", o.beta);
  detail::require(o.observation_window >= 0, "pyramid: observation_window must be >= 0, got ", o.observation_window);
  const Index least = o.window_apart ? o.observation_window + 1 : 1;
  detail::require(budget >= static_cast<double>(least), "pyramid: budget must be >= ", least, o.window_apart ? " = observation_window + 1" : "", ", got ", budget);
  const auto window = static_cast<double>(o.observation_window), prompt = static_cast<double>(o.prompt);
  const double mean = o.window_apart ? budget - window : budget, apart = o.window_apart ? window : 0;
  const auto whole = [&](double x) { return o.window_apart ? std::floor(x) : x; };
  double lowest = whole(mean / o.beta), highest = 2 * mean - lowest;
  if (highest >= prompt - window) highest = prompt - window, lowest = 2 * mean - highest;
  const bool even = o.window_apart ? o.even_if_short && prompt < 2 * mean : !(prompt >= highest && highest >= lowest && lowest >= window);
  const double step = even ? 0 : whole((highest - lowest) / static_cast<double>(num_layers - 1)), first = even ? mean : highest;
  std::vector<Index> budgets;
  for (Index layer = 0; layer < num_layers; ++layer)
    budgets.push_back(static_cast<Index>(std::min(std::nearbyint(first - static_cast<double>(layer) * step) + apart, prompt)));
  return budgets;
}

/// cold-compress's way to say a budget: a share of max_length (up to 1) or slots (above), in multiples of 8.
inline Index from_share(double share, Index max_length) {
  detail::require(share > 0, "from_share: share must be > 0, got ", share);
  detail::require(max_length >= 1, "from_share: max_length must be >= 1, got ", max_length);
  const double slots = share <= 1 ? std::nearbyint(static_cast<double>(max_length) * share) : std::min(std::trunc(share), static_cast<double>(max_length));
  return std::min((static_cast<Index>(slots) + 7) / 8 * 8, max_length);
}

/// cold-compress's funnel: the first layer gets least, 1 / 14 of the mean, the last one twice the mean; none less than 256 or the
/// mean, for which the others pay. Reversed it is what cold-compress calls a pyramid. https://github.com/AnswerDotAI/cold-compress
/// @param budget  the mean, roughly: the sum comes out near num_layers x budget
inline std::vector<Index> funnel(Index num_layers, Index budget, Index max_length) {
  detail::require(num_layers >= 2, "funnel: num_layers must be >= 2, got ", num_layers);
  detail::require(budget >= 1 && budget <= max_length, "funnel: budget must be in [1, max_length = ", max_length, "], got ", budget);
  const double lowest = static_cast<double>(budget) / 14, highest = 2 * static_cast<double>(budget), step = (highest - lowest) / static_cast<double>(num_layers);
  const Index floor = std::min<Index>(256, budget);
  std::vector<Index> budgets;
  Index raised = 0, num_others = 0;
  for (Index layer = 0; layer < num_layers; ++layer) {
    const double share = layer == num_layers - 1 ? highest : lowest + static_cast<double>(layer) * step;
    const Index wanted = from_share(std::max(std::trunc(share), 1.0), max_length);
    raised += std::max<Index>(floor - wanted, 0), num_others += wanted >= floor;
    budgets.push_back(std::max(wanted, floor));
  }
  const Index due = num_others == 0 ? 0 : raised / num_others;
  for (Index& of_layer : budgets)
    if (of_layer > floor) of_layer = std::max(of_layer - due, floor);
  return budgets;
}

/// Each budget for as many layers in a row. @throws std::invalid_argument  num_layers is no multiple of their number
inline std::vector<Index> tile(const std::vector<Index>& budgets, Index num_layers) {
  const auto count = static_cast<Index>(budgets.size());
  detail::require(count >= 1 && num_layers >= 1 && num_layers % count == 0, "tile: num_layers must be a multiple of the number of budgets = ", count, ", got ", num_layers);
  std::vector<Index> result;
  for (const Index budget : budgets) result.insert(result.end(), static_cast<std::size_t>(num_layers / count), budget);
  return result;
}
/// The budgets again and again.
inline std::vector<Index> repeat(const std::vector<Index>& budgets, Index num_layers) {
  detail::require(!budgets.empty() && num_layers >= 1, "repeat: num_layers and the number of budgets must be >= 1, got ", num_layers, " and ", budgets.size());
  std::vector<Index> result;
  for (Index layer = 0; layer < num_layers; ++layer) result.push_back(budgets[static_cast<std::size_t>(layer) % budgets.size()]);
  return result;
}

/// What is left of `tokens` when this share of them is removed: rounded down, in double (kvpress).
inline Index after_removing(double removed_share, Index tokens) {
  detail::require(removed_share >= 0 && removed_share < 1, "after_removing: removed_share must be in [0, 1), got ", removed_share);
  return static_cast<Index>(static_cast<double>(tokens) * (1 - removed_share));
}

/// The schedule scaled so that all layers' keys and values take at most `bytes`; what rounding leaves goes to the first layers.
/// Positions and policy state come on top: bytes() of a cache tells.
/// @param element_bytes  sizeof of what is stored: 4, or 2 for half and bfloat16
/// @throws std::invalid_argument  bytes that do not hold one slot a layer
inline std::vector<Index> fit_bytes(Index bytes, const std::vector<Index>& schedule, const Shape& shape, Index element_bytes) {
  const Index slot = 2 * shape.kv_heads * shape.head_dim * element_bytes, num_layers = static_cast<Index>(schedule.size());
  detail::require(slot > 0 && num_layers > 0, "fit_bytes: shape, element_bytes and schedule must not be empty");
  detail::require(bytes / slot >= num_layers, "fit_bytes: bytes must be >= one slot a layer = ", slot * num_layers, ", got ", bytes);
  const Index slots = bytes / slot, sum = std::accumulate(schedule.begin(), schedule.end(), Index{0});
  std::vector<Index> budgets;
  for (const Index wanted : schedule)
    budgets.push_back(std::max<Index>(static_cast<Index>(static_cast<double>(slots) * (static_cast<double>(wanted) / static_cast<double>(sum))), 1));
  Index left = slots - std::accumulate(budgets.begin(), budgets.end(), Index{0});
  for (; left < 0; ++left) --*std::max_element(budgets.begin(), budgets.end());  // raised to 1 above
  for (std::size_t i = 0; left > 0; --left, i = (i + 1) % budgets.size()) ++budgets[i];
  return budgets;
}

}  // namespace kvsnip::layer_budgets
