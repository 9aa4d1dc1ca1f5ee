// Bytes that a GPT's forward leaves alive for backward, and the most that are alive during backward, as each
// part that saves some is switched on. One forward and backward each; bytes are exact and do not vary.
//
//   activation_bytes [--layers N] [--width N] [--tokens N] [--vocabulary N]
#include <halfstep/activations.h>
#include <halfstep/autocast.h>
#include <torch/torch.h>

#include <cstring>
#include <functional>
#include <iomanip>
#include <iostream>

#include "support/live_bytes.h"
#include "support/run_case.h"
#include "support/small_models.h"

namespace {

using halfstep::AutocastScope;
using halfstep::CompressedActivations;
using halfstep::Format;
using halfstep::OpPolicy;
using halfstep::OpRule;
using halfstep::testing::LiveBytes;
using halfstep::testing::Transformer;

struct Sizes {
  int64_t layers = 6, width = 384, tokens = 2048, vocabulary = 50257;
  int64_t heads() const { return width / 64; }
  static constexpr int64_t kSequence = 512;
};

struct Bytes {
  int64_t after_forward, peak_of_backward;
};

Bytes measure(const Sizes& sizes, at::ScalarType parameters,
              const std::function<at::Tensor(Transformer&)>& loss_of) {
  at::manual_seed(1);
  Transformer model(sizes.vocabulary, sizes.width, sizes.heads(), sizes.layers);
  model.to(parameters);
  LiveBytes bytes;
  const at::Tensor loss = loss_of(model);
  const int64_t after_forward = bytes.live();
  bytes.forget_peak();
  loss.backward();
  return {after_forward, bytes.peak()};
}

/// Transformer::loss with a checkpoint around each block.
at::Tensor checkpointed_loss(Transformer& model, const at::Tensor& ids) {
  at::Tensor x = model.tokens(ids);
  for (const auto& block : *model.blocks) {
    x = halfstep::checkpoint_activations(
        [block](const at::Tensor& x) { return block->as<halfstep::testing::TransformerBlock>()->forward(x); },
        x);
  }
  return torch::nn::functional::cross_entropy(model.head(model.norm(x)).flatten(0, 1), ids.flatten());
}

void print(const char* name, const Bytes& bytes) {
  std::cout << std::setw(44) << std::left << name << std::right << std::setw(12) << bytes.after_forward / 1e6
            << std::setw(12) << bytes.peak_of_backward / 1e6 << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  Sizes sizes;
  for (int i = 1; i + 1 < argc; i += 2) {
    int64_t* const size = std::strcmp(argv[i], "--layers") == 0       ? &sizes.layers
                          : std::strcmp(argv[i], "--width") == 0      ? &sizes.width
                          : std::strcmp(argv[i], "--tokens") == 0     ? &sizes.tokens
                          : std::strcmp(argv[i], "--vocabulary") == 0 ? &sizes.vocabulary
                                                                      : nullptr;
    if (!size) {
      std::cerr << "usage: activation_bytes [--layers N] [--width N] [--tokens N] [--vocabulary N]\n";
      return 2;
    }
    *size = std::atoll(argv[i + 1]);
  }
  const at::Tensor ids = at::randint(sizes.vocabulary, {sizes.tokens / Sizes::kSequence, Sizes::kSequence});
  const auto in_scope = [&](bool repeat_upcasts, bool low_logits, bool repeat_outputs) {
    return [=](Transformer& model) {
      OpPolicy policy = OpPolicy::standard();
      if (!low_logits) policy.set("cross_entropy_loss", OpRule::Stock);
      const AutocastScope scope(
          at::kBFloat16, policy,
          {.allow_emulated = true, .repeat_upcasts = repeat_upcasts, .repeat_outputs = repeat_outputs});
      return model.loss(ids, ids);
    };
  };
  const auto in_stock_region = [&](Transformer& model) {
    const halfstep::testing::BareAutocast region(at::kBFloat16);
    return model.loss(ids, ids);
  };
  const auto compressed = [&](Transformer& model) {
    const CompressedActivations activations(Format::E4M3);
    return in_scope(true, true, true)(model);
  };
  const auto checkpointed = [&](Transformer& model) {
    const AutocastScope scope(at::kBFloat16, OpPolicy::standard(), {.allow_emulated = true});
    return checkpointed_loss(model, ids);
  };
  std::cout << std::fixed << std::setprecision(1) << std::setw(44) << std::left << "MB" << std::right
            << std::setw(12) << "forward" << std::setw(12) << "backward" << "\n";
  print("FP32", measure(sizes, at::kFloat, [&](Transformer& model) { return model.loss(ids, ids); }));
  for (const at::ScalarType parameters : {at::kFloat, at::kBFloat16}) {
    std::cout << parameters << " parameters\n";
    print("  stock autocast", measure(sizes, parameters, in_stock_region));
    print("  scope, copies kept, FP32 logits", measure(sizes, parameters, in_scope(false, false, false)));
    print("  scope, up-casts repeated", measure(sizes, parameters, in_scope(true, false, false)));
    print("  scope, up-casts repeated, low logits", measure(sizes, parameters, in_scope(true, true, false)));
    print("    and outputs of GELU and norms repeated",
          measure(sizes, parameters, in_scope(true, true, true)));
    print("    and activations in E4M3", measure(sizes, parameters, compressed));
    print("    and each block checkpointed", measure(sizes, parameters, checkpointed));
  }
}
