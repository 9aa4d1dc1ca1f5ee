#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>

#include <mutex>

namespace halfstep {
namespace {

/// visit(name, generator) for each of LibTorch's default generators.
template <typename Visit>
void for_each_generator(Visit visit) {
  visit("cpu", at::detail::getDefaultCPUGenerator());
  if (!at::globalContext().hasCUDA()) return;
  const auto count = at::detail::getCUDAHooks().deviceCount();
  for (c10::DeviceIndex i = 0; i < count; ++i)
    visit(detail::concat("cuda.", static_cast<int>(i)),
          at::globalContext().defaultGenerator(at::Device(at::kCUDA, i)));
}

}  // namespace

StateDict random_state() {
  StateDict saved;
  for_each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    saved.set(name, generator.get_state());
  });
  return saved;
}

void load_random_state(const StateDict& saved) {
  // All before the first is set: type and length of a state are the same on every machine with this LibTorch.
  expect_like("random generators", saved, random_state());
  for_each_generator([&](const std::string& name, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    generator.set_state(saved.tensor(name));
  });
}

}  // namespace halfstep
