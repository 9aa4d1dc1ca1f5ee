// Records to write.
#pragma once

#include <halfstep/run_log.h>

namespace halfstep::testing {

inline RunHeader some_header() {
  return {.configuration = "[train]\nsteps = 4  # \"few\"\n",
          .machine = {{"cpu", "two of them"}, {"threads", "2"}}};
}

/// Every field is filled, and none twice with the same number.
inline StepRecord full_record(int64_t step) {
  return {
      .step = step,
      .seconds = 0.25 * static_cast<double>(step),
      .loss = 1.0 / 3.0,
      .lr = 3e-4,
      .grad_norm = 12.75,
      .items = 4096,
      .items_per_second = 16384.5,
      .loss_scale = 65536.0,
      .skipped = true,
      .why = "the gradient of 'h.0, w' is not finite",
      .parameter = "h.0, \"w\"",
      .stalled_share = 0.125,
      .share_of_peak = 0.5,
      .evaluation_loss = 2.5,
      .phases =
          {.forward = 0.1, .backward = 0.2, .inspect = 0.01, .step = 0.02, .data = 0.003, .other = 0.0004},
      .memory = MemoryRecord{.live_bytes = 30,
                             .peak_bytes = 40,
                             .classes = {{.name = "parameter", .live_bytes = 10, .peak_bytes = 11},
                                         {.name = "activation", .live_bytes = 20, .peak_bytes = 29}}}};
}

/// Only what every step has.
inline StepRecord plain_record(int64_t step) {
  return {.step = step, .seconds = 0.5 * static_cast<double>(step), .loss = 4.0, .lr = 1e-3, .items = 64};
}

}  // namespace halfstep::testing
