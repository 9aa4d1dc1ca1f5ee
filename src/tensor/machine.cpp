#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <halfstep/error.h>
#include <halfstep/machine.h>
#include <sched.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/version.h>

#include <cstdlib>
#include <thread>

#include "base/cpu_features.h"
#include "kernels/dispatch.h"
#include "tensor/machine_probes.h"

namespace halfstep {
namespace {

using detail::concat;

// "Intel(R) MKL-DNN v3.12.0 (Git Hash ...)" has "3.12.0" in it; an answer without a version has nothing.
std::string first_version_in(const std::string& text) {
  const size_t dot = text.find('.');
  if (dot == std::string::npos) return "";
  const char* const digits = "0123456789";
  const size_t before = text.find_last_not_of(digits, dot - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  const size_t end = text.find_first_not_of("0123456789.", dot);
  return text.substr(begin, end - begin);
}

// aoti_torch_abi_version() is compiled into LibTorch, so it tells the library and not the headers.
// One byte each from the top: major, minor, patch (torch/headeronly/version.h).
std::string loaded_torch_version() {
  const uint64_t packed = aoti_torch_abi_version();
  return concat((packed >> 56) & 0xff, '.', (packed >> 48) & 0xff, '.', (packed >> 40) & 0xff);
}

// A container or taskset may allow fewer CPUs than the machine has. The set below holds 1024; a larger
// machine is counted whole.
int64_t cpus_we_may_use() {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return std::thread::hardware_concurrency();
  return CPU_COUNT(&allowed);
}

CpuReport inspect_cpu(bool with_onednn) {
  const CpuFeatures& cpu = cpu_features();
  CpuReport report;
  report.logical_cpus = cpus_we_may_use();
  report.features = {
      {"AVX2", cpu.avx2},
      {"AVX-512", cpu.avx512},
      {"AVX512-BF16", cpu.avx512_bf16},
      {"AVX512-FP16", cpu.avx512_fp16},
      {"AMX-BF16", cpu.amx_bf16},
      {"AMX-INT8", cpu.amx_int8},
      {"AMX-FP16", cpu.amx_fp16},
  };
  report.kernels = kernels().isa;
  report.precisions = cpu_precisions(cpu, with_onednn);
  return report;
}

TorchReport inspect_torch() {
  TorchReport report;
  report.built_version = TORCH_VERSION;
  report.loaded_version = loaded_torch_version();
  report.cpu_kernels = at::get_cpu_capability();
  if (at::hasMKLDNN()) report.onednn_version = first_version_in(at::get_mkldnn_version());
  if (at::hasMKL()) report.mkl_version = first_version_in(at::get_mkl_version());
  report.gloo_built = at::show_config().find("USE_GLOO=ON") != std::string::npos;
  report.threads = at::get_num_threads();
  report.interop_threads = at::get_num_interop_threads();
  return report;
}

CudaReport inspect_cuda() {
  CudaReport report;
  report.built = at::detail::getCUDAHooks().isBuilt();
  report.available = at::hasCUDA();
  if (!report.available) return report;
  for (const DriverDevice& device : cuda_driver_devices()) {
    report.devices.push_back(
        {device.name, device.major, device.minor, cuda_precisions(device.major, device.minor)});
  }
  return report;
}

std::vector<std::string> find_warnings(const TorchReport& torch) {
  std::vector<std::string> warnings;
  if (torch.built_version != torch.loaded_version) {
    warnings.push_back(concat("Halfstep was built against LibTorch ", torch.built_version, " but ",
                              torch.loaded_version, " is loaded. Another minor version has another ABI: ",
                              "rebuild Halfstep, or set LD_LIBRARY_PATH to the LibTorch it was built with."));
  }
  // What follows from these is decided inside oneDNN and ATen, where we cannot look.
  for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"}) {
    if (const char* value = std::getenv(name)) {
      warnings.push_back(concat(name, "=", value, " is set: LibTorch may use fewer instructions than are ",
                                "listed here. Unset it to use all."));
    }
  }
  return warnings;
}

}  // namespace

Machine inspect_machine() {
  Machine machine;
  machine.torch = inspect_torch();
  machine.cpu = inspect_cpu(!machine.torch.onednn_version.empty());
  machine.cuda = inspect_cuda();
  machine.warnings = find_warnings(machine.torch);
  return machine;
}

std::string_view to_string(Support support) {
  switch (support) {
    case Support::Native:
      return "native";
    case Support::Emulated:
      return "emulated";
    case Support::Unavailable:
      return "unavailable";
  }
  HALFSTEP_BUG("Support has no value ", static_cast<int>(support));
}

}  // namespace halfstep
