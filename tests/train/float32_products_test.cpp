#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <torch/torch.h>

#include "support/error_of.h"

namespace halfstep {
namespace {

using testing::error_of;

TEST(Float32Products, HoldForTheLifeOfTheObjectAndAreThenPutBack) {
  torch::nn::Linear model(4, 4);
  const auto now = [] { return at::globalContext().float32MatmulPrecision(); };
  const auto before = now();
  {
    const MixedPrecision mp(Precision::tf32(), *model);
    EXPECT_EQ(now(), at::Float32MatmulPrecision::HIGH);
    {
      const MixedPrecision second(Precision::tf32(), *model);  // the same setting twice is no conflict
    }
    EXPECT_EQ(now(), at::Float32MatmulPrecision::HIGH);
    auto bf16_products = Precision::fp32();
    bf16_products.float32_products = Float32Products::Bf16;
    EXPECT_NE(error_of([&] { MixedPrecision(bf16_products, *model); }).find("one such setting per process"),
              std::string::npos);
  }
  EXPECT_EQ(now(), before);
}

TEST(Float32Products, Bf16ProductsStayWithinBf16sRounding) {
  torch::manual_seed(2);
  torch::nn::Linear model(4, 4);
  const auto a = torch::randn({256, 256}), b = torch::randn({256, 256});
  const auto exact = torch::mm(a.to(at::kDouble), b.to(at::kDouble));
  auto precision = Precision::fp32();
  precision.float32_products = Float32Products::Bf16;
  const MixedPrecision mp(precision, *model);
  const auto product = mp.forward([&] { return torch::mm(a, b); });
  EXPECT_EQ(product.scalar_type(), at::kFloat);
  // Both inputs rounded by 2^-9 at most (the two together 2^-8 and a little), 256 FP32 additions of 2^-24.
  const auto bound =
      torch::mm(a.abs().to(at::kDouble), b.abs().to(at::kDouble)) * (0x1.01p-8 + 256 * 0x1p-24);
  EXPECT_TRUE(((product.to(at::kDouble) - exact).abs() <= bound).all().item<bool>());
}

}  // namespace
}  // namespace halfstep
