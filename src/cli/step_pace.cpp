#include "cli/step_pace.h"

#include <algorithm>
#include <vector>

namespace halfstep::cli {
namespace {

// Enough for a median that is steady, few enough to follow a machine that others have begun to use too.
constexpr size_t kRecentSteps = 50;

}  // namespace

StepPace::StepPace(int64_t steps, int64_t steps_done) : steps_(steps), latest_step_(steps_done) {}

void StepPace::step(int64_t step, double seconds) {
  const int64_t steps = step - latest_step_;
  const double elapsed = seconds - latest_seconds_;
  if (!started_) {
    first_step_ = latest_pause_step_ = step;
    started_ = true;
  } else if (steps > 0 && elapsed >= 0) {
    // In a run that pauses after every step, the pause belongs to the step.
    if (paused_ && !recent_seconds_.empty()) {
      pauses_seconds_ += std::max(0.0, elapsed - static_cast<double>(steps) * median_seconds());
      latest_pause_step_ = step;
    } else {
      recent_seconds_.push_back(elapsed / static_cast<double>(steps));
      if (recent_seconds_.size() > kRecentSteps) recent_seconds_.pop_front();
    }
  }
  latest_step_ = step;
  latest_seconds_ = seconds;
  paused_ = false;
}

void StepPace::pause() { paused_ = true; }

double StepPace::median_seconds() const {
  std::vector<double> sorted(recent_seconds_.begin(), recent_seconds_.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::optional<double> StepPace::seconds_left() const {
  const int64_t left = steps_ - latest_step_;
  if (left <= 0 || recent_seconds_.empty()) return std::nullopt;
  // Over the steps up to the latest pause, not up to now: the estimate would sink until the next one comes.
  const int64_t paused_over = latest_pause_step_ - first_step_;
  const double pause_per_step = paused_over > 0 ? pauses_seconds_ / static_cast<double>(paused_over) : 0.0;
  return static_cast<double>(left) * (median_seconds() + pause_per_step);
}

}  // namespace halfstep::cli
