#include "support/autocast_transcript.h"

#include <sstream>

#include "support/run_case.h"
#include "support/small_models.h"

namespace halfstep::testing {
namespace {

constexpr at::ScalarType kLowTypes[] = {at::kBFloat16, at::kHalf};

/// Type, shape, and an FNV-1a hash of the bytes.
std::string description(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
  const at::Tensor plain = real.detach().contiguous();
  uint64_t hash = 0xcbf29ce484222325;
  const auto* bytes = static_cast<const uint8_t*>(plain.const_data_ptr());
  for (size_t i = 0; i < plain.nbytes(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  std::ostringstream text;
  text << tensor.scalar_type() << tensor.sizes() << ":" << std::hex << hash;
  return text.str();
}

std::string op_line(const OpCase& op_case, const std::vector<at::ScalarType>& types, at::ScalarType low,
                    const OpenRegion& open_region) {
  const Outcome outcome = run_case(op_case, types, [&] { return open_region(low); });
  std::ostringstream line;
  line << op_case.op << " low " << low << " given";
  for (const auto type : types) line << " " << type;
  line << " -> ";
  if (!outcome.error.empty()) return line.str() + outcome.error;
  line << description(outcome.output);
  for (const auto& leaf : outcome.leaves) line << " grad " << description(leaf.grad());
  return line.str();
}

template <typename Model>
std::string model_line(const char* name, Model model, const at::Tensor& x, const at::Tensor& y,
                       at::ScalarType low, const OpenRegion& open_region) {
  at::Tensor loss;
  {
    const auto region = open_region(low);
    loss = model.loss(x, y);
  }
  loss.backward();
  std::ostringstream line;
  line << name << " low " << low << " -> " << description(loss);
  for (const auto& parameter : model.parameters()) line << " grad " << description(parameter.grad());
  return line.str();
}

}  // namespace

std::vector<std::string> autocast_transcript(const OpenRegion& open_region) {
  at::set_num_threads(1);  // sums in one order
  std::vector<std::string> lines;
  for (const at::ScalarType low : kLowTypes) {
    for (const OpCase& op_case : op_cases()) {
      if (op_case.is_ours()) continue;
      for (const auto& types : {std::vector{at::kFloat}, std::vector{low}, std::vector{low, at::kFloat}})
        lines.push_back(op_line(op_case, types, low, open_region));
    }
    at::manual_seed(1);
    lines.push_back(
        model_line("mlp", Mlp(32, 64, 10), at::randn({16, 32}), at::randint(10, {16}), low, open_region));
    lines.push_back(
        model_line("conv net", ConvNet(), at::randn({8, 1, 12, 12}), at::randint(10, {8}), low, open_region));
    lines.push_back(model_line("transformer",
                               Transformer(/*vocabulary=*/50, /*width=*/32, /*heads=*/4, /*layers=*/1),
                               at::randint(50, {2, 12}), at::randint(50, {2, 12}), low, open_region));
  }
  return lines;
}

OpenRegion bare_region() {
  return [](at::ScalarType low) { return std::make_shared<BareAutocast>(low); };
}

}  // namespace halfstep::testing
