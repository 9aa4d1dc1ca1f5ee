#include "usage/model.h"

#include <ATen/CPUGeneratorImpl.h>

#include <unordered_set>

namespace usage {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

namespace {

at::Generator generator(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

/// [batch, length, width] to channels first and back.
at::Tensor channels_first(const at::Tensor& x) { return x.transpose(1, 2); }

at::Tensor image_of(const at::Tensor& x) {  // [batch, width, 2, length / 2]
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), 2, x.size(1) / 2});
}
at::Tensor sequence_of(const at::Tensor& image) {
  return image.reshape({image.size(0), image.size(1), image.size(2) * image.size(3)}).transpose(1, 2);
}

}  // namespace

Batch batch_of(const Program& p, int step, int micro_batch) {
  const auto random =
      generator(mixed(p.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(micro_batch)));
  const int rows = p.batch * p.length;
  Batch batch;
  batch.input = p.tokens ? at::randint(kVocabulary, {p.batch, p.length}, random, at::kLong)
                         : at::randn({p.batch, p.length, p.width}, random, at::kFloat);
  switch (p.loss) {
    case Loss::CrossEntropy:
      batch.target = at::randint(p.classes, {rows}, random, at::kLong);
      break;
    case Loss::Mse:
    case Loss::SmoothL1:
      batch.target = at::randn({rows, p.classes}, random, at::kFloat);
      break;
    case Loss::BceWithLogits:
      batch.target = at::rand({rows, p.classes}, random, at::kFloat);
      break;
    case Loss::Kl:
      batch.target = at::softmax(at::randn({rows, p.classes}, random, at::kFloat), 1);
      break;
  }
  batch.mask_seed = mixed(p.seed, 77, static_cast<uint64_t>(step * 16 + micro_batch));
  return batch;
}

LayerModule::LayerModule(const Program& program, const Layer& given) : layer(given) { build(program.width); }

void LayerModule::build(int width) {
  const auto keep = [&](auto module) {
    register_module("m", module);
    module_ = torch::nn::AnyModule(module);
  };
  switch (layer.kind) {
    case LayerKind::Linear:
      return keep(nn::Linear(nn::LinearOptions(width, width).bias(layer.affine)));
    case LayerKind::Conv1d:
      return keep(nn::Conv1d(nn::Conv1dOptions(width, width, 3).padding(1).bias(layer.affine)));
    case LayerKind::Conv2d:
      return keep(nn::Conv2d(nn::Conv2dOptions(width, width, 3).padding(1).bias(layer.affine)));
    case LayerKind::ConvTranspose1d:
      return keep(
          nn::ConvTranspose1d(nn::ConvTranspose1dOptions(width, width, 3).padding(1).bias(layer.affine)));
    case LayerKind::ConvTranspose2d:
      return keep(
          nn::ConvTranspose2d(nn::ConvTranspose2dOptions(width, width, 3).padding(1).bias(layer.affine)));
    case LayerKind::LayerNorm:
      return keep(nn::LayerNorm(nn::LayerNormOptions({width}).elementwise_affine(layer.affine)));
    case LayerKind::GroupNorm:
      return keep(nn::GroupNorm(nn::GroupNormOptions(2, width).affine(layer.affine)));
    case LayerKind::BatchNorm1d:
      return keep(nn::BatchNorm1d(
          nn::BatchNorm1dOptions(width).affine(layer.affine).track_running_stats(layer.statistics)));
    case LayerKind::BatchNorm2d:
      return keep(nn::BatchNorm2d(
          nn::BatchNorm2dOptions(width).affine(layer.affine).track_running_stats(layer.statistics)));
    case LayerKind::InstanceNorm:
      return keep(nn::InstanceNorm1d(
          nn::InstanceNorm1dOptions(width).affine(layer.affine).track_running_stats(layer.statistics)));
    case LayerKind::RmsNorm:
      if (layer.affine) rms_weight_ = register_parameter("weight", at::ones({width}));
      return;
    case LayerKind::Lstm:
      lstm_ =
          register_module("m", nn::LSTM(nn::LSTMOptions(width, width).batch_first(true).bias(layer.affine)));
      return;
    case LayerKind::Gru:
      gru_ = register_module("m", nn::GRU(nn::GRUOptions(width, width).batch_first(true).bias(layer.affine)));
      return;
    case LayerKind::LstmCell:
      lstm_cell_ = register_module("m", nn::LSTMCell(nn::LSTMCellOptions(width, width).bias(layer.affine)));
      return;
    case LayerKind::GruCell:
      gru_cell_ = register_module("m", nn::GRUCell(nn::GRUCellOptions(width, width).bias(layer.affine)));
      return;
    case LayerKind::Attention:
      qkv_ = register_module("qkv", nn::Linear(nn::LinearOptions(width, 3 * width).bias(layer.affine)));
      out_ = register_module("out", nn::Linear(nn::LinearOptions(width, width).bias(layer.affine)));
      return;
    case LayerKind::MultiheadAttention:
      attention_ = register_module(
          "m", nn::MultiheadAttention(nn::MultiheadAttentionOptions(width, 2).bias(layer.affine)));
      return;
    default:
      return;
  }
}

at::Tensor LayerModule::run(const at::Tensor& x) {
  switch (layer.kind) {
    case LayerKind::Linear:
      if (linear) {
        const auto& plain = module_.get<nn::Linear>();
        return linear(x, plain->weight, plain->bias);
      }
      return module_.forward(x);
    case LayerKind::LayerNorm:
      return module_.forward(x);
    case LayerKind::Conv1d:
    case LayerKind::ConvTranspose1d:
    case LayerKind::GroupNorm:
    case LayerKind::BatchNorm1d:
    case LayerKind::InstanceNorm:
      return channels_first(module_.forward(channels_first(x)));
    case LayerKind::Conv2d:
    case LayerKind::ConvTranspose2d:
    case LayerKind::BatchNorm2d:
      return sequence_of(module_.forward(image_of(x)));
    case LayerKind::RmsNorm:
      // Undefined is not the same as none in LibTorch 2.13: it throws.
      return at::rms_norm(x, {x.size(2)}, layer.affine ? std::optional(rms_weight_) : std::nullopt, 1e-5);
    case LayerKind::Lstm:
      return std::get<0>(lstm_(x));
    case LayerKind::Gru:
      return std::get<0>(gru_(x));
    case LayerKind::LstmCell: {
      auto state = std::make_tuple(at::zeros({x.size(0), x.size(2)}, x.options()),
                                   at::zeros({x.size(0), x.size(2)}, x.options()));
      std::vector<at::Tensor> steps;
      for (int64_t t = 0; t < x.size(1); ++t) {
        state = lstm_cell_(x.select(1, t), state);
        steps.push_back(std::get<0>(state));
      }
      return at::stack(steps, 1);
    }
    case LayerKind::GruCell: {
      at::Tensor state = at::zeros({x.size(0), x.size(2)}, x.options());
      std::vector<at::Tensor> steps;
      for (int64_t t = 0; t < x.size(1); ++t) {
        state = gru_cell_(x.select(1, t), state);
        steps.push_back(state);
      }
      return at::stack(steps, 1);
    }
    case LayerKind::Attention: {
      const auto batch = x.size(0), length = x.size(1), width = x.size(2);
      const auto inside = [this](const at::Tensor& result) { return between ? between(result) : result; };
      const auto parts = inside(qkv_(x)).view({batch, length, 3, 2, width / 2}).permute({2, 0, 3, 1, 4});
      const at::Tensor attended =
          inside(at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, layer.statistics));
      return out_(attended.transpose(1, 2).reshape({batch, length, width}));
    }
    case LayerKind::MultiheadAttention: {
      const at::Tensor rows = x.transpose(0, 1);
      return std::get<0>(attention_(rows, rows, rows)).transpose(0, 1);
    }
    case LayerKind::Dropout: {
      if (!is_training()) return x;
      const at::Tensor kept = at::rand(x.sizes(), generator(mask_seed), at::kFloat) >= kDropout;
      return x * kept.to(x.device(), x.scalar_type()) / (1 - kDropout);
    }
    case LayerKind::EngineDropout: {
      if (!is_training()) return x;
      if (replay) return x * mask.to(x.scalar_type());
      // The mask is read off the output. Where x is 0, as after an edit, it cannot be seen: then it is made
      // of ones, and multiplied.
      // Once for both runs of a checkpointed region, whose second input may be a compressed one.
      if (!has_zeros_seen) has_zeros_seen = x.detach().eq(0).any().item<bool>();
      const bool has_zeros = *has_zeros_seen;
      const at::Tensor factors =
          has_zeros ? at::dropout(at::ones_like(x.detach()), kDropout, true) : at::Tensor();
      const at::Tensor y = has_zeros ? x * factors : at::dropout(x, kDropout, true);
      if (!mask.defined()) mask = (has_zeros ? factors : y.detach()).ne(0).to(at::kFloat) / (1 - kDropout);
      return y;
    }
    case LayerKind::Gelu:
      return at::gelu(x);
    case LayerKind::Silu:
      return at::silu(x);
    case LayerKind::Tanh:
      return at::tanh(x);
    case LayerKind::Sigmoid:
      return at::sigmoid(x);
    case LayerKind::Softplus:
      return at::softplus(x);
    case LayerKind::Count:
      break;
  }
  return x;
}

at::Tensor LayerModule::forward(const at::Tensor& x) { return layer.residual ? x + run(x) : run(x); }

Model::Model(const Program& given) : program(given) {
  if (program.tokens) {
    nn::EmbeddingOptions options(kVocabulary, program.width);
    if (program.max_norm) options.max_norm(kMaxNorm);
    embedding = register_module("embedding", nn::Embedding(options));
  }
  for (size_t i = 0; i < program.layers.size(); ++i)
    layers.push_back(register_module("layer" + std::to_string(i),
                                     std::make_shared<LayerModule>(program, program.layers[i])));
  if (program.tied)
    register_parameter("output", embedding->weight);  // one tensor under two names
  else
    output = register_module("output", nn::Linear(program.width, program.classes));
  // From a generator of its own: another thread may draw from the default one.
  const auto random = generator(mixed(program.seed, 1, 1));
  torch::NoGradGuard no_grad;
  for (const auto& [key, parameter] : unique_parameters(*this)) {
    if (parameter.dim() == 1 && key.find("weight") != std::string::npos && !key.ends_with("_ih") &&
        !key.ends_with("_hh"))
      parameter.copy_(at::randn(parameter.sizes(), random, at::kFloat) * 0.2 + 1);  // of a norm
    else if (parameter.dim() == 1)
      parameter.copy_(at::randn(parameter.sizes(), random, at::kFloat) * 0.2);
    else if (key == "embedding.weight")
      parameter.copy_(at::randn(parameter.sizes(), random, at::kFloat) * 0.5);
    else
      parameter.copy_(at::randn(parameter.sizes(), random, at::kFloat) /
                      std::sqrt(static_cast<double>(parameter.numel() / parameter.size(0))));
  }
}

void Model::begin(const Batch& batch) {
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i]->mask_seed = batch.mask_seed + i;
    if (!layers[i]->replay) layers[i]->mask = at::Tensor(), layers[i]->has_zeros_seen.reset();
  }
}

at::Tensor Model::embed(const Batch& batch) { return program.tokens ? embedding(batch.input) : batch.input; }
at::Tensor Model::layer(int index, const at::Tensor& x) {
  return layers[static_cast<size_t>(index)]->forward(x);
}
at::Tensor Model::head(const at::Tensor& x) {
  return (program.tied ? at::linear(x, embedding->weight) : output(x)).flatten(0, 1);
}

at::Tensor Model::loss(const at::Tensor& given, const Batch& batch, bool upcast) {
  const at::Tensor logits = upcast && given.scalar_type() != at::kDouble ? given.to(at::kFloat) : given;
  switch (program.loss) {
    case Loss::CrossEntropy:
      return F::cross_entropy(logits, batch.target);
    case Loss::Mse:
      return F::mse_loss(logits, batch.target);
    case Loss::SmoothL1:
      return F::smooth_l1_loss(logits, batch.target);
    case Loss::BceWithLogits:
      return F::binary_cross_entropy_with_logits(logits, batch.target);
    case Loss::Kl:
      return F::kl_div(at::log_softmax(logits, 1), batch.target,
                       F::KLDivFuncOptions().reduction(torch::kBatchMean));
  }
  return {};
}

std::map<int, at::Tensor> Model::masks() const {
  std::map<int, at::Tensor> found;
  for (size_t i = 0; i < layers.size(); ++i)
    if (layers[i]->mask.defined()) found[static_cast<int>(i)] = layers[i]->mask.cpu();
  return found;
}

void Model::replay_masks(const std::map<int, at::Tensor>& masks) {
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto found = masks.find(static_cast<int>(i));
    layers[i]->replay = found != masks.end();
    if (layers[i]->replay) layers[i]->mask = found->second;
  }
}

namespace {

template <typename Named>
std::vector<std::pair<std::string, at::Tensor>> unique(const Named& named) {
  std::vector<std::pair<std::string, at::Tensor>> found;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& item : named)
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      found.emplace_back(item.key(), item.value());
  return found;
}

}  // namespace

std::vector<std::pair<std::string, at::Tensor>> unique_parameters(const nn::Module& model) {
  return unique(model.named_parameters());
}
std::vector<std::pair<std::string, at::Tensor>> unique_buffers(const nn::Module& model) {
  return unique(model.named_buffers());
}

}  // namespace usage
