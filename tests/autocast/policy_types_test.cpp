// Every row of the table, run: the type of the output and of each gradient is what the table says.
#include <gtest/gtest.h>
#include <halfstep/autocast.h>

#include <algorithm>

#include "support/any_machine.h"
#include "support/run_case.h"

namespace halfstep::testing {
namespace {

constexpr at::ScalarType kLowTypes[] = {at::kBFloat16, at::kHalf};

using Types = std::vector<at::ScalarType>;

Outcome run_in_scope(const OpCase& op_case, const Types& types, at::ScalarType low, const OpPolicy& policy) {
  return run_case(op_case, types, [&] { return std::make_unique<AutocastScope>(low, policy, kAnyMachine); });
}

/// The table's meaning, written down a second time. AsIs rows are given tensors of one type.
at::ScalarType expected_type(OpRule rule, const Types& given, at::ScalarType low) {
  if (rule == OpRule::Low) return low;
  if (rule == OpRule::Fp32) return at::kFloat;
  const bool all_low = std::all_of(given.begin(), given.end(), [low](auto type) { return type == low; });
  return all_low ? low : at::kFloat;
}

class PolicyTypes : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Low, PolicyTypes, ::testing::ValuesIn(kLowTypes),
                         [](const auto& info) { return std::string(c10::toString(info.param)); });

TEST_P(PolicyTypes, OutputsAndGradientsHaveTheTypesOfTheTable) {
  const at::ScalarType low = GetParam(), other_low = low == at::kHalf ? at::kBFloat16 : at::kHalf;
  const OpPolicy policy = OpPolicy::standard();
  for (const OpCase& op_case : op_cases()) {
    if (low == at::kHalf && !op_case.has_fp16_kernel) continue;
    const OpRule rule = policy.rule(op_case.op);
    std::vector<Types> inputs = {{at::kFloat}, {low}};
    if (rule != OpRule::AsIs)
      inputs.insert(inputs.end(), {{low, at::kFloat}, {at::kFloat, low}, {low, other_low}});
    for (const Types& given : inputs) {
      SCOPED_TRACE(::testing::Message() << op_case.op << " of " << ::testing::PrintToString(given));
      const Outcome outcome = run_in_scope(op_case, given, low, policy);
      EXPECT_EQ(outcome.error, "");
      if (!outcome.error.empty()) continue;
      if (!c10::isIntegralType(outcome.output.scalar_type(), /*includeBool=*/true)) {
        Types seen;  // a call with one tensor is dealt only the first type
        for (const at::Tensor& leaf : outcome.leaves) seen.push_back(leaf.scalar_type());
        EXPECT_EQ(outcome.output_type(), expected_type(rule, seen, low));
      }
      for (const at::Tensor& leaf : outcome.leaves) {
        if (!op_case.differentiable) continue;
        ASSERT_TRUE(leaf.grad().defined());
        EXPECT_EQ(leaf.grad().scalar_type(), leaf.scalar_type());
        EXPECT_TRUE(leaf.grad().isfinite().all().item<bool>());
      }
    }
  }
}

// A row can be given any rule; whether LibTorch has a kernel for the result is another matter.
TEST_P(PolicyTypes, ChangedRowIsObeyed) {
  const at::ScalarType low = GetParam();
  const at::Tensor x = at::rand({3, 4}), x_low = x.to(low);
  auto policy = OpPolicy::standard();
  policy.set("softmax", OpRule::Low)
      .set("mm", OpRule::Fp32)
      .set("exp", OpRule::AsIs)
      .set("log", OpRule::Promote);
  const AutocastScope scope(low, policy, kAnyMachine);
  EXPECT_EQ(at::softmax(x, -1).scalar_type(), low);
  EXPECT_EQ(at::mm(x_low, x_low.t()).scalar_type(), at::kFloat);
  EXPECT_EQ(at::exp(x_low).scalar_type(), low);
  EXPECT_EQ(at::log(x_low).scalar_type(), low);
  EXPECT_EQ(at::log(x).scalar_type(), at::kFloat);
}

TEST(PolicyTypes, AsIsRowLetsInnerOperationsFollowTheirOwnRows) {
  const at::Tensor x = at::rand({3, 4}).to(at::kBFloat16);
  auto policy = OpPolicy::standard();
  policy.set("layer_norm", OpRule::AsIs);
  {
    const AutocastScope scope(at::kBFloat16, policy, kAnyMachine);
    EXPECT_EQ(at::layer_norm(x, {4}).scalar_type(), at::kFloat) << "native_layer_norm inside it is FP32";
  }
  policy.set("native_layer_norm", OpRule::AsIs);
  const AutocastScope scope(at::kBFloat16, policy, kAnyMachine);
  EXPECT_EQ(at::layer_norm(x, {4}).scalar_type(), at::kBFloat16);
}

}  // namespace
}  // namespace halfstep::testing
