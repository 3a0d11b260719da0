// A figure of quality: what a policy made of a budget.
#pragma once

#include <limits>
#include <span>
#include <string>

#include "../toy_transformer/weights.hpp"
#include "json.hpp"

namespace toy {

struct QualityPoint {
  std::string measure;           ///< "answers right, asked at the end": points of one measure share a picture
  std::string policy;            ///< its spec; "full" is the line to compare with
  Index budget = 0;              ///< slots a kv_head may keep
  double bytes = 0;              ///< of keys and values held, all layers
  double value = 0;
  double low = std::numeric_limits<double>::quiet_NaN(), high = low;  ///< 95 % confidence interval of the value, if known
  bool higher_is_better = true;  ///< of the measure
};

/// An array of objects, one a line, in the order given: what --json writes and what the report embeds.
inline std::string quality_json(std::span<const QualityPoint> points) {
  std::string out = "[";
  for (const QualityPoint& p : points)
    out += fmt::format(R"({}{{"measure": {}, "better": "{}", "policy": {}, "budget": {}, "bytes": {}, "value": {}, "low": {}, "high": {}}})",
                       &p == points.data() ? "\n" : ",\n", json_string(p.measure), p.higher_is_better ? "higher" : "lower", json_string(p.policy),
                       p.budget, json_number(p.bytes), json_number(p.value), json_number(p.low), json_number(p.high));
  return out + "\n]";
}

}  // namespace toy
