#include <halfstep/error.h>
#include <halfstep/schedule.h>

#include <cmath>
#include <iterator>
#include <numbers>

namespace halfstep {
namespace {

double between(double from, double to, double progress) { return from + (to - from) * progress; }

Schedule checked(Schedule schedule) {
  schedule.check();
  return schedule;
}

constexpr std::string_view kShapeNames[] = {"constant", "linear", "cosine", "wsd"};

}  // namespace

std::string_view to_string(Schedule::Shape shape) { return kShapeNames[static_cast<int>(shape)]; }

std::optional<Schedule::Shape> schedule_shape(std::string_view name) {
  for (int i = 0; i < static_cast<int>(std::size(kShapeNames)); ++i)
    if (kShapeNames[i] == name) return static_cast<Schedule::Shape>(i);
  return std::nullopt;
}

Schedule Schedule::constant(int64_t warmup_steps) {
  return checked({.shape = Shape::Constant, .spans = {.warmup_steps = warmup_steps}});
}
Schedule Schedule::linear(Spans spans) { return checked({.shape = Shape::Linear, .spans = spans}); }
Schedule Schedule::cosine(Spans spans) { return checked({.shape = Shape::Cosine, .spans = spans}); }
Schedule Schedule::wsd(Spans spans) { return checked({.shape = Shape::Wsd, .spans = spans}); }

double Schedule::factor(int64_t step) const {
  HALFSTEP_CHECK(step >= 0, "Schedule: step is ", step, ", expected a number from 0.");
  if (step < spans.warmup_steps) return static_cast<double>(step + 1) / (spans.warmup_steps + 1);
  if (shape == Shape::Constant) return 1.0;

  const int64_t decay_start =
      shape == Shape::Wsd ? spans.total_steps - spans.decay_steps : spans.warmup_steps;
  const int64_t decay_steps = spans.total_steps - decay_start;
  if (step >= spans.total_steps) return spans.final_fraction;
  if (step < decay_start) return 1.0;
  const double progress = static_cast<double>(step - decay_start) / decay_steps;
  if (shape == Shape::Cosine)
    return between(spans.final_fraction, 1.0, 0.5 * (1.0 + std::cos(std::numbers::pi * progress)));
  return between(1.0, spans.final_fraction, progress);
}

void Schedule::check() const {
  HALFSTEP_CHECK(spans.warmup_steps >= 0, "Schedule: warmup_steps is ", spans.warmup_steps,
                 ", expected at least 0.");
  if (shape == Shape::Constant) return;
  HALFSTEP_CHECK(spans.total_steps > spans.warmup_steps, "Schedule: total_steps is ", spans.total_steps,
                 ", expected more than the ", spans.warmup_steps, " of warm-up.");
  HALFSTEP_CHECK(spans.final_fraction >= 0 && spans.final_fraction <= 1, "Schedule: final_fraction is ",
                 spans.final_fraction, ", expected a number from 0 to 1.");
  HALFSTEP_CHECK(shape != Shape::Wsd ||
                     (spans.decay_steps >= 1 && spans.decay_steps <= spans.total_steps - spans.warmup_steps),
                 "Schedule: decay_steps is ", spans.decay_steps, ", expected a number from 1 to ",
                 spans.total_steps - spans.warmup_steps, ", which is total_steps less warm-up.");
}

}  // namespace halfstep
