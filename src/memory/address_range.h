// One long range of addresses, reserved at once and made usable from its start as it is needed.
#pragma once

#include <cstddef>

namespace halfstep {

class AddressRange {
 public:
  /// Reserves this many bytes, or as much of it as the system allows (`ulimit -v`), at least 1 MiB.
  /// Reserved addresses take neither memory nor any share of what the system promises to programs.
  explicit AddressRange(std::size_t wanted_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  std::byte* begin() const { return begin_; }
  std::size_t reserved_bytes() const { return reserved_bytes_; }
  std::size_t usable_bytes() const { return usable_bytes_; }

  /// Makes the next bytes after the usable ones usable too. False when the reservation ends there or the
  /// system refuses.
  bool extend(std::size_t bytes);

  /// The pages of [first, last) lose their content and their memory; they stay usable. False when the system
  /// refuses, as it does for pages locked by mlock.
  static bool give_back(std::byte* first, std::byte* last);

  static constexpr std::size_t kPageBytes = 4096;

 private:
  std::byte* begin_ = nullptr;
  std::size_t reserved_bytes_ = 0;
  std::size_t usable_bytes_ = 0;
};

}  // namespace halfstep
