// Uses Halfstep and LibTorch as an installed package gives them; exits non-zero when either fails.
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  const halfstep::Machine machine = halfstep::inspect_machine();
  torch::nn::Linear model(8, 1);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  halfstep::GradScaler scaler({.initial = 1024});
  scaler.name_parameters(*model);
  torch::Tensor loss;
  {
    const halfstep::AutocastScope scope(torch::kHalf);
    loss = torch::mse_loss(model->forward(torch::ones({4, 8})), torch::zeros({4, 1}));
  }
  scaler.scale(loss).backward();
  const halfstep::StepReport report = scaler.step(optimizer);
  scaler.update();
  std::printf("consumer: Halfstep %s, LibTorch %s, FP16 step: %s\n", HALFSTEP_VERSION,
              machine.torch.loaded_version.c_str(), report.sentence().c_str());
  try {
    scaler.update(-1.0);
  } catch (const halfstep::Error& error) {
    return report.stepped() && machine.torch.loaded_version == machine.torch.built_version ? 0 : 1;
  }
  return 1;
}
