// Every kind of value through a checkpoint on disk.
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <torch/torch.h>

#include <limits>

#include "checkpoint/leftovers.h"
#include "support/error_of.h"
#include "support/scratch.h"
#include "support/states.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::ScratchFolder;

Checkpoint through_disk(const StateDict& state) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  folder.save({.step = 1, .parts = {{"part", state}}});
  return folder.load(1);
}

TEST(CheckpointValues, NumbersAndTextsComeBackBitForBit) {
  StateDict state;
  state.set("smallest", std::numeric_limits<int64_t>::min());
  state.set("largest", std::numeric_limits<int64_t>::max());
  state.set("tenth", 0.1);
  state.set("infinite", -std::numeric_limits<double>::infinity());
  state.set("", std::string("a name may be empty; texts have \"quotes\", \n and ü"));
  state.set("a/b\\c .. ", std::string());
  testing::expect_same_state(state, through_disk(state).part("part"));
}

TEST(CheckpointValues, TensorsOfEveryTypeComeBackBitForBit) {
  StateDict state;
  for (const auto type :
       {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kUInt16, at::kUInt32,
        at::kUInt64, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kFloat8_e4m3fn,
        at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz, at::kFloat8_e8m0fnu}) {
    at::Tensor tensor = at::empty({3, 5}, type);
    // All bit patterns that a byte can have, but for bool, which has two.
    auto* bytes = static_cast<uint8_t*>(tensor.data_ptr());
    for (size_t i = 0; i < tensor.nbytes(); ++i)
      bytes[i] = static_cast<uint8_t>(type == at::kBool ? i % 2 : 37 * i);
    state.set(c10::toString(type), tensor);
  }
  testing::expect_same_state(state, through_disk(state).part("part"));
}

TEST(CheckpointValues, ShapesAndStridesComeBack) {
  StateDict state;
  const at::Tensor base = torch::randn({4, 6, 5, 3});
  state.set("0-dim", torch::tensor(1.5));
  state.set("empty", torch::zeros({0, 7}));
  state.set("channels last", base.contiguous(at::MemoryFormat::ChannelsLast));
  state.set("transposed", base.permute({3, 1, 0, 2}));
  state.set("FP8 transposed", base[0][0].to(at::kFloat8_e4m3fn).t());
  const Checkpoint loaded = through_disk(state);
  testing::expect_same_state(state, loaded.part("part"));
  for (const auto& [name, value] : state)
    EXPECT_EQ(std::get<at::Tensor>(value).strides(), loaded.part("part").tensor(name).strides()) << name;
}

TEST(CheckpointValues, ViewsAreSavedAsTheElementsThatTheyShow) {
  StateDict state;
  const at::Tensor base = torch::randn({8, 8});
  state.set("every second", base.slice(1, 0, 8, 2));
  state.set("expanded", base.select(0, 3).expand({5, 8}));
  state.set("conjugate", at::conj(at::complex(base, base + 1)));
  state.set("negative", at::_neg_view(base));
  state.set("parameter", torch::randn({3}, torch::requires_grad()));
  const Checkpoint loaded = through_disk(state);
  for (const auto& [name, value] : state) {
    const at::Tensor expected = std::get<at::Tensor>(value).detach().clone().resolve_conj().resolve_neg();
    EXPECT_TRUE(testing::bit_equal(expected, loaded.part("part").tensor(name))) << name;
    EXPECT_FALSE(loaded.part("part").tensor(name).requires_grad());
  }
}

TEST(CheckpointValues, WhatCannotBeSavedIsNamedAllAtOnceBeforeAnythingIsWritten) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  StateDict state;
  state.set("fine", torch::zeros({2}));
  state.set("nothing", at::Tensor());
  state.set("sparse", torch::eye(3).to_sparse());
  state.set("wide complex", torch::zeros({2}, at::kComplexDouble));
  state.set("no data", torch::empty({2}, at::kMeta));
  const std::string message = error_of([&] { folder.save({.step = 1, .parts = {{"model", state}}}); });
  for (const char* part :
       {"'nothing' of part 'model' is undefined", "'sparse' of part 'model' has the layout Sparse",
        "'wide complex' of part 'model' is of type ComplexDouble", "'no data' of part 'model'"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  EXPECT_EQ(message.find("'fine'"), std::string::npos);
  EXPECT_TRUE(folder.steps().empty());
  EXPECT_TRUE(testing::leftovers_in(scratch.path() / "run").empty());
}

TEST(CheckpointValues, APartsNameMayHaveNoSlash) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  for (const char* name : {"", "a/b"})
    EXPECT_NE(error_of([&] { folder.save({.step = 1, .parts = {{name, {}}}}); }).find("a part is called"),
              std::string::npos);
}

}  // namespace
}  // namespace halfstep
