// Saves two checkpoints of a small BF16 run into the folder that is given: for tests that look at one from
// outside.
#include <halfstep/checkpoint.h>
#include <halfstep/mixed_precision.h>
#include <halfstep/optim.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/small_models.h"

int main(int argc, char** argv) {
  using namespace halfstep;
  if (argc != 2) return 2;
  torch::manual_seed(1);
  auto model = std::make_shared<testing::Mlp>(12, 24, 5);
  MixedPrecision mp(Precision::bf16(), *model, {.autocast = testing::kAnyMachine});
  AdamW optimizer(mp.params(), {.lr = 1e-2});
  CheckpointFolder folder(argv[1]);
  for (int64_t step = 1; step <= 2; ++step) {
    const auto x = torch::randn({16, 12}), target = torch::randint(5, {16});
    mp.backward(mp.forward([&] { return model->loss(x, target); }));
    const auto grads = mp.inspect_grads();
    (void)optimizer.step(grads.clipped_to(1.0));
    mp.advance(grads);
    optimizer.zero_grad();
    folder.save({.step = step,
                 .parts = {{"model", module_state(*model)},
                           {"precision", mp.state_dict()},
                           {"optimizer", optimizer.state_dict()},
                           {"random", random_state()}}});
  }
}
