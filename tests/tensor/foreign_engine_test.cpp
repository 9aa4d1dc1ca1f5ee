// A process in which somebody else's autograd engine was there before Halfstep's, as Python's is.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include "support/error_of.h"
#include "tensor/saved_tensors.h"

namespace halfstep::testing {
namespace {

struct ForeignEngine final : torch::autograd::Engine {
  static Engine& instance() {
    static auto* const engine = new ForeignEngine;
    return *engine;
  }
};

// Before every ordinary static object, hence before Halfstep's.
struct ForeignInstallation {
  ForeignInstallation() { torch::autograd::set_default_engine_stub(&ForeignEngine::instance); }
};
__attribute__((init_priority(101))) const ForeignInstallation foreign_installation;

struct AnyPacker final : SavedTensorPacker {
  std::optional<PackedTensor> pack(const at::Tensor&) override { return std::nullopt; }
};

TEST(ForeignEngine, StaysInPlaceAndWorks) {
  EXPECT_EQ(&torch::autograd::Engine::get_default_engine(), &ForeignEngine::instance());
  const at::Tensor x = at::ones(3).requires_grad_();
  (x * x).sum().backward();
  EXPECT_EQ(x.grad()[0].item<float>(), 2);
}

TEST(ForeignEngine, AScopeIsRefusedByName) {
  EXPECT_FALSE(saved_tensors_can_be_packed());
  const std::string error =
      error_of([] { const SavedTensorScope scope(std::make_shared<AnyPacker>(), "CompressedActivations"); });
  EXPECT_NE(error.find("CompressedActivations: this process runs another autograd engine"), error.npos)
      << error;
}

}  // namespace
}  // namespace halfstep::testing
