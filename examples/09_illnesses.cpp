// Runs whose precision is ill, to see what the doctor says of them. 09_illnesses NAME --folder FOLDER
// [--remedy]
//
//     09_illnesses underflow --folder runs/underflow
//     halfstep doctor runs/underflow
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>

#include "support/illnesses.h"

int main(int argc, char** argv) try {
  const std::vector<std::string> given(argv + 1, argv + argc);
  const bool with_remedy = given.size() == 4 && given[3] == "--remedy";
  if (given.size() != (with_remedy ? 4 : 3) || given[1] != "--folder") {
    std::puts("09_illnesses NAME --folder FOLDER [--remedy], with a new folder. Names:");
    for (const Illness& each : illnesses())
      std::printf("  %-14s %s: %s\n", each.name.c_str(), each.code.c_str(), each.planted.c_str());
    return given.empty() ? 0 : 2;
  }
  const auto found = std::ranges::find(illnesses(), given[0], &Illness::name);
  if (found == illnesses().end())
    throw std::runtime_error("'" + given[0] + "' is no illness; without arguments they are listed.");
  torch::set_num_threads(1);
  found->train(given[2], with_remedy);
  std::printf("%s: %s%s\n", given[2].c_str(), found->planted.c_str(), with_remedy ? ", with the remedy" : "");
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
