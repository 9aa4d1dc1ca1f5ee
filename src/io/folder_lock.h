// One writer a folder.
#pragma once

#include <filesystem>

namespace halfstep::files {

/// Holds a folder's `.lock` as long as it lives, and the folder itself, so that a `.lock` removed by hand
/// lets no second one in. The kernel lets go of both when the process ends, however it ends, so a lock is
/// never left behind; the file is, and means nothing without the lock. A child that was forked while it was
/// held holds it too.
class FolderLock {
 public:
  /// An Error that tells the process which holds it, if another does.
  explicit FolderLock(const std::filesystem::path& folder);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  FolderLock() = default;

  int file_ = -1;
  int folder_ = -1;
};

}  // namespace halfstep::files
