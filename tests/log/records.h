// Records to write.
#pragma once

#include <halfstep/run_log.h>

#include <limits>

namespace halfstep::testing {

inline RunHeader some_header() {
  return {.configuration = "[train]\nsteps = 4  # \"few\"\n",
          .machine = {{"cpu", "two of them"}, {"threads", "2"}},
          .unit = "tokens",
          .ranks = 3};
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
      .saturated_share = 0.0625,
      .vanished_share = 0.03125,
      .stalled_most = "h.1.w",
      .saturated_most = "h.2.w",
      .vanished_most = "h.3.w",
      .share_of_peak = 0.5,
      .evaluation_loss = 2.5,
      .rank_losses = {0.25, std::numeric_limits<double>::quiet_NaN(), 3},
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

/// Of 0, NaN, 0.125, -0.125 and 3.5, counted by hand.
inline ProbeRecord some_probe(int64_t step) {
  ProbeRecord record{.step = step, .seconds = 1.0, .role = "gradient", .name = "h.0.\"w\""};
  TensorStats& stats = record.stats;
  stats.count = 5;
  stats.zeros = stats.exponents[0] = 1;
  stats.nans = stats.exponents[255] = 1;
  stats.sum = 3.5;
  stats.amax = 3.5f;
  stats.exponents[127 - 3] = 2;
  stats.exponents[127 + 1] = 1;
  const auto fractions = [&](int exponent) -> FractionCounts& {
    return stats.fractions[static_cast<size_t>(exponent - TensorStats::kLeastExponent)];
  };
  fractions(-3).powers_of_two = 2;
  fractions(1).ones_1 = fractions(1).ones_2 = 1;  // 1.75 is 1.11 in binary
  record.summed_parts = 7;
  record.sum_type = "bf16";
  return record;
}

inline ShadowRecord some_shadow(int64_t step) {
  return {.step = step,
          .seconds = 1.0,
          .precision = "mxfp8",
          .layer = "h.0.\"w\"",
          .output_error = 0.03125,
          .input_grad_error = 0.04,
          .weight_grad_error = 0.05,
          .forward_noise = 6e-4,
          .backward_noise = 7e-5,
          .gradient_share = 0.008};
}

inline CulpritRecord some_culprit(int64_t step) {
  return {.step = step,
          .seconds = 1.0,
          .rank = 3,
          .ranks = {3, 5},
          .op = "exp",
          .inside = "softmax",
          .layer = "after h.0.attn",
          .direction = "forward",
          .inputs = {"self: FP16 [8, 128], -3.1 to 71.2", "other \"input\""},
          .output = "FP16 [8, 128]: of 1,024 numbers 3 Inf and 0 NaN",
          .precision_is_cause = true,
          .verdict = "In FP64 the largest result is 8e+30: precision is the cause.",
          .propagated = 7};
}

inline Finding some_finding(int64_t step) {
  return {.code = "gradient-underflow",
          .severity = Severity::Serious,
          .step = step,
          .what = "31% of the gradient values are zero.",
          .evidence = "Of 1,000 values.",
          .remedy = "Raise the loss scale.",
          .layer = "h.0.attn",
          .op = "addmm"};
}

}  // namespace halfstep::testing
