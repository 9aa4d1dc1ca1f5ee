#include "train/trace.h"

#include <fcntl.h>
#include <stdlib.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <unistd.h>

#include <fstream>

#include "io/file_error.h"

namespace halfstep::train {
namespace {

void create_empty(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) files::throw_file_error("create", path);
  ::close(file);
}

/// Whether the file is closed as an object of JSON: a write that failed has left it without its end.
bool has_its_end(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  for (auto at = static_cast<std::streamoff>(file.tellg()); at > 0; --at) {
    const int letter = file.seekg(at - 1).get();
    if (letter != '\n' && letter != ' ') return letter == '}';
  }
  return false;
}

}  // namespace

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
  const auto recorded = disableProfiler();
  // Kineto, as LibTorch 2.13 has it, returns without a word where it cannot write (trace_test.cpp).
  create_empty(path);
  recorded->save(path.string());
  if (has_its_end(path)) return;
  ::unlink(path.c_str());
  throw FileError(path.string() + ": only a part of the trace could be written. Is the disk full?", EIO);
}

}  // namespace halfstep::train
