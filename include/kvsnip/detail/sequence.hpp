// Where a sequence is: what the planner must remember of it besides slots, and bring back when a step is taken back.
#pragma once

#include "kvsnip/policy.hpp"

namespace kvsnip::detail {

struct Sequence {
  Index start = 0;             ///< its first position
  Index next_position = 0;     ///< where it ended
  Index tokens_seen = 0;
  Index first_prompt_end = 0;  ///< the first prompt is [start, first_prompt_end)
  bool in_first_prompt = true;
  bool in_series = false;      ///< a `more` series goes on

  Sequence after(const StepInfo& step, bool more) const {
    Sequence next = *this;
    if (tokens_seen == 0) next.start = step.first_position;
    if (step.num_queries > 0) next.next_position = step.first_position + step.num_queries;
    next.tokens_seen += step.num_queries;
    if (in_first_prompt) {
      next.first_prompt_end = next.next_position;
      next.in_first_prompt = more || next.tokens_seen == 0;
    }
    next.in_series = more;
    return next;
  }
  bool is_sink(Index position, const Protection& p) const {
    return position < start + p.num_sinks || (p.keep_prompt && position < first_prompt_end);
  }
};

}  // namespace kvsnip::detail
