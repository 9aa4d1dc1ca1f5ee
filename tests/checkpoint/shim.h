// The system calls that write, taken over by this program: counted, failed, cut short, written down, or the
// last thing that a process does.
//
// A program that links shim.cpp has its own open, write, fsync and so on, which every caller in it finds
// before the C library's. Calls outside the watched folder pass through.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::testing::shim {

enum class Call { Open, Write, Fsync, Close, Rename, Unlink, Mkdir, Rmdir, Flock, Truncate };

enum class Fault {
  None,
  KillBefore,  ///< SIGKILL instead of the call
  KillAfter,   ///< SIGKILL when it is done
  KillMidway,  ///< of a write: SIGKILL when half of it is done
  Fail,        ///< the call returns an error; close closes all the same, as Linux does
  FailMidway,  ///< a write that writes half, and the next call fails: a disk that fills up
  ShortWrite,  ///< of a write: half of it is done, and said to be
};

/// Something that was done to the folder, with paths as given.
struct Event {
  enum class Kind { Create, Write, SyncFile, SyncFolder, Rename, Unlink, Mkdir, Rmdir, Truncate, Saved } kind;
  std::string path{};
  std::string to{};                ///< of a rename
  uint64_t offset = 0;             ///< of a write; the step of Saved; the size of Truncate
  std::vector<std::byte> bytes{};  ///< of a write
};

struct Plan {
  std::string folder;  ///< watched
  Fault fault = Fault::None;
  int64_t at = -1;  ///< the call that it strikes, counted from 0
  int code = 0;     ///< errno of Fail
  bool record = false;

  /// Sabotage, to see that the sweeps find it: syncs that do nothing ...
  bool no_file_sync = false;
  bool no_folder_sync = false;
  /// ... and a protocol without names aside: this prefix (".aside-" or ".removed-") is dropped from every
  /// path.
  std::string dropped_prefix{};
};

void begin(Plan plan);

/// Stops watching. The calls that were watched, in order.
std::vector<Call> end();

/// What was written down since `begin`.
std::vector<Event> take_events();

/// Writes down that the checkpoint of a step was saved.
void note_saved(int64_t step);

}  // namespace halfstep::testing::shim
