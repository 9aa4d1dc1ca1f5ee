// A Chrome trace of some steps.
#pragma once

#include <filesystem>

namespace halfstep::train {

/// Records every operation of this thread and of backward's, from construction until `write`. One at a time
/// in a process.
class Trace {
 public:
  Trace();
  ~Trace();
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;

  /// For chrome://tracing and ui.perfetto.dev. Whole, or a FileError and no file.
  void write(const std::filesystem::path& path);

 private:
  bool running_ = true;
};

}  // namespace halfstep::train
