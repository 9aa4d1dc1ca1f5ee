#include <halfstep/error.h>
#include <halfstep/precision.h>

namespace halfstep {

Precision Precision::fp32() { return {}; }

Precision Precision::tf32() { return {.float32_products = Float32Products::Tf32}; }

Precision Precision::bf16(WeightStorage weights) { return {.compute = at::kBFloat16, .weights = weights}; }

Precision Precision::fp16(WeightStorage weights) {
  return {.compute = at::kHalf, .weights = weights, .loss_scaling = LossScaling{}};
}

void Precision::check() const {
  HALFSTEP_CHECK(compute == at::kFloat || compute == at::kBFloat16 || compute == at::kHalf,
                 "Precision: compute is ", compute, ", expected Float, BFloat16 or Half.");
  HALFSTEP_CHECK(compute != at::kFloat || weights == WeightStorage::Fp32,
                 "Precision: compute is Float, so weights must be WeightStorage::Fp32. Low-precision weights "
                 "belong to Precision::bf16() and Precision::fp16().");
  HALFSTEP_CHECK(
      compute != at::kHalf || weights != WeightStorage::SplitMaster,
      "Precision: a split master is the 16 bits below a BF16 weight; FP16 is not the upper half of "
      "FP32. Use WeightStorage::Fp32Master.");
  HALFSTEP_CHECK(compute == at::kFloat || float32_products == Float32Products::Full,
                 "Precision: float32_products is for FP32 training; with compute ", compute,
                 " set single operations through `ops`.");
  if (loss_scaling) loss_scaling->check();
}

std::string Precision::name() const {
  if (compute == at::kBFloat16) return "BF16";
  if (compute == at::kHalf) return "FP16";
  return float32_products == Float32Products::Full   ? "FP32"
         : float32_products == Float32Products::Tf32 ? "TF32"
                                                     : "FP32 with BF16 products";
}

}  // namespace halfstep
