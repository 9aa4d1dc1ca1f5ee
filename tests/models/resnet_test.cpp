// ResNet-18 beside the same net in Python's torch, which takes our weights by torchvision's names, strictly.
#include <gtest/gtest.h>
#include <halfstep/models.h>
#include <halfstep/tensor_file.h>
#include <torch/torch.h>

#include "support/python.h"
#include "support/scratch.h"

namespace halfstep::testing {
namespace {

class ResNet : public ::testing::TestWithParam<bool> {};

TEST_P(ResNet, LogitsGradientsAndStatisticsAreThoseOfPythonsNet) {
  const bool small = GetParam();
  const ResNet18Options options{.classes = 10, .channels = small ? 1 : 3, .small_images = small};
  const int64_t side = small ? 28 : 64;
  at::set_num_threads(1);
  ResNet18 model(options, 4);
  const auto images =
      at::randn({4, options.channels, side, side}, at::make_generator<at::CPUGeneratorImpl>(1));
  const auto labels = at::arange(4, at::kLong);

  const ScratchFolder folder;
  NamedTensors weights;
  for (const auto& item : model->named_parameters())
    weights.emplace_back(item.key(), item.value().detach().clone());
  for (const auto& item : model->named_buffers()) weights.emplace_back(item.key(), item.value().clone());
  weights.emplace_back("images", images);
  weights.emplace_back("labels", labels);
  write_tensors(folder / "weights.safetensors", weights);
  const std::string results = (folder / "results.safetensors").string();
  const auto answer =
      ask_python("tests/models/resnet_oracle.py", {{"weights", (folder / "weights.safetensors").string()},
                                                   {"results", results},
                                                   {"classes", options.classes},
                                                   {"small_images", small},
                                                   {"threads", 1}});
  std::map<std::string, at::Tensor> expected;
  for (auto& [name, tensor] : read_tensors(results)) expected.emplace(name, tensor);
  EXPECT_EQ(expected.size(), answer["tensors"].get<size_t>());

  // The same operations of the same engine in the same order: the same bits.
  const auto logits = model->forward(images);
  EXPECT_TRUE(at::equal(logits, expected.at("logits")));
  at::cross_entropy_loss(logits, labels).backward();
  for (const auto& item : model->named_parameters())
    EXPECT_TRUE(at::equal(item.value().grad(), expected.at("grad." + item.key()))) << item.key();
  for (const auto& item : model->named_buffers())
    EXPECT_TRUE(at::equal(item.value(), expected.at("buffer." + item.key()))) << item.key();
  model->eval();
  const torch::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(model->forward(images), expected.at("evaluated")));
}

INSTANTIATE_TEST_SUITE_P(Images, ResNet, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "OneChannel28" : "ThreeChannels64"; });

}  // namespace
}  // namespace halfstep::testing
