#include "scaling/skip_limit.h"

namespace halfstep::scaling {

void check_skip_limit(const char* whose, const LossScaling& options, const LossScaleState& state,
                      const std::string& parameter) {
  const int64_t limit = options.max_consecutive_skips;
  if (limit == 0 || state.consecutive_skips < limit) return;
  // BF16 and FP32 have a scale that cannot move.
  const bool scaled = options.floor < options.cap;
  const std::string scale =
      scaled ? detail::concat(" The loss scale is now ", state.loss_scale, " (floor ", options.floor, ").")
             : "";
  throw SkipLimitError(
      detail::concat(
          whose, ": ", state.consecutive_skips,
          " steps in a row were skipped; the last time the gradient of ", parameter, " was not finite.",
          scale,
          " Training has stopped moving: look for an Inf in the forward pass, or lower the learning "
          "rate",
          scaled ? ", or train in BF16. LossScaling::max_consecutive_skips "
                   "(precision.loss_scale.max_consecutive_skips of a run) sets this limit."
                 : "."),
      parameter);
}

}  // namespace halfstep::scaling
