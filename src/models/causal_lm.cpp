#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/argmax.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>
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

at::Tensor CausalLM::forward_packed(const at::Tensor& ids, const at::Tensor& documents) {
  HALFSTEP_CHECK(
      !documents.defined() || (documents.sizes() == ids.sizes() && documents.scalar_type() == at::kLong),
      "CausalLM: ids are ", ids.sizes(), " and documents ", documents.scalar_type(), " of ",
      documents.sizes(), "; each id has one number of type Long.");
  return logits(ids, {.documents = documents});
}

at::Tensor CausalLM::loss(const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& documents) {
  HALFSTEP_CHECK(ids.sizes() == targets.sizes(), "CausalLM: ids are ", ids.sizes(), " and targets ",
                 targets.sizes(), "; each id has one target.");
  return at::cross_entropy_loss(forward_packed(ids, documents).flatten(0, 1), targets.flatten());
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

namespace {

/// The place where the text of each id begins: the last one so far whose number differs from that before it.
/// Two texts of the same number that another one separates are two.
at::Tensor begins_of(const at::Tensor& documents) {
  const int64_t length = documents.size(1);
  at::Tensor begins = at::zeros_like(documents);
  if (length > 1)
    begins.narrow(1, 1, length - 1)
        .copy_(documents.narrow(1, 1, length - 1).ne(documents.narrow(1, 0, length - 1)) *
               at::arange(1, length, documents.options()));
  return std::get<0>(begins.cummax(1));
}

}  // namespace

void models::check_ids(const at::Tensor& ids) {
  HALFSTEP_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.size(1) > 0, "CausalLM: ids are ",
                 ids.scalar_type(), " of shape ", ids.sizes(), ", expected Long of [batch, length].");
}

std::optional<at::Tensor> models::mask_of(const at::Tensor& ids, const Surroundings& surroundings,
                                          int64_t window) {
  const int64_t queries = ids.size(1), keys = length_before(surroundings) + queries;
  const at::Tensor& documents = surroundings.documents;
  const bool windowed = window > 0 && window < keys;
  if (!windowed && !documents.defined() && (queries == keys || queries == 1)) return std::nullopt;
  const at::Tensor place = at::arange(keys, ids.options());
  const at::Tensor distance = place.narrow(0, keys - queries, queries).unsqueeze(1) - place;
  at::Tensor seen = distance.ge(0);
  if (windowed) seen = seen.logical_and(distance.lt(window));
  if (documents.defined()) {
    const at::Tensor begins = begins_of(documents);
    seen = begins.unsqueeze(2).eq(begins.unsqueeze(1)).logical_and(seen).unsqueeze(1);
  }
  return seen;
}

int64_t models::length_before(const Surroundings& surroundings) {
  return surroundings.cache ? surroundings.cache->length() : 0;
}

at::Tensor models::positions_of(const at::Tensor& ids, const Surroundings& surroundings) {
  const int64_t before = length_before(surroundings), length = ids.size(1);
  const at::Tensor place = at::arange(before, before + length, ids.options());
  const at::Tensor& documents = surroundings.documents;
  return documents.defined() ? place - begins_of(documents) : place;
}

std::pair<at::Tensor, at::Tensor> KeyValueCache::append(std::size_t layer, const at::Tensor& keys,
                                                        const at::Tensor& values) {
  const int64_t count = keys.size(2);
  if (layers_.size() <= layer) layers_.resize(layer + 1);
  Layer& kept_layer = layers_[layer];
  const int64_t before = kept_layer.length, after = before + count;
  HALFSTEP_CHECK(before == layers_.front().length - (layer == 0 ? 0 : count), "KeyValueCache: layer ", layer,
                 " holds ", before, " tokens and the first ", layers_.front().length,
                 ": an earlier forward was abandoned. Start with a new cache.");
  const auto extended = [&](at::Tensor& kept, const at::Tensor& added) {
    HALFSTEP_CHECK(!kept.defined() || (kept.size(0) == added.size(0) && kept.size(1) == added.size(1) &&
                                       kept.size(3) == added.size(3)),
                   "KeyValueCache: keys or values of ", added.sizes(), " after some of ", kept.sizes(),
                   ": another batch or another model. Start with a new cache.");
    if (!kept.defined() || kept.size(2) < after) {
      constexpr int64_t kLeast = 64;
      const int64_t room = std::max(kLeast, 2 * after);  // to grow costs a copy of all, and comes seldom
      at::Tensor larger = at::empty({added.size(0), added.size(1), room, added.size(3)}, added.options());
      if (before > 0) larger.narrow(2, 0, before).copy_(kept.narrow(2, 0, before));
      kept = std::move(larger);
    }
    kept.narrow(2, before, count).copy_(added);
    return kept.narrow(2, 0, after);
  };
  const std::pair all = {extended(kept_layer.keys, keys), extended(kept_layer.values, values)};
  kept_layer.length = after;
  return all;
}

namespace {

/// Probabilities of the tokens that may be drawn; the others' are 0.
at::Tensor probabilities_of(const at::Tensor& logits, const GenerateOptions& options) {
  // From the largest one down: a low temperature makes no infinity.
  const at::Tensor below = logits - logits.amax(-1, /*keepdim=*/true);
  at::Tensor probabilities = at::softmax(below.to(at::kDouble) / options.temperature, -1);
  if (options.top_k == 0 && options.top_p >= 1) return probabilities;
  const auto [sorted, order] = probabilities.sort(/*stable=*/true, /*dim=*/-1, /*descending=*/true);
  // A token stays while those before it have less than top_p together: at least one does.
  at::Tensor stays = (sorted.cumsum(-1) - sorted).lt(options.top_p);
  stays.select(-1, 0).fill_(true);
  if (options.top_k > 0 && options.top_k < sorted.size(-1))
    stays.narrow(-1, options.top_k, sorted.size(-1) - options.top_k).fill_(false);
  return at::zeros_like(probabilities).scatter(-1, order, sorted * stays);  // multinomial takes any sum
}

void check_options(const std::vector<int64_t>& prompt, const GenerateOptions& options) {
  HALFSTEP_CHECK(!prompt.empty(), "generate: the prompt has no token. Give at least one.");
  HALFSTEP_CHECK(options.temperature >= 0, "generate: temperature is ", options.temperature,
                 "; it must be 0 or above.");
  HALFSTEP_CHECK(options.top_k >= 0, "generate: top_k is ", options.top_k, "; it must be 0 or above.");
  HALFSTEP_CHECK(options.top_p > 0 && options.top_p <= 1, "generate: top_p is ", options.top_p,
                 "; it must be above 0, at most 1.");
}

}  // namespace

std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt,
                              const GenerateOptions& options) {
  check_options(prompt, options);
  const EvaluationScope evaluation(model);
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  const at::Device device = model.parameters().front().device();
  std::vector<int64_t> ids = prompt;
  KeyValueCache cache;
  for (int64_t written = 0; written < options.tokens; ++written) {
    const auto known = static_cast<int64_t>(ids.size());
    const bool cached = options.cache && (options.context == 0 || known <= options.context);
    const at::Tensor all = cached ? model.read_on(last_of(ids, known - cache.length()).to(device), cache)
                                  : model.forward(last_of(ids, options.context).to(device));
    // Chosen on the host: the same ids from the same logits on every device.
    const at::Tensor logits = all.select(1, -1).to(at::kFloat).cpu();
    HALFSTEP_CHECK(logits.isfinite().all().item<bool>(),
                   "generate: the model's logits are not all finite: its weights are ruined.");
    const at::Tensor next =
        options.temperature == 0
            ? logits.argmax(-1)
            : probabilities_of(logits, options).multinomial(1, /*replacement=*/false, random);
    ids.push_back(next.item<int64_t>());
    if (std::ranges::find(options.ends, ids.back()) != options.ends.end()) break;
    if (options.each_token) options.each_token(ids.back());
  }
  return {ids.begin() + static_cast<std::ptrdiff_t>(prompt.size()), ids.end()};
}

}  // namespace halfstep
