// Loading: what does not fit is refused whole, and what is damaged is never loaded.
#include <gtest/gtest.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <torch/torch.h>

#include <fstream>

#include "support/error_of.h"
#include "support/scratch.h"
#include "support/small_models.h"
#include "support/states.h"

namespace halfstep {
namespace {

using testing::error_of;
using testing::Mlp;
using testing::ScratchFolder;

Checkpoint small(int64_t step) {
  StateDict state;
  state.set("w", torch::full({3}, step));
  return {.step = step, .parts = {{"model", state}}};
}

TEST(LoadModule, ListsEveryMismatchAndChangesNothing) {
  Mlp model(4, 6, 3);
  const StateDict before = module_state(model);
  StateDict bad;
  for (const auto& [name, value] : before)
    if (name != "body.4.bias") bad.set(name, value);
  bad.set("body.0.weight", torch::zeros({6, 5}));
  bad.set("body.2.bias", torch::zeros({6}, at::kBFloat16));
  bad.set("body.2.weight", int64_t{3});
  bad.set("head.weight", torch::zeros({1}));
  const std::string message = error_of([&] { load_module_state(model, bad); });
  for (const char* part : {"'body.0.weight' is Float of shape [6, 5], expected Float of shape [6, 4]",
                           "'body.2.bias' is BFloat16 of shape [6], expected Float",
                           "'body.2.weight' is a whole number, expected a tensor", "'body.4.bias' is missing",
                           "'head.weight' is unknown"})
    EXPECT_NE(message.find(part), std::string::npos) << message;
  testing::expect_same_state(before, module_state(model));
}

struct Tied : torch::nn::Module {
  Tied() {
    first = register_parameter("first", torch::randn({4, 4}));
    second = register_parameter("second", first);
    register_buffer("count", torch::zeros({}));
  }
  at::Tensor first, second;
};

TEST(LoadModule, TiedParametersAreSavedByEveryNameAndMustAgree) {
  torch::manual_seed(1);
  Tied saved;
  saved.named_buffers()["count"].fill_(7);
  const StateDict state = module_state(saved);
  EXPECT_TRUE(testing::bit_equal(state.tensor("first"), state.tensor("second")));
  Tied loaded;
  load_module_state(loaded, state);
  testing::expect_same_state(state, module_state(loaded));
  EXPECT_TRUE(loaded.first.is_same(loaded.second));

  StateDict torn = state;
  torn.set("second", torch::zeros({4, 4}));
  EXPECT_NE(error_of([&] { load_module_state(loaded, torn); }).find("are one tensor in this module"),
            std::string::npos);
  testing::expect_same_state(state, module_state(loaded));
}

TEST(LoadRandom, ContinuesTheSameNumbers) {
  torch::manual_seed(5);
  (void)torch::randn({3});  // an odd count: the generator keeps the second normal of a pair
  const StateDict state = random_state();
  const at::Tensor expected = at::cat({torch::randn({7}), torch::rand({9})});
  torch::manual_seed(6);
  load_random_state(state);
  EXPECT_TRUE(testing::bit_equal(expected, at::cat({torch::randn({7}), torch::rand({9})})));
  StateDict bad;
  bad.set("cpu", torch::zeros({3}, at::kByte));
  EXPECT_NE(error_of([&] { load_random_state(bad); }).find("'cpu' is Byte of shape [3]"), std::string::npos);
}

TEST(LoadCheckpoint, ADamagedLatestIsAnErrorThatNamesTheOneBefore) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  EXPECT_FALSE(folder.load_latest().has_value());
  for (const int64_t step : {10, 20}) folder.save(small(step));
  const auto path = scratch.path() / "run" / "step-000000020" / "tensors.safetensors";
  std::fstream(path, std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end).put('\x55');
  const std::string message = error_of([&] { (void)folder.load_latest(); });
  EXPECT_NE(message.find("tensor 'w' of part 'model' is damaged"), std::string::npos) << message;
  EXPECT_NE(message.find("The one before is of step 10"), std::string::npos) << message;
  EXPECT_EQ(verify_checkpoint(scratch.path() / "run", 20).size(), 1u);
  testing::expect_same_state(small(10).part("model"), folder.load(10).part("model"));
  folder.remove_newer_than(10);
  EXPECT_EQ(folder.load_latest()->step, 10);
}

TEST(LoadCheckpoint, APartThatIsNotThereIsAnErrorThatListsThoseThatAre) {
  const std::string message = error_of([] { (void)small(3).part("optimiser"); });
  EXPECT_NE(message.find("no part 'optimiser'. It has 'model'"), std::string::npos) << message;
}

TEST(LoadCheckpoint, TellsWhatDiffersFromTheMachineThatWroteIt) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  folder.save(small(1));
  Checkpoint loaded = folder.load(1);
  EXPECT_TRUE(fingerprint_changes(loaded).empty());
  loaded.fingerprint["threads"] = "96";
  loaded.fingerprint.erase("libtorch");
  const std::vector<std::string> changes = fingerprint_changes(loaded);
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_NE(changes[0].find("libtorch: nothing where it was saved"), std::string::npos) << changes[0];
  EXPECT_NE(changes[1].find("threads: 96 where it was saved"), std::string::npos) << changes[1];
}

TEST(ExportPart, WritesAPlainSafetensorsFile) {
  const ScratchFolder scratch;
  CheckpointFolder folder(scratch.path() / "run");
  folder.save(small(4));
  const auto to = scratch.path() / "model.safetensors";
  export_part(scratch.path() / "run", 4, "model", to);
  const SafetensorsFile file(to);
  ASSERT_EQ(file.entries().size(), 1u);
  EXPECT_EQ(file.entries()[0].name, "w");
}

}  // namespace
}  // namespace halfstep
