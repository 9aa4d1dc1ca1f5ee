#include "train/float32_products.h"

#include <halfstep/error.h>

#include <mutex>

namespace halfstep::train {
namespace {

const char* setting_of(Float32Products products) {
  switch (products) {
    case Float32Products::Full:
      return "highest";
    case Float32Products::Tf32:
      return "high";
    case Float32Products::Bf16:
      return "medium";
  }
  HALFSTEP_BUG("unknown Float32Products ", static_cast<int>(products));
}

const char* setting_of(at::Float32MatmulPrecision setting) {
  return setting == at::Float32MatmulPrecision::HIGHEST ? "highest"
         : setting == at::Float32MatmulPrecision::HIGH  ? "high"
                                                        : "medium";
}

struct Holders {
  std::mutex mutex;
  int count = 0;
  Float32Products products = Float32Products::Full;
  std::string before;
};

Holders& holders() {
  static Holders all;
  return all;
}

}  // namespace

Float32ProductsGuard::Float32ProductsGuard(Float32Products products) {
  Holders& all = holders();
  const std::lock_guard lock(all.mutex);
  HALFSTEP_CHECK(all.count == 0 || all.products == products,
                 "MixedPrecision: another one is training with float32 matmul precision '",
                 setting_of(all.products), "', this one asks for '", setting_of(products),
                 "'. LibTorch has one such setting a process: give both the same, or one process each.");
  if (all.count++ > 0) return;
  all.products = products;
  all.before = setting_of(at::globalContext().float32MatmulPrecision());
  at::globalContext().setFloat32MatmulPrecision(setting_of(products));
}

Float32ProductsGuard::~Float32ProductsGuard() {
  Holders& all = holders();
  const std::lock_guard lock(all.mutex);
  if (--all.count == 0) at::globalContext().setFloat32MatmulPrecision(all.before);
}

}  // namespace halfstep::train
