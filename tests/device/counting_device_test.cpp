// The test accelerator itself: what it must refuse, count and hide, and that its numbers are the CPU's.
#include "support/counting_device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>

#include "support/python.h"

namespace halfstep::testing {
namespace {

using at::Tensor;

const auto kOnDevice = at::TensorOptions(kCountingDevice);

/// What an at::Error says, or "no error".
std::string refusal_of(auto&& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

TEST(CountingDevice, HasAName) { EXPECT_EQ(at::Device("counting:0"), kCountingDevice); }

TEST(CountingDeviceDeathTest, AReadByTheHostDies) {
  const Tensor tensor = at::ones({4}, kOnDevice);
  EXPECT_DEATH(
      {
        const volatile float value = tensor.const_data_ptr<float>()[0];
        (void)value;
      },
      "");
}

TEST(CountingDevice, AWaitIsCountedWithItsCause) {
  const Tensor tensor = at::ones({4}, kOnDevice);
  reset_device_counts();
  (void)tensor.sum().item<float>();
  (void)tensor.to(at::kCPU);
  (void)at::nonzero(tensor);
  (void)tensor.index({tensor > 0});
  const DeviceCounts counts = device_counts();
  EXPECT_EQ(counts.waits, 4);
  EXPECT_EQ(counts.waits_for.at("item()"), 1);
  EXPECT_EQ(counts.waits_for.at("a copy to the host"), 1);
  EXPECT_EQ(counts.waits_for.at("aten::nonzero"), 2) << "indexing by a mask asks for the places that are set";
  EXPECT_EQ(counts.bytes_to_host, 4 + 16);
}

TEST(CountingDevice, NoWaitsNamesTheCauseOfAHiddenOne) {
  const Tensor tensor = at::ones({4}, kOnDevice);
  const NoWaits no_waits;
  EXPECT_NE(refusal_of([&] { (void)tensor.equal(tensor); }).find("aten::equal waits"), std::string::npos);
  EXPECT_NE(refusal_of([&] { (void)tensor.sum().item(); }).find("item() waits"), std::string::npos);
  EXPECT_NE(refusal_of([&] { (void)at::ones({2}).to(kCountingDevice); }).find("a copy to the device waits"),
            std::string::npos);
}

TEST(CountingDevice, LaunchesAreCountedByOperationAndViewsAreNone) {
  const Tensor a = at::ones({3, 4}, kOnDevice), b = at::ones({3, 4}, kOnDevice);
  reset_device_counts();
  const NoWaits no_waits;
  const Tensor c = (a * b + 1).relu().t().reshape({4, 3}).select(0, 1);
  std::vector<Tensor> list{a, b};
  at::_foreach_mul_(list, 2.0);
  const DeviceCounts counts = device_counts();
  EXPECT_EQ(counts.launches, 4) << ::testing::PrintToString(counts.launches_of);
  EXPECT_EQ(counts.launches_of.at("aten::_foreach_mul_"), 1);
  EXPECT_EQ(counts.waits, 0);
}

TEST(CountingDevice, ANonBlockingCopyToTheHostArrivesAtTheNextWait) {
  const Tensor there = at::full({3}, 5.0, kOnDevice), here = at::empty({3});
  here.copy_(there, /*non_blocking=*/true);
  EXPECT_TRUE(std::isnan(here[0].item<float>())) << "0xFF bytes";
  there.fill_(6);
  wait_for_counting_device();
  EXPECT_EQ(here[0].item<float>(), 5) << "what was there when it was copied";
}

TEST(CountingDevice, ASourceThatChangesUnderANonBlockingCopyIsFound) {
  const Tensor source = at::ones({3});
  const Tensor there = source.to(kCountingDevice, at::kFloat, /*non_blocking=*/true);
  source.fill_(9);
  EXPECT_NE(refusal_of([] { wait_for_counting_device(); }).find("was changed"), std::string::npos);
}

TEST(CountingDevice, TensorsOfTheHostAmongItsOwnAreRefused) {
  const Tensor there = at::ones({2}, kOnDevice);
  EXPECT_NE(refusal_of([&] { (void)(there + at::ones({2})); }).find("same device"), std::string::npos);
  EXPECT_EQ((there * at::scalar_tensor(2.0)).device(), kCountingDevice) << "CUDA takes a number of the host";
}

TEST(CountingDevice, RefusesExactlyTheOperationsWithoutACudaKernel) {
  std::vector<std::string> expected =
      ask_python("tests/device/ops_without_cuda_kernel.py", nlohmann::json::object());
  std::ranges::sort(expected);
  EXPECT_EQ(ops_without_cuda_kernel(), expected);
  EXPECT_NE(refusal_of([] { (void)at::histogram(at::rand({4}, kOnDevice), 3); }).find("CUDA has no kernel"),
            std::string::npos);
}

struct AdamTensors {
  AdamTensors(at::ScalarType params, at::ScalarType grads, at::ScalarType moments, at::Device device)
      : p{full(1, params, device)},
        g{full(8, grads, device)},
        m{full(0, moments, device)},
        v{full(0, moments, device)},
        steps{at::ones({}, device)} {}
  static Tensor full(double value, at::ScalarType type, at::Device device) {
    return at::full({100}, value, at::TensorOptions(device).dtype(type));
  }
  void step(const Tensor& scale, const Tensor& found_inf) {
    const Tensor lr = at::full({}, 0.1, scale.options());
    at::_fused_adamw_(p, g, m, v, {}, steps, lr, 0.9, 0.95, 0.1, 1e-8, false, false, scale, found_inf);
  }
  std::vector<Tensor> p, g, m, v, steps;
};

TEST(CountingDevice, TypesThatCudasKernelsRefuseAreRefused) {
  const Tensor scale = at::full({}, 4.0, kOnDevice);
  Tensor found = at::zeros({}, kOnDevice);
  const auto refusal = [&](at::ScalarType params, at::ScalarType grads, at::ScalarType moments) {
    AdamTensors tensors(params, grads, moments, kCountingDevice);
    return refusal_of([&] { tensors.step(scale, found); });
  };
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf})
    EXPECT_EQ(refusal(type, type, type), "no error") << type;
  EXPECT_EQ(refusal(at::kFloat, at::kFloat, at::kBFloat16), "no error");
  EXPECT_NE(refusal(at::kFloat, at::kBFloat16, at::kFloat).find("fused_adam_utils.cuh"), std::string::npos);
  EXPECT_NE(refusal(at::kBFloat16, at::kBFloat16, at::kFloat).find("one type for all"), std::string::npos);

  std::vector<Tensor> bf16{at::ones({3}, kOnDevice.dtype(at::kBFloat16))};
  std::vector<Tensor> fp16{at::ones({3}, kOnDevice.dtype(at::kHalf))};
  const auto unscale = [&](std::vector<Tensor>& grads) {
    return refusal_of([&] { at::_amp_foreach_non_finite_check_and_unscale_(grads, found, scale); });
  };
  EXPECT_NE(unscale(bf16).find("127176"), std::string::npos);
  EXPECT_EQ(unscale(fp16), "no error");
  AdamTensors tensors(at::kFloat, at::kFloat, at::kFloat, kCountingDevice);
  EXPECT_NE(refusal_of([&] { tensors.step(at::full({}, 4.0), at::zeros({})); }).find("of the device"),
            std::string::npos);
}

TEST(CountingDevice, AFusedStepIsTheCpusAndASkipChangesNothing) {
  AdamTensors here(at::kFloat, at::kFloat, at::kFloat, at::kCPU);
  AdamTensors there(at::kFloat, at::kFloat, at::kFloat, kCountingDevice);
  here.step(at::full({}, 4.0), at::zeros({}));
  there.step(at::full({}, 4.0, kOnDevice), at::zeros({}, kOnDevice));
  EXPECT_TRUE(peek(there.p[0]).equal(here.p[0]));
  const Tensor before = peek(there.p[0]);
  there.step(at::full({}, 4.0, kOnDevice), at::ones({}, kOnDevice));
  EXPECT_TRUE(peek(there.p[0]).equal(before));
}

TEST(CountingDevice, ViewsResizesAndOutArgumentsWork) {
  const Tensor a = at::arange(24, kOnDevice.dtype(at::kFloat)).view({2, 3, 4});
  const Tensor view = a.transpose(0, 1).select(2, 1).slice(0, 1);
  EXPECT_TRUE(view.is_alias_of(a));
  view.fill_(7);
  EXPECT_EQ(peek(a)[1][2][1].item<float>(), 7);
  EXPECT_TRUE(a.view(at::kInt).is_alias_of(a));
  const Tensor grown = at::ones({2, 2}, kOnDevice);
  grown.resize_({4, 4});
  grown.fill_(2);
  EXPECT_EQ(peek(grown).sum().item<float>(), 32);
  Tensor out = at::empty({0}, kOnDevice);
  at::mm_out(out, grown, grown);
  EXPECT_EQ(out.sizes(), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(peek(out).sum().item<float>(), 256);
}

/// A layer of each kind that has a kernel of its own on CUDA.
struct Net : torch::nn::Module {
  Net() {
    register_module("embedding", embedding);
    register_module("norm", norm);
    register_module("conv", conv);
    register_module("batch_norm", batch_norm);
    register_module("up", up);
    register_module("head", head);
  }
  Tensor loss(const Tensor& ids, const Tensor& targets) {
    Tensor x = norm(embedding(ids));  // [2, 10, 32]
    x = x + batch_norm(conv(x.transpose(1, 2))).transpose(1, 2);
    const Tensor heads = x.view({2, 10, 4, 8}).transpose(1, 2);
    x = x + at::scaled_dot_product_attention(heads, heads, heads, {}, 0.0, /*is_causal=*/true)
                .transpose(1, 2)
                .reshape({2, 10, 32});
    x = at::dropout(at::gelu(up(x)), 0.25, is_training());
    return torch::nn::functional::cross_entropy(head(x).view({20, 50}).to(at::kFloat), targets);
  }
  torch::nn::Embedding embedding{50, 32};
  torch::nn::LayerNorm norm{torch::nn::LayerNormOptions({32})};
  // Without a bias, whose gradient cancels in the batch norm.
  torch::nn::Conv1d conv{torch::nn::Conv1dOptions(32, 32, 3).padding(1).bias(false)};
  torch::nn::BatchNorm1d batch_norm{32};
  torch::nn::Linear up{32, 64}, head{64, 50};
};

TEST(CountingDevice, ModulesTrainAsOnTheCpuBitForBit) {
  const StockProducts as_without_a_scope;
  for (const auto type : {at::kFloat, at::kBFloat16, at::kHalf}) {
    const auto run = [&](at::Device device) {
      torch::manual_seed(1);
      Net net;
      net.to(type);
      net.to(device);
      const Tensor ids = at::arange(20).view({2, 10}).to(device), targets = at::arange(20).add(1).to(device);
      torch::manual_seed(2);
      const Tensor loss = net.loss(ids, targets);
      loss.backward();
      std::map<std::string, Tensor> found{{"loss", peek(loss)}};
      for (const auto& item : net.named_parameters()) found[item.key()] = peek(item.value().grad());
      for (const auto& item : net.named_buffers()) found[item.key()] = peek(item.value());
      return found;
    };
    const auto here = run(at::kCPU), there = run(kCountingDevice);
    for (const auto& [name, values] : here)
      EXPECT_LE(
          (there.at(name).to(at::kDouble) - values.to(at::kDouble)).abs().max().item<double>(),
          (type == at::kFloat ? 1e-5 : 2e-2) * (1e-3 + values.to(at::kDouble).abs().max().item<double>()))
          << name << " in " << type;
    EXPECT_TRUE(there.at("loss").equal(here.at("loss"))) << type;
  }
}

TEST(CountingDevice, TensorsAreSavedAndLoaded) {
  const Tensor there = at::rand({3}, kOnDevice);
  std::ostringstream out;
  torch::save(there, out);
  std::istringstream in(out.str());
  Tensor back;
  torch::load(back, in);
  EXPECT_TRUE(back.to(at::kCPU).equal(peek(there)));
}

}  // namespace
}  // namespace halfstep::testing
