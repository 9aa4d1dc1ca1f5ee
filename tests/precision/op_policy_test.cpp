#include <gtest/gtest.h>
#include <halfstep/op_policy.h>

#include <set>
#include <string>

#include "support/error_of.h"

namespace halfstep {
namespace {

TEST(OpTable, NamesAreUniqueAndEveryReasonIsASentence) {
  std::set<std::string_view> seen;
  for (const OpRow& row : op_table()) {
    EXPECT_TRUE(seen.insert(row.op).second) << row.op;
    ASSERT_GT(row.reason.size(), 20u) << row.op;
    EXPECT_EQ(row.reason.back(), '.') << row.op;
    EXPECT_NE(row.rule, OpRule::Stock) << row.op << ": the standard policy is the same on every device";
  }
}

// What mixed-precision training asks for, as users state it, rather than as the table lists it.
TEST(OpPolicy, StandardRunsProductsLowAndSensitiveOpsInFp32) {
  const OpPolicy policy = OpPolicy::standard();
  for (const char* op :
       {"mm", "bmm", "matmul", "linear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}) {
    EXPECT_EQ(policy.rule(op), OpRule::Low) << op;
  }
  for (const char* op : {"layer_norm", "batch_norm", "group_norm", "rms_norm", "instance_norm", "softmax.int",
                         "log_softmax.int", "cross_entropy_loss", "nll_loss", "mse_loss", "log", "exp",
                         "pow.Tensor_Scalar", "sum", "cumsum", "mean", "norm.Scalar", "linalg_vector_norm"}) {
    EXPECT_EQ(policy.rule(op), OpRule::Fp32) << op;
  }
}

TEST(OpPolicy, EveryOpWithLossInItsNameIsFp32) {
  for (const OpRow& row : op_table()) {
    if (row.op.find("loss") != row.op.npos) {
      EXPECT_EQ(row.rule, OpRule::Fp32) << row.op;
    }
  }
}

TEST(OpPolicy, EngineLeavesEveryRowToTheEngine) {
  for (const OpRow& row : op_table()) EXPECT_EQ(OpPolicy::stock().rule(row.op), OpRule::Stock) << row.op;
}

TEST(OpPolicy, FullNameChangesOneRowAndBareNameAllOverloads) {
  OpPolicy policy = OpPolicy::standard();
  policy.set("pow.Scalar", OpRule::AsIs);
  EXPECT_EQ(policy.rule("pow.Scalar"), OpRule::AsIs);
  EXPECT_EQ(policy.rule("pow.Tensor_Scalar"), OpRule::Fp32);
  policy.set("pow", OpRule::Low);
  for (const char* op : {"pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor"}) {
    EXPECT_EQ(policy.rule(op), OpRule::Low) << op;
  }
  EXPECT_EQ(policy.rule("softmax.int"), OpRule::Fp32);
}

TEST(OpPolicy, ChangingACopyChangesNeitherTheOriginalNorThePreset) {
  const OpPolicy original = OpPolicy::standard();
  OpPolicy copy = original;
  copy.set("exp", OpRule::Low);
  EXPECT_EQ(original.rule("exp"), OpRule::Fp32);
  EXPECT_EQ(OpPolicy::standard(), original);
  EXPECT_FALSE(copy == original);
  EXPECT_EQ(copy.set("exp", OpRule::Fp32), original);
}

TEST(OpPolicy, UnknownNameIsRefusedWithTheNearestOne) {
  OpPolicy policy = OpPolicy::standard();
  EXPECT_NE(
      testing::error_of([&] { policy.set("layernorm", OpRule::Low); }).find("Did you mean 'layer_norm'?"),
      std::string::npos);
  EXPECT_NE(testing::error_of([&] { policy.set("sofmax", OpRule::Low); }).find("Did you mean 'softmax.int'?"),
            std::string::npos);
  EXPECT_NE(
      testing::error_of([&] { policy.set("pow.Tensr_Scalar", OpRule::Low); }).find("'pow.Tensor_Scalar'"),
      std::string::npos);
  EXPECT_NE(testing::error_of([&] { (void)policy.rule("softmax"); }).find("'softmax.int'"),
            std::string::npos);
  EXPECT_EQ(policy, OpPolicy::standard());
}

TEST(OpPolicy, AgreementWithStockComparesWhatHappensToTensors) {
  EXPECT_TRUE(agrees_with_stock(OpRule::Low, StockRule::Low));
  EXPECT_TRUE(agrees_with_stock(OpRule::AsIs, StockRule::NotListed));
  EXPECT_FALSE(agrees_with_stock(OpRule::Fp32, StockRule::NotListed));
  EXPECT_FALSE(agrees_with_stock(OpRule::Fp32, StockRule::Refused));
  for (const StockRule stock : {StockRule::NotListed, StockRule::Refused, StockRule::Promote}) {
    EXPECT_TRUE(agrees_with_stock(OpRule::Stock, stock));
  }
}

}  // namespace
}  // namespace halfstep
