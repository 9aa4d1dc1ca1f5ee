// A run's figures as a file for Prometheus' node exporter (textfile collector).
#pragma once

#include <halfstep/run_log.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <tuple>

namespace halfstep::log {

/// Takes what the log takes, and says how things stand. Counters begin at 0 in each process, as Prometheus
/// expects of a program that was started again.
class PrometheusFigures {
 public:
  /// `compute` is the run's precision.compute; the name of the run is on every sample.
  PrometheusFigures(std::string run, std::string unit, std::string compute, int64_t steps)
      : run_(std::move(run)), unit_(std::move(unit)), compute_(std::move(compute)), steps_(steps) {}

  void take(const StepRecord& record);
  void take(const EvaluationRecord& record) { evaluation_loss_ = record.loss; }
  void take(const ProbeRecord& record);
  void take(const FindingRecord& record) { ++findings_[static_cast<size_t>(record.finding.severity)]; }
  /// In the text format 0.0.4.
  std::string text(double unix_time) const;

 private:
  struct Lost {
    double underflow = 0, saturation = 0;
  };
  std::string run_, unit_, compute_;
  int64_t steps_ = 0, skipped_ = 0;
  std::optional<StepRecord> latest_{};
  std::optional<double> evaluation_loss_{};
  std::array<int64_t, 3> findings_{};
  std::map<std::tuple<std::string, std::string, std::string>, Lost> lost_{};  // by role, layer, format
};

}  // namespace halfstep::log
