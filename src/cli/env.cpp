// `halfstep env`: what works on this machine.
#include <halfstep/config.h>
#include <halfstep/machine.h>

#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal_text.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;

constexpr int kNameColumns = 11;     // "Precision  "
constexpr int kSupportColumns = 13;  // "unavailable  "

ordered_json json_of(const std::vector<PrecisionSupport>& precisions) {
  ordered_json all = ordered_json::object();
  for (const PrecisionSupport& p : precisions) {
    all[p.precision] = {{"support", to_string(p.support)}, {"reason", p.reason}};
  }
  return all;
}

ordered_json json_of(const CpuReport& cpu) {
  ordered_json features = ordered_json::object();
  for (const auto& feature : cpu.features) features[feature.name] = feature.present;
  return {{"logical_cpus", cpu.logical_cpus},
          {"features", features},
          {"kernels", cpu.kernels},
          {"precisions", json_of(cpu.precisions)}};
}

// What the library was built without is null, not an empty string.
ordered_json version_or_null(const std::string& version) {
  return version.empty() ? ordered_json(nullptr) : ordered_json(version);
}

ordered_json json_of(const TorchReport& torch) {
  return {{"built", torch.built_version},
          {"loaded", torch.loaded_version},
          {"cpu_kernels", torch.cpu_kernels},
          {"onednn", version_or_null(torch.onednn_version)},
          {"mkl", version_or_null(torch.mkl_version)},
          {"gloo_built", torch.gloo_built},
          {"threads", torch.threads},
          {"interop_threads", torch.interop_threads}};
}

ordered_json json_of(const CudaReport& cuda) {
  ordered_json devices = ordered_json::array();
  for (const CudaDevice& device : cuda.devices) {
    devices.push_back({{"name", device.name},
                       {"compute_capability", {device.major, device.minor}},
                       {"precisions", json_of(device.precisions)}});
  }
  return {{"built", cuda.built}, {"available", cuda.available}, {"devices", devices}};
}

void print_json(const Machine& machine) {
  const ordered_json answer = {{"halfstep", HALFSTEP_VERSION},
                               {"cpu", json_of(machine.cpu)},
                               {"torch", json_of(machine.torch)},
                               {"cuda", json_of(machine.cuda)},
                               {"warnings", machine.warnings}};
  print_answer(answer);
}

void print_line(const std::string& name, const std::string& text) {
  std::cout << std::left << std::setw(kNameColumns) << name << text << "\n";
}

std::string names_of(const CpuReport& cpu, bool present) {
  std::string names;
  for (const auto& feature : cpu.features) {
    if (feature.present == present) names += (names.empty() ? "" : ", ") + feature.name;
  }
  return names.empty() ? "none of the others" : names;
}

void print_precisions(const std::string& device, const std::vector<PrecisionSupport>& precisions) {
  std::cout << "\nMatrix products on " << device << "\n";
  for (const PrecisionSupport& p : precisions) {
    std::cout << std::left << std::setw(kNameColumns) << p.precision << std::setw(kSupportColumns)
              << to_string(p.support) << p.reason << "\n";
  }
}

std::string cuda_line(const CudaReport& cuda) {
  if (!cuda.built) return "no: this LibTorch was built without it";
  if (!cuda.available) return "no: built into this LibTorch, but it finds no device and driver";
  return "yes: " + std::to_string(cuda.devices.size()) + " device(s)";
}

void print_plain(const Machine& machine) {
  const TorchReport& torch = machine.torch;
  print_line("Halfstep", HALFSTEP_VERSION);
  print_line("LibTorch", torch.loaded_version + " loaded, " + torch.built_version + " built against");
  print_line("", "oneDNN " + (torch.onednn_version.empty() ? "no" : torch.onednn_version) + ", MKL " +
                     (torch.mkl_version.empty() ? "no" : torch.mkl_version) + ", ATen loops in " +
                     torch.cpu_kernels);
  print_line("", std::to_string(torch.threads) + " threads in an operation, " +
                     std::to_string(torch.interop_threads) + " between operations");
  print_line("CPU", std::to_string(machine.cpu.logical_cpus) + " logical CPUs for this process");
  print_line("  has", names_of(machine.cpu, true));
  print_line("  lacks", names_of(machine.cpu, false));
  print_line("  uses", machine.cpu.kernels + " in Halfstep's own loops (HALFSTEP_ISA chooses another)");
  print_line("CUDA", cuda_line(machine.cuda));
  print_line("Gloo", torch.gloo_built ? "yes: built into this LibTorch (no connection was tried)"
                                      : "no: this LibTorch was built without it");
  print_precisions("the CPU", machine.cpu.precisions);
  for (const CudaDevice& device : machine.cuda.devices) {
    print_precisions(device.name + ", compute capability " + std::to_string(device.major) + "." +
                         std::to_string(device.minor),
                     device.precisions);
  }
  for (const std::string& warning : machine.warnings) {
    std::cout << "\n";
    print_paragraph("Warning: " + warning);
  }
}

}  // namespace

void add_env(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("env", "What works on this machine");
  CLI::Option* const json = add_switch(*command, "--json", "As JSON");
  command->callback([json] {
    const Machine machine = inspect_machine();
    json->count() > 0 ? print_json(machine) : print_plain(machine);
  });
}

}  // namespace halfstep::cli
