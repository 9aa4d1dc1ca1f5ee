// Writing while training goes on.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "checkpoint/leftovers.h"
#include "support/error_of.h"
#include "support/scratch.h"
#include "support/states.h"

namespace halfstep {
namespace {

using testing::ScratchFolder;

Checkpoint of(int64_t step, const at::Tensor& tensor) {
  StateDict state;
  state.set("w", tensor);
  return {.step = step, .parts = {{"model", state}}};
}

/// While it lives no file can grow beyond a size: the disk is full for the background thread too.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    ::signal(SIGXFSZ, SIG_IGN);  // so that write says EFBIG
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
};

TEST(SaveAsync, SavesTheValuesOfTheMomentOfTheCall) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  const at::Tensor live = torch::randn({1 << 18});
  const at::Tensor transposed = live.view({1 << 9, 1 << 9}).t();
  for (int64_t step = 1; step <= 3; ++step) {
    const at::Tensor expected = live.clone(), expected_transposed = transposed.clone();
    Checkpoint checkpoint = of(step, live);
    checkpoint.parts["model"].set("transposed", transposed);
    folder.save_async(checkpoint);
    live.add_(1);  // training goes on
    folder.wait();
    EXPECT_TRUE(testing::bit_equal(folder.load(step).part("model").tensor("w"), expected));
    EXPECT_TRUE(
        testing::bit_equal(folder.load(step).part("model").tensor("transposed"), expected_transposed));
  }
}

TEST(SaveAsync, WhatItHoldsIsReleasedWhenTheWriteIsDone) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  std::vector<float> memory(1000, 1.0f);
  std::atomic<bool> released = false;
  folder.save_async(of(1, at::from_blob(memory.data(), {1000}, [&](void*) { released = true; })));
  // Without asking it: a loop that saves once an hour must not keep a copy of its state for an hour.
  for (int tries = 0; tries < 2000 && !released; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(released);
  folder.wait();
  EXPECT_EQ(folder.load(1).part("model").tensor("w").sum().item<float>(), 1000);
}

TEST(SaveAsync, OneAtATimeAndInOrder) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run", {.keep_last = 0});
  double waited = 0;
  for (int64_t step = 1; step <= 8; ++step)
    waited += folder.save_async(of(step, torch::full({1 << 20}, step))).waited_seconds;
  folder.wait();
  EXPECT_EQ(folder.steps().size(), 8u);
  EXPECT_GT(waited, 0);  // copying 4 MB takes less than writing and hashing them
  for (const int64_t step : folder.steps())
    EXPECT_EQ(folder.load(step).part("model").tensor("w")[0].item<int64_t>(), step);
}

TEST(SaveAsync, AnErrorReachesTheNextCallOnceAndTheOneBeforeIsWhole) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  folder.save(of(1, torch::ones({1000})));
  for (int next_call = 0; next_call < 3; ++next_call) {
    {
      const FullDisk full(2000);
      folder.save_async(of(2, torch::ones({1000})));
      // Until it is done, without asking it.
      while (!testing::leftovers_in(scratch.path() / "run").empty()) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    const auto call = [&] {
      if (next_call == 0) folder.wait();
      if (next_call == 1) folder.save_async(of(3, torch::ones({1})));
      if (next_call == 2) folder.save(of(3, torch::ones({1})));
    };
    try {
      call();
      ADD_FAILURE() << "no error from call " << next_call;
    } catch (const FileError& error) {
      EXPECT_EQ(error.code(), EFBIG);
    }
    folder.wait();  // told once
    EXPECT_EQ(folder.steps(), (std::vector<int64_t>{1}));
    EXPECT_EQ(folder.load_latest()->step, 1);
  }
  folder.save(of(2, torch::ones({1000})));
  EXPECT_EQ(folder.load_latest()->step, 2);
}

TEST(SaveAsync, WhatCannotBeSavedIsAnErrorOfTheCallItself) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  EXPECT_NE(testing::error_of([&] { folder.save_async(of(1, at::Tensor())); }).find("is undefined"),
            std::string::npos);
  folder.wait();
}

TEST(SaveAsync, TheDestructorWaits) {
  const ScratchFolder scratch;
  {
    CheckpointFolder(scratch.path() / "run").save_async(of(1, torch::ones({1 << 20})));
  }
  EXPECT_EQ(checkpoint_steps(scratch.path() / "run"), (std::vector<int64_t>{1}));
}

}  // namespace
}  // namespace halfstep
