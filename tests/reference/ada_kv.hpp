// AdaKV's shares, literally: places are given out one by one to the head whose next best score is highest.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <vector>

namespace reference {

using Index = std::ptrdiff_t;

struct AdaKVOptions {
  double floor = 0.2;
  bool blend = true;  ///< else a head's best are safe
  bool normalize = false;
};

/// @param scores  of each head's candidates
/// @return how many of them each head keeps
inline std::vector<Index> ada_kv(std::vector<std::vector<double>> scores, Index total, const AdaKVOptions& o) {
  const Index heads = std::ssize(scores), even = total / heads;
  const Index floor = static_cast<Index>(static_cast<double>(even) * o.floor);
  std::vector<Index> shares(scores.size(), 0);
  for (std::vector<double>& head : scores) {
    std::sort(head.begin(), head.end(), std::greater<>());
    double best = 0, all = 0;
    for (Index i = 0; i < std::ssize(head); ++i) all += head.begin()[i], best += i < even ? head.begin()[i] : 0;
    if (o.normalize && all != 0)
      for (double& score : head) score *= best / all;
  }
  for (Index h = 0; h < heads && !o.blend; ++h) {
    shares.begin()[h] = std::min(floor, std::ssize(scores.begin()[h]));
    total -= shares.begin()[h];
  }
  for (; total > 0; --total) {
    Index winner = -1;
    for (Index h = 0; h < heads; ++h) {
      const auto next = [&](Index head) { return scores.begin()[head].begin()[shares.begin()[head]]; };
      if (shares.begin()[h] < std::ssize(scores.begin()[h]) && (winner < 0 || next(h) > next(winner))) winner = h;
    }
    if (winner < 0) break;
    ++shares.begin()[winner];
  }
  for (Index h = 0; h < heads && o.blend; ++h) {
    const double blended = static_cast<double>(shares.begin()[h]) * (1 - o.floor) + static_cast<double>(floor);
    shares.begin()[h] = std::min(static_cast<Index>(std::nearbyint(blended)), std::ssize(scores.begin()[h]));
  }
  return shares;
}

/// No head below `least`: for every place given, the head with most gives one up.
inline std::vector<Index> with_at_least(std::vector<Index> shares, Index least) {
  for (std::size_t poor = 0; poor < shares.size(); ++poor)
    while (shares[poor] < least) {
      ++shares[poor];
      const auto rich = std::max_element(shares.begin(), shares.end());
      if (*rich > least) --*rich;
    }
  return shares;
}

}  // namespace reference
