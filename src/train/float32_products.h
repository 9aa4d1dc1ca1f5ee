// LibTorch's one setting for products of FP32 tensors, held for a while.
#pragma once

#include <ATen/Context.h>
#include <halfstep/precision.h>

namespace halfstep::train {

/// Sets it for the whole process and puts it back. Several may live at a time if they ask for the same.
class Float32ProductsGuard {
 public:
  explicit Float32ProductsGuard(Float32Products products);
  ~Float32ProductsGuard();
  Float32ProductsGuard(const Float32ProductsGuard&) = delete;
  Float32ProductsGuard& operator=(const Float32ProductsGuard&) = delete;
};

}  // namespace halfstep::train
