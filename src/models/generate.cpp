#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <halfstep/error.h>
#include <halfstep/models.h>

#include <algorithm>

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

std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options) {
  HALFSTEP_CHECK(!prompt.empty(), "generate: the prompt has no token. Give at least one.");
  HALFSTEP_CHECK(options.temperature >= 0, "generate: temperature is ", options.temperature,
                 "; it must be 0 or above.");
  const EvaluationScope evaluation(model);
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::vector<int64_t> ids = prompt;
  for (int64_t written = 0; written < options.tokens; ++written) {
    const at::Tensor logits = model.forward(last_of(ids, options.context)).select(1, -1).to(at::kFloat);
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
