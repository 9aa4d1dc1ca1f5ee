#include "cli/progress.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>

namespace halfstep::cli {
namespace {

constexpr double kSecondsOnTerminal = 0.2, kSecondsElsewhere = 10;

double since(std::chrono::steady_clock::time_point then) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - then).count();
}

}  // namespace

Progress::Progress(uint64_t total_bytes) : total_bytes_(total_bytes), terminal_(isatty(STDERR_FILENO) == 1) {}

double Progress::seconds() const { return since(begin_); }

void Progress::show(uint64_t bytes, uint64_t tokens) {
  if (since(last_) < (terminal_ ? kSecondsOnTerminal : kSecondsElsewhere)) return;
  last_ = Clock::now();
  shown_ = true;
  const double done = static_cast<double>(bytes), rate = done / seconds();
  const char *const begin = terminal_ ? "\r\033[K" : "", *const end = terminal_ ? "" : "\n";
  if (total_bytes_ == 0) {
    std::fprintf(stderr, "%stokenize: %.1f MB, %.3g tokens, %.1f MB/s%s", begin, done / 1e6,
                 static_cast<double>(tokens), rate / 1e6, end);
  } else {
    const double total = static_cast<double>(total_bytes_);
    std::fprintf(stderr, "%stokenize: %.0f%% of %.1f MB, %.3g tokens, %.1f MB/s, %.0f s left%s", begin,
                 100 * done / total, total / 1e6, static_cast<double>(tokens), rate / 1e6,
                 std::ceil((total - done) / rate), end);
  }
  std::fflush(stderr);
}

void Progress::finish() {
  if (terminal_ && shown_) std::fputs("\r\033[K", stderr);
}

}  // namespace halfstep::cli
