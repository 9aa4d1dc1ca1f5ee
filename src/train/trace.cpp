#include "train/trace.h"

#include <stdlib.h>
#include <torch/csrc/autograd/profiler_kineto.h>

namespace halfstep::train {

using torch::autograd::profiler::disableProfiler;

Trace::Trace() {
  // Else Kineto writes a line of its own onto the screen when it begins and ends. Read once, at its first
  // use.
  setenv("KINETO_LOG_LEVEL", "6", /*overwrite=*/0);
  using namespace torch::profiler::impl;
  const ProfilerConfig config(ProfilerState::KINETO, /*report_input_shapes=*/true);
  const std::set<ActivityType> activities{ActivityType::CPU};
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities);
}

Trace::~Trace() {
  if (running_) disableProfiler();
}

void Trace::write(const std::filesystem::path& path) {
  running_ = false;
  disableProfiler()->save(path.string());
}

}  // namespace halfstep::train
