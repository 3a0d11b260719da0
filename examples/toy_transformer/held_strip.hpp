// A picture of what a cache still holds: one character per stretch of the sequence.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "weights.hpp"

namespace toy {

inline constexpr const char* held_strip_legend = "' ' nothing held, '.' up to a third, ':' up to two thirds, '#' more";

/// @param positions    (slots) positions held, each in [0, tokens_seen), in any order
/// @param max_cells    longest picture, >= 1
/// @return min(tokens_seen, max_cells) characters, the first position on the left
inline std::string held_strip(std::span<const Index> positions, Index tokens_seen, Index max_cells = 64) {
  const Index cells = std::min(tokens_seen, max_cells);
  std::vector<Index> held(static_cast<std::size_t>(cells), 0);  ///< (cells) positions held
  for (const Index position : positions) ++held[static_cast<std::size_t>(position * cells / tokens_seen)];

  std::string strip;
  const auto first_position = [&](Index cell) { return (cell * tokens_seen + cells - 1) / cells; };
  for (Index cell = 0; cell < cells; ++cell) {
    const Index three_times = 3 * held[static_cast<std::size_t>(cell)];
    const Index all = first_position(cell + 1) - first_position(cell);
    strip += three_times == 0 ? ' ' : three_times <= all ? '.' : three_times <= 2 * all ? ':' : '#';
  }
  return strip;
}

}  // namespace toy
