// Debian's Fashion-MNIST against Python's gzip and numpy.
#include <gtest/gtest.h>
#include <halfstep/data.h>

#include "support/python.h"

namespace halfstep {
namespace {

constexpr char kFolder[] = "/usr/share/datasets/fashion-mnist/";

TEST(FashionMnist, IsWhatPythonReads) {
  if (!std::filesystem::exists(kFolder)) GTEST_SKIP() << "apt-get install dataset-fashion-mnist";
  const auto told = testing::ask_python("tests/data/idx_oracle.py", {{"folder", kFolder}});
  ASSERT_EQ(told.size(), 4u);
  for (const auto& [name, expected] : told.items()) {
    const at::Tensor read = read_idx(kFolder + name);
    EXPECT_EQ(read.scalar_type(), at::kByte);
    EXPECT_EQ(read.sizes().vec(), expected["shape"].get<std::vector<int64_t>>()) << name;
    // Weights that no two places share make the sum one of the order too.
    const auto flat = read.flatten().to(at::kLong);
    const auto weights = at::arange(flat.numel(), at::kLong).remainder(10'007) + 1;
    EXPECT_EQ((flat * weights).sum().item<int64_t>(), expected["weighted_sum"].get<int64_t>()) << name;
  }
}

}  // namespace
}  // namespace halfstep
