// How many bytes of tensors a piece of code leaves alive.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>
#include <utility>

namespace halfstep::testing {

/// Counts this thread's allocations of tensor memory from its construction on, by LibTorch's own reports.
class LiveBytes {
 public:
  LiveBytes() : report_(std::make_shared<Report>()), guard_(c10::DebugInfoKind::PROFILER_STATE, report_) {}

  int64_t live() const { return report_->live; }
  int64_t peak() const { return report_->peak; }
  void forget_peak() { report_->peak = report_->live; }

 private:
  struct Report final : c10::MemoryReportingInfoBase {
    int64_t live = 0, peak = 0;
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
      live += bytes;
      peak = std::max(peak, live);
    }
    bool memoryProfilingEnabled() const override { return true; }
  };

  std::shared_ptr<Report> report_;
  c10::DebugInfoGuard guard_;
};

}  // namespace halfstep::testing
