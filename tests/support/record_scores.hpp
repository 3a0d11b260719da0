// A policy that remembers how it scored last, for tests that look at scores through the cache.
#pragma once

#include <kvsnip/policy.hpp>
#include <concepts>
#include <map>
#include <span>
#include <utility>
#include <vector>

namespace test {

template <class P>
class RecordScores : public P {
 public:
  RecordScores()
    requires std::default_initializable<P>
  = default;
  explicit RecordScores(P policy) : P(std::move(policy)) {}

  void score(kvsnip::Index kv_head, const kvsnip::SlotsView& slots, std::span<float> out)
    requires kvsnip::ScoresSlots<P>
  {
    P::score(kv_head, slots, out);
    last_[kv_head].assign(out.begin(), out.end());
  }
  void score_layer(std::span<const kvsnip::SlotsView> heads, std::span<const std::span<float>> out)
    requires kvsnip::ScoresLayers<P>
  {
    P::score_layer(heads, out);
    for (std::size_t h = 0; h < heads.size(); ++h) last_[static_cast<kvsnip::Index>(h)].assign(out[h].begin(), out[h].end());
  }
  void refine(kvsnip::Index kv_head, const kvsnip::SlotsView& slots, const kvsnip::Choice& choice, std::span<float> scores)
    requires kvsnip::RefinesScores<P>
  {
    P::refine(kv_head, slots, choice, scores);
    last_[kv_head].assign(scores.begin(), scores.end());
  }
  /// (slots) of the last choice made for this kv_head; empty when there was none.
  const std::vector<float>& last_scores(kvsnip::Index kv_head) const {
    static const std::vector<float> none;
    const auto found = last_.find(kv_head);
    return found == last_.end() ? none : found->second;
  }

 private:
  std::map<kvsnip::Index, std::vector<float>> last_;
};

}  // namespace test
