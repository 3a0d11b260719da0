// ExternalScores: the user says what every token is worth. KVzip-like methods, which score with passes of their own, plug
// in here, and so do experiments.
#pragma once

#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "kvsnip/detail/require.hpp"
#include "kvsnip/detail/usual_options.hpp"
#include "kvsnip/policy.hpp"

namespace kvsnip {

struct ExternalScoresOptions {
  Index num_sinks = 0;        ///< first positions, never evicted [tokens], >= 0
  Index recent_window = 1;    ///< newest positions never evicted, the incoming one included [tokens], >= 0
  Index refill_interval = 0;  ///< victims chosen at once while decoding [slots], >= 1; 0: a 32nd of the budget

  static void each(auto& options, auto visit) { detail::each_usual(options, visit); }
};

/// Scores by position and kv_head, higher is kept. The user may still write them until they are asked for: at an over-long
/// prompt's last callback, and while decoding in update(). Positions past the last row are not judged, and outrank all.
class ExternalScores : public detail::UsualOptions<ExternalScoresOptions> {
 public:
  using Matrix = Eigen::MatrixXf;

  /// @param scores  (positions, kv_heads), or one column for all kv_heads; no NaN; shared with the user
  explicit ExternalScores(std::shared_ptr<const Matrix> scores, const ExternalScoresOptions& options = {})
      : UsualOptions("ExternalScores", options), scores_(std::move(scores)) {
    detail::require(scores_ != nullptr, "ExternalScores: scores must not be null");
  }
  explicit ExternalScores(Matrix scores, const ExternalScoresOptions& options = {})
      : ExternalScores(std::make_shared<const Matrix>(std::move(scores)), options) {}

  void score(Index kv_head, const SlotsView& slots, std::span<float> out) const {
    const Index column = scores_->cols() == 1 ? 0 : kv_head;
    detail::require_state(column < scores_->cols(), "ExternalScores: scores must have a column for kv_head ", kv_head, ", has ", scores_->cols());
    for (std::size_t slot = 0; slot < out.size(); ++slot) {
      const Index position = slots.positions[slot];
      out[slot] = position < scores_->rows() ? (*scores_)(position, column) : std::numeric_limits<float>::infinity();
    }
  }
  Index bytes() const { return scores_->size() * static_cast<Index>(sizeof(float)); }

 private:
  std::shared_ptr<const Matrix> scores_;
};
static_assert(Policy<ExternalScores> && ScoresSlots<ExternalScores> && ChoosesEviction<ExternalScores> && ProtectsSlots<ExternalScores>);

}  // namespace kvsnip
