// Uses Halfstep and LibTorch as an installed package gives them; exits non-zero when either fails.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <halfstep/error.h>
#include <halfstep/machine.h>

#include <iostream>

int main() {
  const halfstep::Machine machine = halfstep::inspect_machine();
  const auto ones = at::ones({3}, at::kBFloat16);
  try {
    HALFSTEP_CHECK(ones.sum().item<float>() == 4.0f, "three ones are not four");
  } catch (const halfstep::Error& error) {
    std::cout << "consumer: LibTorch " << machine.torch.loaded_version << ", caught: " << error.what()
              << "\n";
    return machine.torch.loaded_version == machine.torch.built_version ? 0 : 1;
  }
  return 1;
}
