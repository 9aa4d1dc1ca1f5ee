// More than 2^31 elements in one tensor: an index that is kept in 32 bits anywhere would show.
#include <gtest/gtest.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include <fstream>

namespace halfstep {
namespace {

int64_t available_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string name; file >> name;)
    if (name == "MemAvailable:") {
      int64_t kib = 0;
      file >> kib;
      return kib * 1024;
    }
  return 0;
}

TEST(Large, TensorOfMoreThanTwoToThe31ElementsIsUpdatedToItsEnd) {
  constexpr int64_t kElements = (int64_t{1} << 31) + 1000;
  constexpr int64_t kBytes = 4 * kElements;  // BF16 weights and BF16 gradients
  if (available_bytes() < kBytes + (int64_t{2} << 30))
    GTEST_SKIP() << "needs " << (kBytes >> 30) + 2 << " GiB of free memory, " << (available_bytes() >> 30)
                 << " are";
  // Built by hand: make_param would need the FP32 original beside it.
  const Param param{
      .name = "w", .working = torch::zeros({kElements}, at::kBFloat16), .storage = WeightStorage::Nearest};
  auto grad = torch::zeros({kElements}, at::kBFloat16);
  const int64_t places[] = {0, (int64_t{1} << 31) - 1, int64_t{1} << 31, kElements - 1};
  for (const int64_t place : places) grad[place] = 3.0;
  param.working.mutable_grad() = grad;
  SGD optimizer({param}, {.lr = 0.5});
  const auto grads = inspect_grads({param});
  EXPECT_EQ(grads.norm(), 6.0);  // sqrt(4 * 9)
  const auto report = optimizer.step(grads.unclipped(), {.stalls = true});
  EXPECT_EQ(report.stall().updates, 4);
  for (const int64_t place : places) EXPECT_EQ(param.working[place].item<float>(), -1.5f) << place;
  EXPECT_EQ(param.working[1].item<float>(), 0.0f);
  EXPECT_EQ(param.working[kElements - 2].item<float>(), 0.0f);
  grad[kElements - 1] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(inspect_grads({param}).first_bad(), "w");
}

}  // namespace
}  // namespace halfstep
