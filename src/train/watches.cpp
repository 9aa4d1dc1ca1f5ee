#include "train/watches.h"

#include <halfstep/error.h>

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace halfstep::train {

void DivergenceWatch::see(int64_t step, double loss, bool skipped) {
  skips_ = skipped ? skips_ + 1 : 0;
  if (skipped) return;
  last_bad_ = !std::isfinite(loss);
  if (windows_ > 0 && !(loss <= limit())) {
    if (above_++ == 0) above_since_ = step, lowest_above_ = loss;
    // NaN stays only where there is nothing else.
    if (!(lowest_above_ <= loss)) lowest_above_ = loss;
  } else {
    above_ = 0;
    above_since_ = step + 1;
  }
  if (!std::isfinite(loss)) return;
  latest_.push_back(loss);
  if (latest_.size() > kWindow) latest_.erase(latest_.begin());
  if (latest_.size() < kWindow) return;
  const double mean = std::accumulate(latest_.begin(), latest_.end(), 0.0) / kWindow;
  double squares = 0;
  for (const double each : latest_) squares += (each - mean) * (each - mean);
  if (windows_++ == 0) first_mean_ = lowest_mean_ = mean;
  if (mean > lowest_mean_) return;
  lowest_mean_ = mean;
  margin_ = std::max(0.5 * (first_mean_ - mean), 6 * std::sqrt(squares / (kWindow - 1)));
}

bool DivergenceWatch::in_trouble() const { return last_bad_ || above_ > 0 || skips_ >= int64_t{kShort}; }

std::optional<std::string> DivergenceWatch::diverged() const {
  if (above_ < int64_t{kLong}) return std::nullopt;
  return detail::concat("The losses of the last ", above_, " steps, since step ", above_since_,
                        ", were all above ", limit(), " (the lowest of them ", lowest_above_,
                        "), and the run had come down from ", first_mean_, " to ", lowest_mean_,
                        ". Lower optimizer.lr or set optimizer.clip_norm; train.on_divergence=rollback goes "
                        "back by itself, and go_on lets the run continue.");
}

StateDict DivergenceWatch::state_dict() const {
  StateDict state;
  const at::Tensor latest = at::empty({static_cast<int64_t>(latest_.size())}, at::kDouble);
  std::copy(latest_.begin(), latest_.end(), latest.mutable_data_ptr<double>());
  state.set("latest", latest);
  state.set("first_mean", first_mean_);
  state.set("lowest_mean", lowest_mean_);
  state.set("margin", margin_);
  state.set("windows", windows_);
  state.set("above", above_);
  state.set("above_since", above_since_);
  state.set("lowest_above", lowest_above_);
  state.set("skips", skips_);
  state.set("last_bad", int64_t{last_bad_});
  return state;
}

void DivergenceWatch::load_state_dict(const StateDict& saved) {
  std::vector<std::string_view> names;
  const StateDict own = state_dict();
  for (const auto& [name, value] : own) names.push_back(name);
  saved.expect_exactly("divergence watch", names);
  const at::Tensor& latest = saved.tensor("latest");
  HALFSTEP_CHECK(
      latest.scalar_type() == at::kDouble && latest.dim() == 1 && latest.numel() <= int64_t{kWindow},
      "divergence watch: 'latest' is ", latest.scalar_type(), " of shape ", latest.sizes(), ".");
  const at::Tensor values = latest.contiguous();
  latest_.assign(values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
  first_mean_ = saved.real("first_mean");
  lowest_mean_ = saved.real("lowest_mean");
  margin_ = saved.real("margin");
  windows_ = saved.integer("windows");
  above_ = saved.integer("above");
  above_since_ = saved.integer("above_since");
  lowest_above_ = saved.real("lowest_above");
  skips_ = saved.integer("skips");
  last_bad_ = saved.integer("last_bad") != 0;
}

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
