// ml_dtypes in a child process: tools/ml_dtypes_codes.py at the other end of two pipes.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace halfstep::sweep {

/// FP32 bit patterns first, first + stride, ...
struct Range {
  std::uint32_t first = 0, stride = 1, count = 0;
};

class MlDtypesOracle {
 public:
  explicit MlDtypesOracle(const std::string& python);
  ~MlDtypesOracle();
  MlDtypesOracle(const MlDtypesOracle&) = delete;
  MlDtypesOracle& operator=(const MlDtypesOracle&) = delete;

  const std::string& versions() const { return versions_; }

  /// Asks for the codes of a range; the child works while the caller does something else.
  void request(Range range);
  /// Reads the answer piece by piece, in the order that the script's first comment says.
  void read(void* bytes, std::size_t count);

 private:
  std::string python_, versions_;
  pid_t child_ = -1;
  int to_child_ = -1, from_child_ = -1;
};

}  // namespace halfstep::sweep
