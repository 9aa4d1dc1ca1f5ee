// How fast this machine reads and writes back memory that no cache holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace bench {

/// Arrays of FP32 with `bytes` together, each element of which gets `+= c`.
class ReadModifyWrite {
 public:
  ReadModifyWrite(std::int64_t bytes, at::Device device);

  void run();                  ///< on a CPU, on as many threads as LibTorch uses
  double bytes_moved() const;  ///< by one run: each byte is read once and written once

 private:
  at::Tensor array_;
};

}  // namespace bench
