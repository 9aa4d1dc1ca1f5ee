#include "tensor/update_path.h"

#include <atomic>

namespace halfstep {
namespace {

std::atomic<int> aten_on_cpu = 0;

}  // namespace

bool kernels_serve(const at::Tensor& tensor) { return tensor.is_cpu() && aten_on_cpu == 0; }

AtenOnCpu::AtenOnCpu() { ++aten_on_cpu; }
AtenOnCpu::~AtenOnCpu() { --aten_on_cpu; }

}  // namespace halfstep
