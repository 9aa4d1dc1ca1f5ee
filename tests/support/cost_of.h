// Processor time and memory that a piece of code takes, in a process of its own.
#pragma once

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>

#include "support/sanitized.h"

namespace halfstep::testing {

struct Cost {
  double seconds = 0.0;    ///< of the processor: a busy machine does not change it
  double megabytes = 0.0;  ///< resident at the peak, with the test program itself
  bool ended_well = false;
};

inline Cost cost_of(const std::function<void()>& code) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      code();
      ::_exit(0);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      ::_exit(1);
    }
  }
  int status = 0;
  rusage usage{};
  ::wait4(child, &status, 0, &usage);
  const auto seconds = [](timeval time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return {.seconds = seconds(usage.ru_utime) + seconds(usage.ru_stime),
          .megabytes = static_cast<double>(usage.ru_maxrss) / 1024,
          .ended_well = WIFEXITED(status) && WEXITSTATUS(status) == 0};
}

/// What a file of any content may cost whoever opens it.
inline void expect_cheap(const char* what, const std::function<void()>& code) {
  if (kSanitized) GTEST_SKIP() << "a sanitizer's time and memory hide ours";
  const Cost cost = cost_of(code);
  std::printf("%s: %.2f s, %.0f MB\n", what, cost.seconds, cost.megabytes);
  EXPECT_TRUE(cost.ended_well) << what;
  EXPECT_LT(cost.seconds, 1.0) << what;
  EXPECT_LT(cost.megabytes, 200.0) << what;
}

}  // namespace halfstep::testing
