// A disk that loses power: what of a recorded run is on it afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/shim.h"

namespace halfstep::testing {

/// What a disk may keep of that which was not synced. POSIX promises nothing about it, not even an order.
enum class Survivors {
  None,   ///< synced bytes and synced names alone
  All,    ///< everything, as after a kill
  Names,  ///< every name, none of the unsynced bytes: files of zeros at their full length
  Bytes,  ///< all bytes, none of the unsynced names
  Inner,  ///< all bytes and the names in folders of folders, not those in the run's folder itself
  Outer,  ///< all names in the run's folder, nothing within its folders
  Some,   ///< each name, each page of 4 KiB and each length as a coin falls
};

/// Files and folders as the kernel has them, and as the disk has them.
class DiskModel {
 public:
  /// An empty disk; `root` is the folder that events' paths begin with.
  explicit DiskModel(std::string root);

  void apply(const shim::Event& event);

  /// Writes what is left after a loss of power into an empty folder.
  void lose_power(Survivors survivors, uint64_t seed, const std::filesystem::path& into) const;

 private:
  using Id = int;
  using Names = std::map<std::string, Id>;
  struct NameChange {
    std::string removed, added;  // either may be empty; both together are one rename
    Id id = -1;
  };
  struct Node {
    bool folder = false;
    std::vector<std::byte> now{}, synced{};  // a file's
    Names names{}, synced_names{};           // a folder's
    std::vector<NameChange> unsynced{};
  };

  Node& at(const std::string& path);
  std::pair<Node*, std::string> parent_of(const std::string& path);
  void add(const std::string& path, bool folder);
  void change(Node& folder, NameChange change);
  static bool survives(Survivors survivors, int depth, std::mt19937_64& random);
  static void apply_to(Names& names, const NameChange& change);
  void write_out(Id id, Survivors survivors, std::mt19937_64& random, int depth,
                 const std::filesystem::path& into) const;
  std::vector<std::byte> bytes_left(const Node& file, Survivors survivors, std::mt19937_64& random) const;

  std::string root_;
  std::vector<Node> nodes_;
};

}  // namespace halfstep::testing
