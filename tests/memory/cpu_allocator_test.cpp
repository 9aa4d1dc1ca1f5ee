#include <gtest/gtest.h>
#include <halfstep/error.h>
#include <halfstep/memory.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <thread>

#include "support/deep_backward.h"

namespace halfstep {
namespace {

// The allocator stays for the rest of the process, so the first test is the one from before.
TEST(NoCpuAllocator, BeforeItIsInstalledEverythingIsHarmless) {
  ASSERT_FALSE(cpu_allocator_installed());
  const MemoryClassScope scope(MemoryClass::Activation);
  const at::Tensor tensor = at::ones({100});
  tag_memory(tensor, MemoryClass::Gradient);
  reset_memory_peak();
  EXPECT_EQ(empty_cache(), 0u);
  EXPECT_EQ(memory_report().live.total, 0u);
  static const at::Tensor from_before = at::ones({1000});  // freed at exit, by its own deleter
  install_cpu_allocator();
  install_cpu_allocator();
  EXPECT_TRUE(cpu_allocator_installed());
  tag_memory(from_before, MemoryClass::Gradient);
  EXPECT_EQ(memory_report().live.total, 0u);
  static const at::Tensor outlives_statics = at::ones({1000});
}

class CpuAllocator : public ::testing::Test {
 protected:
  CpuAllocator() {
    install_cpu_allocator();
    reset_memory_peak();
    before_ = memory_report();
  }
  std::size_t more(MemoryClass c) const { return memory_report().live[c] - before_.live[c]; }
  std::size_t more() const { return memory_report().live.total - before_.live.total; }

  MemoryReport before_;
};

TEST_F(CpuAllocator, CountsTheBytesOfTensorsByClassExactly) {
  at::Tensor working, activation, other;
  {
    const MemoryClassScope outer(MemoryClass::Working);
    working = at::empty({300, 7}, at::kBFloat16);
    {
      const MemoryClassScope inner(MemoryClass::Activation);
      activation = at::empty({1000, 1000});
    }
    working = at::cat({working.view({-1}), at::empty({5}, at::kBFloat16)});
  }
  other = at::empty({3}, at::kByte);
  EXPECT_EQ(more(MemoryClass::Working), (300 * 7 + 5) * 2u);
  EXPECT_EQ(more(MemoryClass::Activation), 4'000'000u);
  EXPECT_EQ(more(MemoryClass::Other), 3u);
  activation.reset();
  EXPECT_EQ(more(MemoryClass::Activation), 0u);
  EXPECT_EQ(memory_report().at_peak.total - before_.live.total,
            4'000'000u + (300 * 7 + 5) * 2u + 5 * 2 + 300 * 7 * 2);
}

TEST_F(CpuAllocator, ATensorWithoutElementsTakesNothing) {
  const at::Tensor none = at::empty({0, 5});
  EXPECT_EQ(none.data_ptr(), nullptr);
  EXPECT_EQ(more(), 0u);
}

TEST_F(CpuAllocator, TagsTheBlockBehindAViewOnceForAll) {
  const at::Tensor whole = at::empty({100, 10});
  tag_memory(whole[3], MemoryClass::Gradient);
  EXPECT_EQ(more(MemoryClass::Gradient), 4000u);
  tag_memory(whole, MemoryClass::Gradient);
  EXPECT_EQ(more(MemoryClass::Gradient), 4000u);
  EXPECT_EQ(more(), 4000u);
}

TEST_F(CpuAllocator, LeavesForeignBlocksAlone) {
  std::array<float, 16> numbers{};
  const at::Tensor borrowed = at::from_blob(numbers.data(), {16});
  bool freed = false;
  const at::Tensor adopted = at::from_blob(numbers.data(), {16}, [&](void*) { freed = true; });
  for (const at::Tensor& foreign : {borrowed, adopted, at::Tensor(), at::empty({4}, at::kMeta)})
    tag_memory(foreign, MemoryClass::Gradient);
  EXPECT_EQ(more(MemoryClass::Gradient), 0u);
}

TEST_F(CpuAllocator, GradientsCanBeTaggedAfterBackward) {
  const at::Tensor weight = torch::ones({64, 32}, torch::requires_grad());
  at::matmul(at::ones({8, 64}), weight).sum().backward();
  tag_memory(weight.grad(), MemoryClass::Gradient);
  EXPECT_EQ(more(MemoryClass::Gradient), 64 * 32 * 4u);
}

TEST_F(CpuAllocator, ResizedAndClonedStoragesAreCounted) {
  at::Tensor tensor = at::empty({10});
  tensor.resize_({50'000});
  EXPECT_EQ(more(), 200'000u);
  const at::Tensor copy = tensor.clone();
  EXPECT_EQ(more(), 400'000u);
  c10::Allocator* allocator = c10::GetAllocator(c10::kCPU);
  void* raw = allocator->raw_allocate(1234);
  EXPECT_EQ(more(), 401'234u);
  allocator->raw_deallocate(raw);
  EXPECT_EQ(more(), 400'000u);
}

TEST_F(CpuAllocator, TheClassFollowsADeepBackwardToItsOtherThread) {
  std::thread::id deepest_thread;
  at::Tensor deepest_tensor;
  {
    const MemoryClassScope scope(MemoryClass::CastCache);
    testing::DeepBackward::run([&] {
      deepest_thread = std::this_thread::get_id();
      deepest_tensor = at::empty({111});
    });
  }
  ASSERT_NE(deepest_thread, std::this_thread::get_id());
  EXPECT_GE(more(MemoryClass::CastCache), 444u);
  const std::size_t with = more(MemoryClass::CastCache);
  deepest_tensor.reset();
  EXPECT_EQ(with - more(MemoryClass::CastCache), 444u);
}

TEST_F(CpuAllocator, AScopeIsOfItsThreadOnly) {
  const MemoryClassScope scope(MemoryClass::Master);
  at::Tensor tensor;
  std::thread([&] { tensor = at::empty({1000}); }).join();
  EXPECT_EQ(more(MemoryClass::Other), 4000u);
}

TEST_F(CpuAllocator, AScopeThatEndsOutOfOrderDoesNoHarm) {
  auto first = std::make_optional<MemoryClassScope>(MemoryClass::Master);
  auto second = std::make_optional<MemoryClassScope>(MemoryClass::Moments);
  first.reset();
  second.reset();
  const at::Tensor tensor = at::empty({10});
  EXPECT_EQ(more(), 40u);
}

// A child inherits the lock as it was; if another thread held it, the child would wait for ever.
TEST_F(CpuAllocator, AForkedChildAllocatesWhileTheParentsThreadsDo) {
  std::atomic<bool> done = false;
  std::thread busy([&] {
    while (!done) at::empty({100'000});
  });
  for (int i = 0; i < 50; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // ends a child that waits
      for (int j = 0; j < 10; ++j) *at::empty({100'000}).data_ptr<float>() = 1;
      _exit(0);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
  }
  done = true;
  busy.join();
}

TEST_F(CpuAllocator, TellsLibTorchsProfilerAsTheStockOneDoes) {
  struct Watch : c10::MemoryReportingInfoBase {
    int64_t live = 0;
    void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override { live += bytes; }
    bool memoryProfilingEnabled() const override { return true; }
  };
  const auto watch = std::make_shared<Watch>();
  const c10::DebugInfoGuard guard(c10::DebugInfoKind::PROFILER_STATE, watch);
  at::Tensor tensor = at::empty({1000});
  EXPECT_EQ(watch->live, 4000);
  tensor.reset();
  EXPECT_EQ(watch->live, 0);
}

TEST_F(CpuAllocator, AnImpossibleTensorIsRefusedAsOutOfMemory) {
  try {
    at::empty({int64_t{1} << 58}, at::kByte);
    FAIL() << "2^58 bytes";
  } catch (const c10::OutOfMemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("288230376151711744"), std::string::npos) << error.what();
  }
  EXPECT_EQ(more(), 0u);
}

TEST_F(CpuAllocator, ABoundBelowWhatLiveBlocksTakeIsAnError) {
  EXPECT_THROW(install_cpu_allocator({.resident_over_peak = 0.9}), Error);
}

TEST_F(CpuAllocator, TheOptionsOfALaterCallCount) {
  at::empty({1 << 22}).zero_();
  EXPECT_GT(memory_report().kept_bytes, 1u << 23);
  install_cpu_allocator({.kept_bytes_limit = 1 << 20});
  EXPECT_LE(memory_report().kept_bytes, 1u << 20);
  install_cpu_allocator();
  at::empty({1 << 22}).zero_();
  EXPECT_LE(memory_report().kept_bytes, 1u << 20) << "without options, those from before stand";
  install_cpu_allocator(MemoryOptions{});
}

}  // namespace
}  // namespace halfstep
