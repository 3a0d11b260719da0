// Scores of different kinds on one scale.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "kvsnip/index.hpp"

namespace kvsnip::detail {

/// In place: less the mean, over the standard deviation (that of a sample, at least 1e-6), of all lists together.
template <class Lists>
void to_z_scores(Lists& lists) {
  double sum = 0, squares = 0;
  Index count = 0;
  for (const auto& list : lists)
    for (const float x : list) sum += static_cast<double>(x), ++count;
  if (count == 0) return;
  const double mean = sum / static_cast<double>(count);
  for (const auto& list : lists)
    for (const float x : list) squares += (static_cast<double>(x) - mean) * (static_cast<double>(x) - mean);
  const double deviation = std::max(std::sqrt(squares / static_cast<double>(std::max<Index>(count - 1, 1))), 1e-6);
  for (auto& list : lists)
    for (float& x : list) x = static_cast<float>((static_cast<double>(x) - mean) / deviation);
}

}  // namespace kvsnip::detail
