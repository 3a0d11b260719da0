// A policy that scores as P does, and is then told what to do: for references whose choices among equals are not ours.
// What it is told must be among the best choices by P's own scores.
#pragma once

#include <kvsnip/policy.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "record_scores.hpp"

namespace test {

using kvsnip::Index;

/// What the next choices must be, in the order in which they are asked for: kv_head by kv_head, layer by layer.
struct Dictation {
  /// While decoding the slot of the one victim; at a compaction the positions that stay.
  std::vector<std::vector<Index>> choices;
  std::size_t next = 0;
  double worst = 0;  ///< by how much, in relation to the scores, a choice was worse than the best one; 0 among equals
  int asked = 0;

  void expect(std::vector<std::vector<Index>> coming) { choices = std::move(coming), next = 0; }
};

template <class P>
class Dictated : public RecordScores<P> {
 public:
  Dictated(P policy, std::shared_ptr<Dictation> dictation) : RecordScores<P>(std::move(policy)), dictation_(std::move(dictation)) {}

  void score(Index kv_head, const kvsnip::SlotsView& slots, std::span<float> out) {
    RecordScores<P>::score(kv_head, slots, out);
    const std::vector<Index>& told = dictation_->choices.at(dictation_->next++);
    ++dictation_->asked;
    const bool decode = slots.phase == kvsnip::Phase::decode;
    std::vector<bool> goes(out.size());
    for (std::size_t slot = 0; slot < out.size(); ++slot)
      goes[slot] = decode ? static_cast<Index>(slot) == told.front() : std::find(told.begin(), told.end(), slots.positions[slot]) == told.end();
    judge(slots, out, goes);
    for (std::size_t slot = 0; slot < out.size(); ++slot) out[slot] = goes[slot] ? -1.0f : 0.0f;
  }

 private:
  /// Nothing that goes may score above anything that could have gone and stays.
  void judge(const kvsnip::SlotsView& slots, std::span<const float> scores, const std::vector<bool>& goes) const {
    const kvsnip::Protection p = this->protection(slots.phase);
    std::vector<Index> newest(slots.positions.begin(), slots.positions.end());
    std::sort(newest.begin(), newest.end(), std::greater<>());
    const Index window = slots.phase == kvsnip::Phase::decode ? 0 : p.observation_window;
    const Index recents = std::min<Index>(std::max(p.recent_window - 1, window), slots.size());  // one token comes, or is to come
    float best_gone = -std::numeric_limits<float>::infinity(), worst_kept = std::numeric_limits<float>::infinity();
    for (std::size_t slot = 0; slot < goes.size(); ++slot) {
      const Index position = slots.positions[slot];
      const bool is_protected = position < p.num_sinks || (recents > 0 && position >= newest[static_cast<std::size_t>(recents - 1)]);
      if (goes[slot]) best_gone = std::max(best_gone, is_protected ? std::numeric_limits<float>::infinity() : scores[slot]);
      else if (!is_protected) worst_kept = std::min(worst_kept, scores[slot]);
    }
    if (best_gone > worst_kept)
      dictation_->worst = std::max(dictation_->worst, static_cast<double>(best_gone - worst_kept) / (std::abs(static_cast<double>(worst_kept)) + 1e-30));
  }

  std::shared_ptr<Dictation> dictation_;
};

}  // namespace test
