#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <halfstep/error.h>
#include <halfstep/models.h>

#include <algorithm>

#include "models/family.h"

namespace halfstep {
namespace {

at::Tensor last_of(const std::vector<int64_t>& ids, int64_t most) {
  const auto size = static_cast<int64_t>(ids.size());
  const int64_t count = most > 0 ? std::min(most, size) : size;
  at::Tensor tensor = at::empty({1, count}, at::kLong);
  std::copy(ids.end() - count, ids.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

}  // namespace

at::Tensor CausalLM::loss(const at::Tensor& ids, const at::Tensor& targets) {
  HALFSTEP_CHECK(ids.sizes() == targets.sizes(), "CausalLM: ids are ", ids.sizes(), " and targets ",
                 targets.sizes(), "; each id has one target.");
  return at::cross_entropy_loss(forward(ids).flatten(0, 1), targets.flatten());
}

double CausalLM::flops_per_token(int64_t sequence_length) const {
  const CausalLMShape sizes = shape();
  double weights = -static_cast<double>(sizes.looked_up_weights);
  for (const auto& parameter : parameters())
    if (parameter.dim() >= 2) weights += static_cast<double>(parameter.numel());
  const double attention = static_cast<double>(sizes.layers * sizes.heads * sizes.head_size) *
                           static_cast<double>(sequence_length);
  return 6 * (weights + attention);
}

void models::check_ids(const at::Tensor& ids) {
  HALFSTEP_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.size(1) > 0, "CausalLM: ids are ",
                 ids.scalar_type(), " of shape ", ids.sizes(), ", expected Long of [batch, length].");
}

std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options) {
  HALFSTEP_CHECK(!prompt.empty(), "generate: the prompt has no token. Give at least one.");
  HALFSTEP_CHECK(options.temperature >= 0, "generate: temperature is ", options.temperature,
                 "; it must be 0 or above.");
  const EvaluationScope evaluation(model);
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const at::Device device = model.parameters().front().device();
  std::vector<int64_t> ids = prompt;
  for (int64_t written = 0; written < options.tokens; ++written) {
    // Chosen on the host: the same ids from the same logits on every device.
    const at::Tensor context = last_of(ids, options.context).to(device);
    const at::Tensor logits = model.forward(context).select(1, -1).to(at::kFloat).cpu();
    HALFSTEP_CHECK(logits.isfinite().all().item<bool>(),
                   "generate: the model's logits are not all finite: its weights are ruined.");
    const at::Tensor next =
        options.temperature == 0
            ? logits.argmax(-1)
            : at::softmax(logits / options.temperature, -1).multinomial(1, /*replacement=*/false, random);
    ids.push_back(next.item<int64_t>());
  }
  return {ids.begin() + static_cast<std::ptrdiff_t>(prompt.size()), ids.end()};
}

}  // namespace halfstep
