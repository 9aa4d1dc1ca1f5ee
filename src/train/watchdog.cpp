#include "train/watchdog.h"

#include <algorithm>
#include <utility>

namespace halfstep::train {

Watchdog::Watchdog(double limit_seconds, RunWatcher& watcher)
    : limit_seconds_(limit_seconds), watcher_(watcher) {
  if (limit_seconds > 0) thread_ = std::thread([this] { look(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    end_ = true;
  }
  ended_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::now(std::string doing) {
  const std::lock_guard lock(mutex_);
  doing_ = std::move(doing);
  since_ = Clock::now();
  told_seconds_ = 0;
}

void Watchdog::look() {
  const auto pause = std::chrono::duration<double>(std::clamp(limit_seconds_ / 4, 0.01, 5.0));
  std::unique_lock lock(mutex_);
  while (!ended_.wait_for(lock, pause, [&] { return end_; })) {
    const double seconds = std::chrono::duration<double>(Clock::now() - since_).count();
    if (doing_.empty() || seconds < limit_seconds_ || seconds < 2 * told_seconds_) continue;
    told_seconds_ = seconds;
    watcher_.stuck(doing_, seconds);
  }
}

}  // namespace halfstep::train
