// Each calls an operation that its row in the room `ops` defines: autocast decides how it is computed.
#include <halfstep/functions.h>

#include <ATen/core/dispatch/Dispatcher.h>

namespace halfstep {
namespace {

template <typename Signature>
auto operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) {
  static const auto op = operation<at::Tensor(const at::Tensor&, const at::Tensor&)>("halfstep::swiglu");
  return op.call(gate, up);
}

at::Tensor rotary(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  static const auto op =
      operation<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>("halfstep::rotary");
  return op.call(x, cos, sin);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& gain, double eps) {
  static const auto op =
      operation<at::Tensor(const at::Tensor&, const at::Tensor&, double)>("halfstep::rms_norm");
  return op.call(x, gain, eps);
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& gain, const at::Tensor& bias, double eps) {
  static const auto op =
      operation<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double)>(
          "halfstep::layer_norm");
  return op.call(x, gain, bias, eps);
}

}  // namespace halfstep
