#include "tensor/saved_tensors.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <thread>

#include "support/error_of.h"

namespace halfstep::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

/// Notes what it is shown, and keeps FP64 copies of FP32 tensors: exact, and seen to be at work.
struct WideningPacker final : SavedTensorPacker {
  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    const std::lock_guard lock(mutex);
    shown.push_back(tensor.detach());
    if (tensor.scalar_type() != at::kFloat) return std::nullopt;
    return PackedTensor{tensor.to(at::kDouble), [this](const at::Tensor& kept) {
                          ++restored;
                          return kept.to(at::kFloat);
                        }};
  }
  std::mutex mutex;
  Tensors shown;
  int restored = 0;
};

/// Saves inputs, outputs, indices, and a view of a parameter.
struct Model {
  at::Tensor weight = at::randn({8, 8}).requires_grad_();
  at::Tensor table = at::randn({5, 8}).requires_grad_();
  at::Tensor ids = at::tensor({1, 4, 1});

  at::Tensor loss() const {
    const at::Tensor x = at::tanh(at::embedding(table, ids));
    const at::Tensor y = at::softmax(at::linear(x, weight), -1);
    return (y * y.exp()).select(1, 2).pow(3).sum();
  }
  Tensors parameters() const { return {weight, table}; }
};

Model make_model() {
  at::manual_seed(3);
  return {};
}

void expect_equal(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

Tensors plain_gradients() {
  const Model model = make_model();
  return torch::autograd::grad({model.loss()}, model.parameters());
}

TEST(SavedTensors, GradientsThroughAnExactPackerAreThoseOfAPlainRun) {
  const Model model = make_model();
  const auto packer = std::make_shared<WideningPacker>();
  at::Tensor loss;
  {
    const SavedTensorScope scope(packer, "test");
    loss = model.loss();
  }
  expect_equal(torch::autograd::grad({loss}, model.parameters()), plain_gradients());
  EXPECT_GT(packer->restored, 4);
}

TEST(SavedTensors, ParametersAreNotShown) {
  const Model model = make_model();
  const auto packer = std::make_shared<WideningPacker>();
  const SavedTensorScope scope(packer, "test");
  model.loss();
  ASSERT_FALSE(packer->shown.empty());
  const at::Tensor scaled = model.weight * model.table.select(0, 1);  // saves both
  for (const at::Tensor& shown : packer->shown)
    EXPECT_FALSE(shown.data_ptr() == model.weight.data_ptr() && shown.is_contiguous());
}

TEST(SavedTensors, OutsideTheScopeNothingIsShown) {
  const Model model = make_model();
  const auto packer = std::make_shared<WideningPacker>();
  {
    const SavedTensorScope scope(packer, "test");
  }
  model.loss();
  std::thread([&] { model.loss(); }).join();
  EXPECT_TRUE(packer->shown.empty());
}

TEST(SavedTensors, AnOuterScopeIsShownWhatTheInnerOneKeeps) {
  const Model model = make_model();
  const auto outer_packer = std::make_shared<WideningPacker>(),
             inner_packer = std::make_shared<WideningPacker>();
  at::Tensor loss;
  {
    const SavedTensorScope outer(outer_packer, "test");
    const SavedTensorScope inner(inner_packer, "test");
    loss = model.loss();
  }
  ASSERT_EQ(outer_packer->shown.size(), inner_packer->shown.size());
  for (std::size_t i = 0; i < outer_packer->shown.size(); ++i) {
    const bool widened = inner_packer->shown[i].scalar_type() == at::kFloat;
    EXPECT_EQ(outer_packer->shown[i].scalar_type(), widened ? at::kDouble : at::kInt);
  }
  expect_equal(torch::autograd::grad({loss}, model.parameters()), plain_gradients());
}

TEST(SavedTensors, AScopeTravelsWithLibTorchsThreadLocalState) {
  const Model model = make_model();
  const auto packer = std::make_shared<WideningPacker>();
  std::optional<at::ThreadLocalState> state;
  {
    const SavedTensorScope scope(packer, "test");
    state.emplace();
  }
  at::Tensor loss;
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(*state);
    loss = model.loss();
  }).join();
  EXPECT_FALSE(packer->shown.empty());
  expect_equal(torch::autograd::grad({loss}, model.parameters()), plain_gradients());
}

TEST(SavedTensors, AGraphThatIsKeptCanBeUsedAgain) {
  const Model model = make_model();
  const auto packer = std::make_shared<WideningPacker>();
  const SavedTensorScope scope(packer, "test");
  const at::Tensor loss = model.loss();
  for (int pass = 0; pass < 2; ++pass)
    expect_equal(torch::autograd::grad({loss}, model.parameters(), {}, /*retain_graph=*/true),
                 plain_gradients());
}

TEST(SavedTensors, SecondDerivativesAreThoseOfAPlainRun) {
  const auto second_derivatives = [](const Model& model, const at::Tensor& loss) {
    const Tensors first = torch::autograd::grad({loss}, model.parameters(), {}, true, /*create_graph=*/true);
    return torch::autograd::grad({first[0].pow(2).sum() + first[1].sin().sum()}, model.parameters());
  };
  const Model model = make_model(), plain = make_model();
  const SavedTensorScope scope(std::make_shared<WideningPacker>(), "test");
  const Tensors packed = second_derivatives(model, model.loss());
  std::optional<Tensors> expected;
  std::thread([&] {
    expected = second_derivatives(plain, plain.loss());
  }).join();  // a thread without the scope
  expect_equal(packed, *expected);
}

/// Keeps what it is shown: the tensor that the rest of the program may go on to change.
struct SameTensorPacker final : SavedTensorPacker {
  std::optional<PackedTensor> pack(const at::Tensor& tensor) override {
    return PackedTensor{tensor, [](const at::Tensor& kept) { return kept; }};
  }
};

TEST(SavedTensors, ATensorThatWasChangedInPlaceAfterItWasSavedIsAnError) {
  const at::Tensor weight = at::ones(4).requires_grad_();
  for (const bool packs : {true, false}) {
    at::Tensor x = at::ones(4), loss;
    {
      const auto same = std::make_shared<SameTensorPacker>();
      const auto none = std::make_shared<WideningPacker>();
      const SavedTensorScope scope(packs ? std::shared_ptr<SavedTensorPacker>(same) : none, "test");
      loss = packs ? (weight * x).sum() : (weight.to(at::kDouble) * (x = x.to(at::kDouble))).sum();
    }
    x.add_(1);
    const std::string error = error_of([&] { loss.backward(); });
    EXPECT_NE(error.find(" [4]) that was changed in place after it was saved: it is at version "), error.npos)
        << error;
  }
}

TEST(SavedTensors, AGraphThatSavesItsOwnOutputsIsFreed) {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
  {
    const SavedTensorScope scope(std::make_shared<SameTensorPacker>(), "test");
    const at::Tensor y = at::ones(4).requires_grad_().exp();  // saves its result
    storage = c10::weak_intrusive_ptr<c10::StorageImpl>(y.storage().getWeakStorageImpl());
    EXPECT_FALSE(storage.expired());
  }
  EXPECT_TRUE(storage.expired());
}

}  // namespace
}  // namespace halfstep::testing
