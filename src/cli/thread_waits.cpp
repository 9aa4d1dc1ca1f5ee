#include "cli/thread_waits.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace halfstep::cli {
namespace {

constexpr const char* kSpins = "10000";

std::vector<std::string> own_arguments() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> arguments;
  for (std::string argument; std::getline(file, argument, '\0');) arguments.push_back(argument);
  return arguments;
}

}  // namespace

void spin_briefly() {
  for (const char* name : {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"})
    if (std::getenv(name) != nullptr) return;
  std::vector<std::string> arguments = own_arguments();
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  ::setenv("GOMP_SPINCOUNT", kSpins, 1);
  ::execv("/proc/self/exe", pointers.data());
  // Without /proc nothing is lost but speed beside other programs.
}

}  // namespace halfstep::cli
