// Writes synthetic runs into a folder, for the tests that ask the program.
#include <filesystem>

#include "report/synthetic_run.h"

int main(int, char** argv) {
  using halfstep::testing::SyntheticRun;
  const std::filesystem::path folder = argv[1];
  const auto write = [&](const char* name, const SyntheticRun& run) {
    std::filesystem::create_directories(folder / name);
    halfstep::testing::write_synthetic_run(folder / name, run);
  };
  write("fp32", {.compute = "fp32", .own_seed = 1, .own_noise = 0.001});
  write("bf16", {.compute = "bf16", .own_seed = 2, .own_noise = 0.001});
  write("fp16",
        {.compute = "fp16", .own_seed = 3, .loss_factor = 1.02, .own_noise = 0.001, .resumed_after = 400});
  write("other-batches", {.compute = "bf16", .batch_seed = 9, .own_seed = 4});
  write("diverged", {.steps = 600, .planned_steps = 1000, .compute = "fp16", .nan_from = 500});
  write("killed",
        {.steps = 40, .planned_steps = 1000, .has_memory = false, .ends = false, .cut_last_line = true});
  write("long", {.steps = 100000, .compute = "fp16", .resumed_after = 40000});
}
