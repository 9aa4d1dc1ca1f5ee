// What the table says about LibTorch, asked of a LibTorch into which Halfstep's kernels are not loaded: this
// program links the table alone.
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <halfstep/op_policy.h>

#include <algorithm>
#include <map>
#include <set>

#include "support/run_case.h"

namespace halfstep::testing {
namespace {

using Names = std::set<std::string>;

Names ops_with_kernel(c10::DispatchKey key) {
  Names names;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
    names.insert(name.name.substr(std::string("aten::").size()) +
                 (name.overload_name.empty() ? "" : "." + name.overload_name));
  }
  return names;
}

Names rows_listed(StockRule OpRow::* column) {
  Names names;
  for (const OpRow& row : op_table()) {
    if (row.*column != StockRule::NotListed) names.emplace(row.op);
  }
  return names;
}

Names only_in(const Names& a, const Names& b) {
  Names difference;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::inserter(difference, difference.end()));
  return difference;
}

TEST(EngineLists, EveryOpOfTheEnginesCpuListHasARowAndNoRowClaimsMore) {
  const Names engine = ops_with_kernel(c10::DispatchKey::AutocastCPU), rows = rows_listed(&OpRow::stock_cpu);
  EXPECT_EQ(only_in(engine, rows), Names{})
      << "new in LibTorch: give them rows in src/precision/op_table.cpp";
  EXPECT_EQ(only_in(rows, engine), Names{}) << "no longer in LibTorch";
  EXPECT_EQ(engine.size(), 127u);
}

TEST(EngineLists, EveryOpOfTheEnginesCudaListHasARowAndNoRowClaimsMore) {
  Names engine = ops_with_kernel(c10::DispatchKey::AutocastCUDA);
  const Names rows = rows_listed(&OpRow::stock_cuda);
  // Only a LibTorch with CUDA has it, and there it casts the weights of a recurrent layer into cuDNN's one
  // buffer: the policy leaves it alone.
  engine.erase("_cudnn_rnn");
  EXPECT_EQ(only_in(engine, rows), Names{})
      << "new in LibTorch: give them rows in src/precision/op_table.cpp";
  EXPECT_EQ(only_in(rows, engine), Names{}) << "no longer in LibTorch";
  EXPECT_EQ(engine.size(), 119u);
  const Names cpu = ops_with_kernel(c10::DispatchKey::AutocastCPU);
  EXPECT_EQ(engine.size() - only_in(engine, cpu).size(), 39u);
}

// The CUDA lists are macros of ATen/autocast_mode.h: written out here, they are the engine's own word.
#define HALFSTEP_NAMES_1(op) #op
#define HALFSTEP_NAMES_2(op, overload) #op "." #overload
#define HALFSTEP_PICK(a, b, chosen, ...) chosen
#define HALFSTEP_NAME(...) HALFSTEP_PICK(__VA_ARGS__, HALFSTEP_NAMES_2, HALFSTEP_NAMES_1, )(__VA_ARGS__),
#define HALFSTEP_SIGNATURE_NAME(function, name, ...) name,
const std::map<StockRule, std::vector<std::string>> kCudaRulesOfTheHeader = {
    {StockRule::Low, {AT_FORALL_LOWER_PRECISION_FP(HALFSTEP_NAME)}},
    {StockRule::Fp32,
     {AT_FORALL_FP32(HALFSTEP_NAME) AT_FORALL_FP32_SET_OPT_DTYPE(HALFSTEP_NAME)
          AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(HALFSTEP_SIGNATURE_NAME)}},
    {StockRule::Promote, {AT_FORALL_PROMOTE(HALFSTEP_NAME)}},
};

TEST(EngineLists, CudaRulesAreThoseOfTheEnginesHeader) {
  std::map<std::string, StockRule> expected = {
      // Registered by hand in autocast_mode.cpp, so in no macro.
      {"cudnn_convolution", StockRule::Low},
      {"cudnn_convolution_transpose", StockRule::Low},
      {"binary_cross_entropy", StockRule::Refused},
  };
  for (const auto& [rule, ops] : kCudaRulesOfTheHeader) {
    for (const auto& op : ops) expected[op] = rule;
  }
  for (const OpRow& row : op_table()) {
    if (row.stock_cuda == StockRule::NotListed) continue;
    ASSERT_TRUE(expected.contains(std::string(row.op))) << row.op;
    EXPECT_EQ(to_string(row.stock_cuda), to_string(expected.at(std::string(row.op)))) << row.op;
  }
  EXPECT_EQ(expected.size(), 119u);
}

const OpRow* row_of(std::string_view op) {
  const auto table = op_table();
  const auto row = std::find_if(table.begin(), table.end(), [op](const OpRow& r) { return r.op == op; });
  return row == table.end() ? nullptr : &*row;
}

TEST(OpCases, EveryRowHasACaseOrAReasonWhyNotAndEveryCaseCallsItsOp) {
  Names rows, cases;
  for (const OpRow& row : op_table()) rows.emplace(row.op);
  for (const auto& [op, reason] : ops_without_cpu_kernel()) {
    cases.emplace(op);
    const std::string full = "aten::" + std::string(op);
    EXPECT_FALSE(c10::Dispatcher::singleton()
                     .findSchemaOrThrow(full.c_str(), "")
                     .hasKernelForDispatchKey(c10::DispatchKey::CPU))
        << op << " has a CPU kernel: give it a case";
  }
  for (const OpCase& op_case : op_cases()) {
    EXPECT_TRUE(cases.emplace(op_case.op).second) << op_case.op << " has two entries";
    if (op_case.is_ours()) continue;
    const auto called = operations_called_by([&] {
      EXPECT_EQ(run_case(op_case, {at::kFloat}, [] { return 0; }).error, "") << op_case.op << " in FP32";
    });
    EXPECT_NE(std::find(called.begin(), called.end(), op_case.op), called.end())
        << "the case of " << op_case.op << " calls " << ::testing::PrintToString(called);
  }
  EXPECT_EQ(only_in(rows, cases), Names{}) << "rows without a case in tests/support/op_cases.cpp";
  EXPECT_EQ(only_in(cases, rows), Names{}) << "cases without a row";
}

/// Low and Fp32 fix the output's type whatever comes in; Promote lets the widest input decide. Inputs are
/// chosen so that doing nothing would give another type.
TEST(EngineLists, CpuRulesAreWhatBareAutocastDoes) {
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
    const auto bare = [low] { return std::make_unique<BareAutocast>(low); };
    for (const OpCase& op_case : op_cases()) {
      const OpRow& row = *row_of(op_case.op);
      if (row.stock_cpu == StockRule::NotListed || (low == at::kHalf && !op_case.has_fp16_kernel)) continue;
      const bool promotes = row.stock_cpu == StockRule::Promote;
      const at::ScalarType given = row.stock_cpu == StockRule::Low ? at::kFloat : low;
      const auto types = promotes ? std::vector{low, at::kFloat} : std::vector{given};
      const at::ScalarType expected = row.stock_cpu == StockRule::Low ? low : at::kFloat;
      const Outcome outcome = run_case(op_case, types, bare);
      EXPECT_EQ(outcome.error, "") << op_case.op << " under " << low;
      if (!outcome.error.empty() || c10::isIntegralType(outcome.output.scalar_type(), true)) continue;
      EXPECT_EQ(outcome.output_type(), expected) << op_case.op << " under " << low;
    }
  }
}

}  // namespace
}  // namespace halfstep::testing
