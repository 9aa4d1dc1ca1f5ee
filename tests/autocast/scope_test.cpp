#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <halfstep/error.h>
#include <torch/torch.h>

#include <thread>

#include "autocast/type_gate.h"
#include "support/any_machine.h"
#include "support/deep_backward.h"
#include "support/error_of.h"
#include "support/run_case.h"

namespace halfstep::testing {
namespace {

struct EngineState {
  bool enabled = at::autocast::is_autocast_enabled(at::kCPU);
  at::ScalarType low = at::autocast::get_autocast_dtype(at::kCPU);
  bool enabled_on_cuda = at::autocast::is_autocast_enabled(at::kCUDA);
  at::ScalarType low_on_cuda = at::autocast::get_autocast_dtype(at::kCUDA);
  bool cache_enabled = at::autocast::is_autocast_cache_enabled();
  int nesting = [] {
    at::autocast::increment_nesting();
    return at::autocast::decrement_nesting();
  }();
  bool operator==(const EngineState&) const = default;
};

/// exp is FP32 under `standard`, low under stock autocast on CPU: it tells which policy is at work.
at::ScalarType type_of_exp() { return at::exp(at::ones(2, at::kBFloat16)).scalar_type(); }
at::ScalarType type_of_mm() { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); }

TEST(AutocastScope, LeavesTheEngineAsItWasFound) {
  const EngineState before;
  {
    const AutocastScope scope(at::kHalf, OpPolicy::standard(), kAnyMachine);
    EXPECT_EQ(type_of_mm(), at::kHalf);
    EXPECT_FALSE(EngineState() == before);
  }
  EXPECT_EQ(EngineState(), before);
  EXPECT_EQ(type_of_mm(), at::kFloat);
  EXPECT_EQ(type_of_exp(), at::kBFloat16);
}

TEST(AutocastScope, LeavesTheEngineAsItWasFoundAfterAnException) {
  const EngineState before;
  EXPECT_THROW(
      {
        const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
        at::mm(at::ones({2, 3}), at::ones({2, 3}));
      },
      c10::Error);
  EXPECT_EQ(EngineState(), before);
  EXPECT_EQ(type_of_exp(), at::kBFloat16);
}

TEST(AutocastScope, InnerTypeAndPolicyHoldUntilTheInnerScopeEnds) {
  const AutocastScope outer(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  const EngineState outer_state;
  {
    const AutocastScope inner(at::kHalf, OpPolicy::stock(), kAnyMachine);
    EXPECT_EQ(type_of_mm(), at::kHalf);
    EXPECT_EQ(type_of_exp(), at::kBFloat16);
  }
  EXPECT_EQ(EngineState(), outer_state);
  EXPECT_EQ(type_of_mm(), at::kBFloat16);
  EXPECT_EQ(type_of_exp(), at::kFloat);
}

TEST(AutocastScope, OpensInsideABareRegionWhichIsFoundAgain) {
  const BareAutocast bare(at::kHalf);
  const EngineState bare_state;
  EXPECT_EQ(type_of_mm(), at::kHalf);
  {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
    EXPECT_EQ(type_of_mm(), at::kBFloat16);
    EXPECT_EQ(type_of_exp(), at::kFloat);
  }
  EXPECT_EQ(EngineState(), bare_state);
  EXPECT_EQ(type_of_mm(), at::kHalf);
  EXPECT_EQ(type_of_exp(), at::kBFloat16);
}

TEST(AutocastScope, AutocastSwitchedOffInsideIsOff) {
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_EQ(type_of_mm(), at::kFloat);
  EXPECT_EQ(type_of_exp(), at::kBFloat16);
}

TEST(AutocastScope, DisabledTurnsAutocastOffUntilTheEndOfTheBlock) {
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  const EngineState enabled;
  {
    const auto full = AutocastScope::disabled();
    EXPECT_EQ(type_of_mm(), at::kFloat);
    EXPECT_EQ(type_of_exp(), at::kBFloat16) << "left as it came";
    {
      const BareAutocast bare(at::kHalf);
      EXPECT_EQ(type_of_mm(), at::kHalf);
      EXPECT_EQ(type_of_exp(), at::kBFloat16) << "stock: the policy of the outer scope does not reach here";
    }
    {
      const AutocastScope inner(at::kHalf);
      EXPECT_EQ(type_of_mm(), at::kHalf);
      EXPECT_EQ(type_of_exp(), at::kFloat);
    }
    EXPECT_EQ(type_of_mm(), at::kFloat);
  }
  EXPECT_EQ(EngineState(), enabled);
  EXPECT_EQ(type_of_mm(), at::kBFloat16);
  EXPECT_EQ(type_of_exp(), at::kFloat);
}

TEST(AutocastScope, NotEnabledIsDisabled) {
  const at::Tensor a = torch::randn({4, 4}), b = torch::randn({4, 4});
  for (const bool enabled : {true, false}) {
    const AutocastScope outer(at::kBFloat16, OpPolicy::standard(), {.allow_emulated = true});
    const AutocastScope inner(at::kBFloat16, OpPolicy::standard(),
                              {.enabled = enabled, .allow_emulated = true});
    EXPECT_EQ(at::mm(a, b).scalar_type(), enabled ? at::kBFloat16 : at::kFloat);
    EXPECT_EQ(at::autocast::is_autocast_enabled(at::kCPU), enabled);
  }
}

TEST(AutocastScope, DisabledTurnsABareRegionOffAndOutsideChangesNothing) {
  const EngineState before;
  {
    const auto full = AutocastScope::disabled();
    EXPECT_EQ(type_of_mm(), at::kFloat);
    EXPECT_EQ(type_of_exp(), at::kBFloat16);
  }
  EXPECT_EQ(EngineState(), before);
  const BareAutocast bare(at::kHalf);
  {
    const auto full = AutocastScope::disabled();
    EXPECT_EQ(type_of_mm(), at::kFloat);
  }
  EXPECT_EQ(type_of_mm(), at::kHalf);
}

TEST(AutocastScope, DisabledEndsWithAnException) {
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  const EngineState enabled;
  EXPECT_THROW(
      {
        const auto full = AutocastScope::disabled();
        at::mm(at::ones({2, 3}), at::ones({2, 3}));
      },
      c10::Error);
  EXPECT_EQ(EngineState(), enabled);
  EXPECT_EQ(type_of_exp(), at::kFloat);
}

// Oracle: the same function without a checkpoint.
TEST(AutocastScope, DisabledHoldsAgainWhenACheckpointIsRunAgain) {
  at::manual_seed(1);
  const at::Tensor x = at::randn({4, 8}).requires_grad_(), w = at::randn({8, 8}).requires_grad_();
  using Function = std::function<at::Tensor(const at::Tensor&)>;
  const Function product = [w](const at::Tensor& input) { return at::mm(input, w).tanh(); };
  const Function disabled_inside = [product](const at::Tensor& input) {
    const at::Tensor low = product(input);
    const auto full = AutocastScope::disabled();
    return product(low.to(at::kFloat));
  };
  const Function disabled_around_a_checkpoint = [product](const at::Tensor& input) {
    const auto full = AutocastScope::disabled();
    return checkpoint_activations(product, input);
  };
  const Function disabled_around = [product](const at::Tensor& input) {
    const auto full = AutocastScope::disabled();
    return product(input);
  };
  const auto gradients = [&](const Function& function) {
    at::Tensor y;
    {
      const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
      y = function(x);
    }
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    return torch::autograd::grad({y.pow(2).sum()}, {x, w});
  };
  const auto expect_equal = [](const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  };
  expect_equal(
      gradients([&](const at::Tensor& input) { return checkpoint_activations(disabled_inside, input); }),
      gradients(disabled_inside));
  expect_equal(gradients(disabled_around_a_checkpoint), gradients(disabled_around));
}

TEST(AutocastScope, ChangedRowsHoldForThatScopeOnly) {
  auto policy = OpPolicy::standard();
  {
    policy.set("exp", OpRule::AsIs);
    const AutocastScope scope(at::kBFloat16, policy, kAnyMachine);
    policy.set("mm", OpRule::Fp32);  // too late for a scope that is open
    EXPECT_EQ(type_of_exp(), at::kBFloat16);
    EXPECT_EQ(type_of_mm(), at::kBFloat16);
  }
  const AutocastScope later(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(type_of_exp(), at::kFloat);
}

// Stock in one thread, two policies in two others, all at once, many times over.
TEST(AutocastScope, ThreadsDoNotSeeOneAnothersScopes) {
  const AutocastScope of_this_thread(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  std::atomic<int> surprises = 0;
  const auto repeat = [&surprises](auto open_region, at::ScalarType exp_type, at::ScalarType mm_type) {
    return std::thread([=, &surprises] {
      for (int i = 0; i < 300; ++i) {
        [[maybe_unused]] const auto region = open_region();
        surprises += type_of_exp() != exp_type || type_of_mm() != mm_type;
      }
    });
  };
  auto changed = OpPolicy::standard();
  changed.set("exp", OpRule::Low).set("mm", OpRule::Fp32);
  std::vector<std::thread> threads;
  threads.push_back(repeat([] { return 0; }, at::kBFloat16, at::kFloat));
  threads.push_back(
      repeat([] { return std::make_unique<BareAutocast>(at::kBFloat16); }, at::kBFloat16, at::kBFloat16));
  threads.push_back(repeat([] { return std::make_unique<AutocastScope>(at::kHalf); }, at::kFloat, at::kHalf));
  threads.push_back(
      repeat([=] { return std::make_unique<AutocastScope>(at::kHalf, changed); }, at::kHalf, at::kFloat));
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(surprises, 0);
  EXPECT_EQ(type_of_exp(), at::kFloat);
}

TEST(AutocastScope, ThreadLocalStateCarriesTypeAndPolicy) {
  const AutocastScope scope(at::kHalf, OpPolicy::standard(), kAnyMachine);
  const at::ThreadLocalState state;
  at::ScalarType exp_type = at::kByte, mm_type = at::kByte;
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(state);
    exp_type = type_of_exp();
    mm_type = type_of_mm();
  }).join();
  EXPECT_EQ(exp_type, at::kFloat);
  EXPECT_EQ(mm_type, at::kHalf);
}

TEST(AutocastScope, PolicyFollowsADeeplyReentrantBackwardToItsOtherThread) {
  const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  std::thread::id innermost_thread;
  at::ScalarType innermost_exp = at::kByte;
  DeepBackward::run([&] {
    innermost_thread = std::this_thread::get_id();
    innermost_exp = type_of_exp();
  });
  ASSERT_NE(innermost_thread, std::this_thread::get_id()) << "the engine no longer changes thread";
  EXPECT_EQ(innermost_exp, at::kFloat);
}

TEST(AutocastScope, TypesThatAreNotLowAreRefusedWithWhatToUse) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kInt, at::kComplexFloat}) {
    EXPECT_NE(error_of([=] { AutocastScope scope(type); }).find("Use at::kBFloat16"), std::string::npos)
        << type;
  }
  for (const at::ScalarType type : {at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e8m0fnu}) {
    const std::string error = error_of([=] { AutocastScope scope(type); });
    EXPECT_NE(error.find(c10::toString(type)), std::string::npos) << error;
    EXPECT_NE(error.find("scale"), std::string::npos) << error;
  }
  EXPECT_EQ(type_of_mm(), at::kFloat) << "a refused scope must leave nothing open";
}

// tests/device opens scopes beside an accelerator.
TEST(AutocastScope, HoldsForTheDevicesThatLibTorchCanComputeOn) {
  const AutocastScope scope(at::kHalf, OpPolicy::standard(), kAnyMachine);
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCPU), at::kHalf);
  for (const at::DeviceType device : at::autocast::_AUTOCAST_SUPPORTED_DEVICES)
    EXPECT_EQ(at::autocast::is_autocast_enabled(device), c10::impl::hasDeviceGuardImpl(device)) << device;
}

Machine machine_with(Support bf16, Support fp16) {
  Machine machine;
  machine.cpu.precisions = {{"FP32", Support::Native, ""}, {"BF16", bf16, "no AMX-BF16"}, {"FP16", fp16, ""}};
  return machine;
}

TEST(TypeGate, Bf16ThatIsEmulatedIsRefusedWithWhatToUseInstead) {
  const auto neither = machine_with(Support::Emulated, Support::Emulated);
  const std::string error = error_of([&] { check_bf16_is_native(neither); });
  EXPECT_NE(error.find("BF16 is emulated on this CPU (no AMX-BF16)"), std::string::npos) << error;
  EXPECT_NE(error.find("Use FP32: Precision::fp32(), or no scope (FP16 is not native here either)"),
            std::string::npos)
      << error;
  EXPECT_NE(error.find("allow_emulated"), std::string::npos) << error;

  const auto only_fp16 = machine_with(Support::Emulated, Support::Native);
  EXPECT_NE(error_of([&] { check_bf16_is_native(only_fp16); }).find("Use at::kHalf with a GradScaler"),
            std::string::npos);
  EXPECT_NO_THROW(check_bf16_is_native(machine_with(Support::Native, Support::Emulated)));
}

TEST(TypeGate, SupportIsTheWorstOfTheGpusElseTheCpus) {
  Machine machine = machine_with(Support::Emulated, Support::Native);
  EXPECT_EQ(worst_support(machine, "BF16").support, Support::Emulated);
  EXPECT_EQ(worst_support(machine, "BF16").reason, "no AMX-BF16");
  EXPECT_EQ(worst_support(machine, "FP16").support, Support::Native);
  const auto native = machine_with(Support::Native, Support::Native).cpu.precisions;
  const auto emulated = machine_with(Support::Native, Support::Emulated).cpu.precisions;
  machine.cuda.devices = {{"first", 8, 0, native}, {"second", 6, 1, emulated}, {"third", 8, 0, native}};
  EXPECT_EQ(worst_support(machine, "FP16").support, Support::Emulated);
  EXPECT_EQ(worst_support(machine, "BF16").support, Support::Native) << "the CPU is not where the work is";
}

TEST(AutocastScope, SaysHowThisMachineComputesItsType) {
  const Machine machine = inspect_machine();
  const auto expect_equal = [](const PrecisionSupport& a, const PrecisionSupport& b) {
    EXPECT_EQ(a.precision, b.precision);
    EXPECT_EQ(a.support, b.support) << a.precision;
    EXPECT_EQ(a.reason, b.reason);
  };
  const AutocastScope fp16(at::kHalf);
  expect_equal(fp16.support(), worst_support(machine, "FP16"));
  expect_equal(precision_support(at::kHalf), fp16.support());
  const AutocastScope bf16(at::kBFloat16, OpPolicy::standard(), kAnyMachine);
  expect_equal(bf16.support(), worst_support(machine, "BF16"));
  expect_equal(AutocastScope::disabled().support(), worst_support(machine, "FP32"));
  EXPECT_EQ(precision_support(at::kFloat).support, Support::Native);
  EXPECT_NE(error_of([] { (void)precision_support(at::kFloat8_e4m3fn); }).find("Float8_e4m3fn"),
            std::string::npos);
}

TEST(TypeGate, WhereThereAreGpusEachOfThemMustHaveIt) {
  const auto native = machine_with(Support::Native, Support::Native).cpu.precisions;
  const auto emulated = machine_with(Support::Emulated, Support::Native).cpu.precisions;
  Machine machine = machine_with(Support::Emulated, Support::Emulated);
  machine.cuda.devices = {{"ampere", 8, 0, native}};
  EXPECT_NO_THROW(check_bf16_is_native(machine)) << "the CPU is not where the work is";
  machine.cuda.devices = {{"ampere", 8, 0, native}, {"turing", 7, 5, emulated}};
  EXPECT_NE(error_of([&] { check_bf16_is_native(machine); }).find("emulated on turing"), std::string::npos);
}

}  // namespace
}  // namespace halfstep::testing
