#include "kernels/dispatch.h"

#include <halfstep/error.h>

#include <cstdlib>

#include "base/cpu_features.h"

namespace halfstep {

const std::vector<const KernelTable*>& available_kernels() {
  static const std::vector<const KernelTable*> tables = [] {
    std::vector<const KernelTable*> found = {&kScalarKernels};
    if (cpu_features().avx2) found.push_back(&kAvx2Kernels);
    if (cpu_features().avx512) found.push_back(&kAvx512Kernels);
    if (may_use_amx_bf16()) found.push_back(&kAmxKernels);
    return found;
  }();
  return tables;
}

std::string available_isas() {
  std::string names;
  for (const KernelTable* table : available_kernels())
    names += (names.empty() ? "" : ", ") + std::string(table->isa);
  return names;
}

const KernelTable& kernels_of_isa(std::string_view isa) {
  const KernelTable* found = nullptr;
  for (const KernelTable* table : available_kernels())
    if (table->isa == isa) found = table;
  const bool known = isa == kAvx2Kernels.isa || isa == kAvx512Kernels.isa || isa == kAmxKernels.isa;
  HALFSTEP_CHECK(found, "HALFSTEP_ISA: ",
                 known ? "this processor lacks what it needs for '" : "there are no kernels called '", isa,
                 "'. Available here: ", available_isas(), ". Unset it to use the widest.");
  return *found;
}

const KernelTable& kernels() {
  static const KernelTable& chosen = []() -> const KernelTable& {
    const char* forced = std::getenv("HALFSTEP_ISA");
    return forced ? kernels_of_isa(forced) : *available_kernels().back();
  }();
  return chosen;
}

}  // namespace halfstep
