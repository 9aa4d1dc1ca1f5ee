#include "autocast/without_instructions.h"

#include <halfstep/autocast.h>

#include <algorithm>

#include "autocast/type_gate.h"
#include "base/cpu_features.h"

namespace halfstep {

bool cpu_has_products_of(c10::ScalarType low) {
  const CpuFeatures& cpu = cpu_features();
  return low == c10::ScalarType::BFloat16 ? cpu.avx512_bf16 || cpu.amx_bf16 : cpu.avx512_fp16;
}

bool is_convolution(std::string_view op) { return op.find("conv") != op.npos && !op.starts_with("cudnn"); }

bool is_one_product(std::string_view op) {
  constexpr std::string_view kProducts[] = {"addbmm", "addmm",  "addmv", "baddbmm", "bmm",
                                            "linear", "matmul", "mm",    "mv"};
  return std::ranges::find(kProducts, op) != std::end(kProducts) || is_convolution(op);
}

bool is_recurrent_layer(std::string_view op) {
  constexpr std::string_view kLayers[] = {"gru.", "lstm.", "mkldnn_rnn_layer", "rnn_relu.", "rnn_tanh."};
  return std::ranges::any_of(kLayers, [op](std::string_view layer) { return op.starts_with(layer); });
}

bool lstm_kernel_takes(c10::ScalarType low) {
  return low == c10::ScalarType::BFloat16 && cpu_features().avx512;
}

OpRule rule_on_this_cpu(std::string_view op, c10::ScalarType low) {
  check_can_be_low(low);
  const OpRule rule = OpPolicy::standard().rule(op);
  const bool stays = !cpu_has_products_of(low) && (is_convolution(op) || is_recurrent_layer(op));
  const bool lacks_a_kernel = op == "mkldnn_rnn_layer" && !lstm_kernel_takes(low);
  return stays || lacks_a_kernel ? OpRule::Fp32 : rule;
}

}  // namespace halfstep
