#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/machine.h>

#include <cfloat>
#include <cstdlib>

namespace halfstep {
namespace {

// Asked of the arithmetic itself: a processor that flushes subnormal results to zero computes other bits.
bool flushes_subnormals() {
  volatile float smallest_normal = FLT_MIN;
  volatile float half = smallest_normal / 2;
  return half == 0;
}

std::string environment(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "not set";
}

std::string present(const CpuReport& cpu) {
  std::string names;
  for (const auto& feature : cpu.features)
    if (feature.present) names += (names.empty() ? "" : ", ") + feature.name;
  return names;
}

}  // namespace

std::map<std::string, std::string> fingerprint() {
  const Machine machine = inspect_machine();
  std::map<std::string, std::string> found = {
      {"halfstep", HALFSTEP_VERSION},
      {"libtorch", machine.torch.loaded_version},
      {"onednn", machine.torch.onednn_version},
      {"mkl", machine.torch.mkl_version},
      {"aten kernels", machine.torch.cpu_kernels},
      {"halfstep kernels", machine.cpu.kernels},
      {"cpu features", present(machine.cpu)},
      {"threads", std::to_string(machine.torch.threads)},
      {"subnormals", flushes_subnormals() ? "flushed to zero" : "kept"},
  };
  for (const char* name : {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"}) found[name] = environment(name);
  for (size_t i = 0; i < machine.cuda.devices.size(); ++i)
    found["cuda device " + std::to_string(i)] = machine.cuda.devices[i].name;
  return found;
}

std::vector<std::string> fingerprint_changes(const Checkpoint& checkpoint) {
  const auto here = fingerprint();
  const auto& there = checkpoint.fingerprint;
  std::vector<std::string> changes;
  const auto told = [](const auto& of, const std::string& name) {
    const auto found = of.find(name);
    return found == of.end() ? std::string("nothing") : found->second;
  };
  auto names = here;
  names.insert(there.begin(), there.end());
  for (const auto& [name, value] : names)
    if (told(there, name) != told(here, name))
      changes.push_back(
          detail::concat(name, ": ", told(there, name), " where it was saved, ", told(here, name), " here"));
  return changes;
}

}  // namespace halfstep
