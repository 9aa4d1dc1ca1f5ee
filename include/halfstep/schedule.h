// Learning-rate schedules: pure functions of the step.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <optional>
#include <string_view>

namespace halfstep {

/// By how much the learning rate is multiplied at a step. Remembers nothing, so a resumed run has the same
/// rate at the same step.
///
///     {.lr = 3e-4, .schedule = halfstep::Schedule::cosine({.warmup_steps = 100, .total_steps = 5000})}
///
/// Warm-up rises linearly: step s of w (from 0) has the factor (s + 1) / (w + 1), so the first step is not
/// wasted and step w is the first with the full rate.
struct HALFSTEP_API Schedule {
  /// How the factor moves after warm-up.
  enum class Shape {
    Constant,  ///< 1 after warm-up
    Linear,    ///< falls in a line to final_fraction at total_steps
    Cosine,    ///< falls along half a cosine to final_fraction at total_steps
    Wsd,       ///< warm-up, stable, decay: 1 until total_steps - decay_steps, then a line to final_fraction
  };

  /// How long its parts are.
  struct Spans {
    int64_t warmup_steps = 0;
    int64_t total_steps = 0;      ///< warm-up included; needed by all but Constant
    int64_t decay_steps = 0;      ///< Wsd alone
    double final_fraction = 0.0;  ///< of the full rate, from total_steps on
  };

  Shape shape = Shape::Constant;
  Spans spans{};

  /// One of each shape.
  static Schedule constant(int64_t warmup_steps = 0);
  static Schedule linear(Spans spans);
  static Schedule cosine(Spans spans);
  static Schedule wsd(Spans spans);

  /// The factor at a step, counted from 0.
  [[nodiscard]] double factor(int64_t step) const;

  /// Throws an Error that names the first field which makes no sense.
  void check() const;
};

/// "constant", "linear", "cosine", "wsd".
HALFSTEP_API std::string_view to_string(Schedule::Shape shape);

/// The shape of that name; nothing for an unknown one.
HALFSTEP_API std::optional<Schedule::Shape> schedule_shape(std::string_view name);

}  // namespace halfstep
