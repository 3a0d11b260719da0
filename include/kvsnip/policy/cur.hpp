// CUR: tokens whose key and value are both large for their neighbourhood stay.
//
// Sengupta et al., "Value-Guided KV Compression for LLMs via Approximated CUR Decomposition" (CurDKV), arXiv:2509.15038.
// A token's leverage, what the rows of K and V owe to it, is approximated by its share of the squared norms, as in kvpress.
// Needs keys and values, each once: a decode step reads the new token's. State: two norms, 8 bytes per slot and kv_head.
// Differs from the paper: no random projection comes before the norms. Differs from kvpress: neighbours are those of the
// slots held when a choice is made, so that it works while decoding, too; recents are protected by default; with one
// neighbourhood for all (local_window = 0) keys and values are divided by their sums there as well.
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

#include "kvsnip/detail/slot_numbers.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

enum class CURLeverage { product, mean, key, value };
constexpr std::array<std::string_view, 4> enum_names(CURLeverage) { return {"product", "mean", "key", "value"}; }

struct CUROptions {
  CURLeverage leverage = CURLeverage::product;  ///< how a token's share of the keys and its share of the values make one score
  Index local_window = 16;                      ///< tokens of a neighbourhood [slots], >= 0; 0: all; kvpress uses 16
  Index num_sinks = 4;                          ///< first positions, never evicted [tokens], >= 0; kvpress uses 4
  Index recent_window = 10;                     ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;                    ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) {
    visit("leverage", options.leverage);
    visit("local_window", options.local_window);
    detail::each_usual(options, visit);
  }
};

class CUR : public detail::UsualOptions<CUROptions>, public detail::SlotNumbers<2, 0, true> {
 public:
  static constexpr std::string_view name = "cur";
  static constexpr std::string_view paper = "arXiv:2509.15038";
  static constexpr std::string_view needs = "keys and values";
  using Leverage = CURLeverage;

  explicit CUR(const CUROptions& options = {}) : UsualOptions("CUR", options) {
    detail::require(options.local_window >= 0, "CUR: local_window must be >= 0, got ", options.local_window);
  }

  void on_insert(Index kv_head, Index slot, const SlotsView& slots) {
    float* norms = enter(kv_head, slot);
    norms[0] = static_cast<float>(key(kv_head, slots, slot).cast<double>().norm());
    norms[1] = static_cast<float>(value(kv_head, slots, slot).cast<double>().norm());
  }
  /// The slot's leverage, in [0, 1]; that of all slots sums to 1 (to 0 if all keys or values are 0).
  void score(Index kv_head, const SlotsView& slots, std::span<float> out) {
    detail::require_vectors("CUR", slots);
    const std::span<const Index> order = by_position(kv_head, slots, [](Index) { return true; });
    const std::size_t window = options_.local_window > 0 ? static_cast<std::size_t>(options_.local_window) : order.size();
    double sum = 0;
    for (std::size_t first = 0; first < order.size(); first += window)
      sum += score_neighbours(numbers(kv_head), order.subspan(first, std::min(window, order.size() - first)), out);
    for (float& leverage : out) leverage = static_cast<float>(share(static_cast<double>(leverage), sum));
  }

 private:
  static double share(double part, double sum) { return sum > 0 ? part / sum : 0; }

  /// @param norms  (2, slots) of keys and values
  /// @return the sum of their scores
  double score_neighbours(const float* norms, std::span<const Index> neighbours, std::span<float> out) const {
    const auto square = [norms](Index slot, Index which) { return static_cast<double>(norms[2 * slot + which]) * static_cast<double>(norms[2 * slot + which]); };
    double keys = 0, values = 0, sum = 0;
    for (const Index slot : neighbours) keys += square(slot, 0), values += square(slot, 1);
    for (const Index slot : neighbours) {
      const double key = share(square(slot, 0), keys), value = share(square(slot, 1), values);
      const double leverage = options_.leverage == Leverage::product ? key * value
                              : options_.leverage == Leverage::mean  ? (key + value) / 2
                              : options_.leverage == Leverage::key   ? key
                                                                     : value;
      out[static_cast<std::size_t>(slot)] = static_cast<float>(leverage);
      sum += leverage;
    }
    return sum;
  }
};
static_assert(Policy<CUR> && ScoresSlots<CUR> && TracksInserts<CUR> && TracksGathers<CUR> && ReservesState<CUR>);

}  // namespace kvsnip
