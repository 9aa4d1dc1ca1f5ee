// What the program says to the shell. docs/training.md lists them.
#pragma once

namespace halfstep::cli {

enum ExitCode : int {
  kDone = 0,
  kFailed = 1,    ///< anything that has no code of its own
  kUsage = 2,     ///< the command line or the configuration is wrong
  kFiles = 3,     ///< data or a checkpoint: missing, damaged, or the disk refuses
  kDiverged = 4,  ///< too many steps in a row were skipped, or the loss rose for good
  kOutOfMemory = 5,
  kUnsaved = 6,      ///< a second Ctrl-C: ended at once, without saving
  kOutOfTime = 7,    ///< train.time_limit_minutes, after saving
  kSignalled = 128,  ///< plus the signal: interrupted, after saving
};

}  // namespace halfstep::cli
