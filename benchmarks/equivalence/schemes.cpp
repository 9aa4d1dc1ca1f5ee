#include "schemes.h"

#include <halfstep/error.h>

#include <algorithm>

namespace bench {

using halfstep::MomentStorage;
using halfstep::Precision;
using halfstep::WeightStorage;

const std::vector<Scheme>& schemes() {
  static const std::vector<Scheme> all = {
      {.name = "fp32", .role = Role::Reference},
      {.name = "fp32_one_ulp", .flaw = Flaw::OneUlp},
      {.name = kDefaultScheme, .precision = Precision::bf16()},
      {.name = "bf16_fp32_master", .precision = Precision::bf16(WeightStorage::Fp32Master)},
      {.name = "bf16_autocast", .precision = Precision::bf16(WeightStorage::Fp32)},
      {.name = "fp16", .precision = Precision::fp16()},
      {.name = "bf16_kahan", .precision = Precision::bf16(WeightStorage::Kahan)},
      {.name = "bf16_stochastic", .precision = Precision::bf16(WeightStorage::Stochastic)},
      {.name = "bf16_bf16_moments", .precision = Precision::bf16(), .moments = MomentStorage::Bf16},
      {.name = "bf16_8bit_moments", .precision = Precision::bf16(), .moments = MomentStorage::Blockwise8},
      {.name = kPureBf16Scheme, .role = Role::Control, .precision = Precision::bf16(WeightStorage::Nearest)},
      {.name = "fp16_unscaled_twice",
       .role = Role::Control,
       .precision = Precision::fp16(),
       .flaw = Flaw::UnscaledTwice},
  };
  return all;
}

const Scheme& scheme_named(const std::string& name) {
  const auto found =
      std::find_if(schemes().begin(), schemes().end(), [&](const Scheme& s) { return s.name == name; });
  HALFSTEP_CHECK(found != schemes().end(), "equivalence: no scheme is called '", name, "'");
  return *found;
}

}  // namespace bench
