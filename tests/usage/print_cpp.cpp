#include "usage/print_cpp.h"

#include <sstream>

namespace usage {
namespace {

// The part that every program has. Compares, but does not derive bounds: it prints every relative difference,
// and marks those that no rounding explains.
constexpr const char* kPrologue = R"(#include <ATen/CPUGeneratorImpl.h>
#include <halfstep/halfstep.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <thread>

namespace hs = halfstep;
namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

constexpr hs::AutocastOptions kAnyMachine{.allow_emulated = true};
int disagreements = 0;

struct Intended : std::runtime_error {
  using std::runtime_error::runtime_error;
};

at::Generator generator(uint64_t seed) { return at::detail::createCPUGenerator(seed); }

void say(int step, const std::string& what, double difference, double usual) {
  const bool bad = !(difference <= usual);
  disagreements += bad;
  std::printf("step %d: %-40s relative difference %.3g%s\n", step, what.c_str(), difference,
              bad ? "   <-- DISAGREES" : "");
}

double relative(const Tensor& a, const Tensor& b) {
  const Tensor wanted = b.detach().to(at::kDouble), off = a.detach().to(at::kDouble) - wanted;
  return off.norm().item<double>() / (wanted.norm().item<double>() + 1e-12);
}

Tensor image_of(const Tensor& x) {
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), 2, x.size(1) / 2});
}
Tensor sequence_of(const Tensor& image) {
  return image.reshape({image.size(0), image.size(1), image.size(2) * image.size(3)}).transpose(1, 2);
}
Tensor first_element(Tensor tensor) {
  while (tensor.dim() > 0) tensor = tensor.select(0, 0);
  return tensor;
}

struct Batch {
  Tensor input{}, target{};
  uint64_t mask_seed = 0;
  double loss_factor = 1;
};

)";

std::string yes(bool value) { return value ? "true" : "false"; }

class Printer {
 public:
  explicit Printer(const Program& program) : p_(program) {}

  /// Model, batches and `int run()`, to be put into a namespace.
  std::string text() {
    model();
    batches();
    losses();
    loop();
    return out_.str();
  }

 private:
  template <typename... Parts>
  void line(const Parts&... parts) {
    for (int i = 0; i < indent_; ++i) out_ << "  ";
    (out_ << ... << parts);
    out_ << '\n';
  }
  struct Block {
    explicit Block(Printer& printer) : printer_(printer) { ++printer_.indent_; }
    ~Block() { --printer_.indent_; }
    Printer& printer_;
  };

  bool low() const { return p_.compute != Compute::Fp32; }
  std::string low_type() const { return p_.compute == Compute::Bf16 ? "at::kBFloat16" : "at::kHalf"; }
  std::string scope() const {
    return "const hs::AutocastScope scope(" + low_type() + ", hs::OpPolicy::standard(), kAnyMachine);";
  }
  bool has(Action action) const {
    for (const Event& event : p_.events)
      if (event.action == action) return true;
    return false;
  }
  bool throws() const { return has(Action::ThrowInForward) || has(Action::ThrowInBackward); }

  // --- The model ---

  std::string module_of(const Layer& layer) const {
    const std::string w = std::to_string(p_.width), bias = yes(layer.affine);
    const auto conv = [&](const std::string& type) {
      return "nn::" + type + "(nn::" + type + "Options(" + w + ", " + w + ", 3).padding(1).bias(" + bias +
             "))";
    };
    const auto statistics_norm = [&](const std::string& type) {
      return "nn::" + type + "(nn::" + type + "Options(" + w + ").affine(" + bias + ").track_running_stats(" +
             yes(layer.statistics) + "))";
    };
    switch (layer.kind) {
      case LayerKind::Linear:
        return "nn::Linear(nn::LinearOptions(" + w + ", " + w + ").bias(" + bias + "))";
      case LayerKind::Conv1d:
        return conv("Conv1d");
      case LayerKind::Conv2d:
        return conv("Conv2d");
      case LayerKind::ConvTranspose1d:
        return conv("ConvTranspose1d");
      case LayerKind::ConvTranspose2d:
        return conv("ConvTranspose2d");
      case LayerKind::LayerNorm:
        return "nn::LayerNorm(nn::LayerNormOptions({" + w + "}).elementwise_affine(" + bias + "))";
      case LayerKind::GroupNorm:
        return "nn::GroupNorm(nn::GroupNormOptions(2, " + w + ").affine(" + bias + "))";
      case LayerKind::BatchNorm1d:
        return statistics_norm("BatchNorm1d");
      case LayerKind::BatchNorm2d:
        return statistics_norm("BatchNorm2d");
      case LayerKind::InstanceNorm:
        return statistics_norm("InstanceNorm1d");
      case LayerKind::Lstm:
        return "nn::LSTM(nn::LSTMOptions(" + w + ", " + w + ").batch_first(true).bias(" + bias + "))";
      case LayerKind::Gru:
        return "nn::GRU(nn::GRUOptions(" + w + ", " + w + ").batch_first(true).bias(" + bias + "))";
      case LayerKind::LstmCell:
        return "nn::LSTMCell(nn::LSTMCellOptions(" + w + ", " + w + ").bias(" + bias + "))";
      case LayerKind::GruCell:
        return "nn::GRUCell(nn::GRUCellOptions(" + w + ", " + w + ").bias(" + bias + "))";
      case LayerKind::Attention:
        return "nn::Linear(nn::LinearOptions(" + w + ", 3 * " + w + ").bias(" + bias + "))";
      case LayerKind::MultiheadAttention:
        return "nn::MultiheadAttention(nn::MultiheadAttentionOptions(" + w + ", 2).bias(" + bias + "))";
      default:
        return {};
    }
  }

  void layer_function(int index) {
    const Layer& layer = p_.layers[static_cast<size_t>(index)];
    const std::string i = std::to_string(index), m = "m" + i, h = layer.residual ? "x + " : "";
    line("Tensor layer", i, "(const Tensor& x) {");
    {
      Block block(*this);
      switch (layer.kind) {
        case LayerKind::Linear:
        case LayerKind::LayerNorm:
          line("return ", h, m, "(x);");
          break;
        case LayerKind::Conv1d:
        case LayerKind::ConvTranspose1d:
        case LayerKind::GroupNorm:
        case LayerKind::BatchNorm1d:
        case LayerKind::InstanceNorm:
          line("return ", h, m, "(x.transpose(1, 2)).transpose(1, 2);");
          break;
        case LayerKind::Conv2d:
        case LayerKind::ConvTranspose2d:
        case LayerKind::BatchNorm2d:
          line("return ", h, "sequence_of(", m, "(image_of(x)));");
          break;
        case LayerKind::RmsNorm:
          line("return ", h, "at::rms_norm(x, {x.size(2)}, ",
               layer.affine ? "std::optional(w" + i + ")" : std::string("std::nullopt"), ", 1e-5);");
          break;
        case LayerKind::Lstm:
        case LayerKind::Gru:
          line("return ", h, "std::get<0>(", m, "(x));");
          break;
        case LayerKind::LstmCell:
          line("auto state = std::make_tuple(at::zeros({x.size(0), x.size(2)}, x.options()),");
          line("                             at::zeros({x.size(0), x.size(2)}, x.options()));");
          line("std::vector<Tensor> steps;");
          line("for (int64_t t = 0; t < x.size(1); ++t) {");
          line("  state = ", m, "(x.select(1, t), state);");
          line("  steps.push_back(std::get<0>(state));");
          line("}");
          line("return ", h, "at::stack(steps, 1);");
          break;
        case LayerKind::GruCell:
          line("Tensor state = at::zeros({x.size(0), x.size(2)}, x.options());");
          line("std::vector<Tensor> steps;");
          line("for (int64_t t = 0; t < x.size(1); ++t) steps.push_back(state = ", m,
               "(x.select(1, t), state));");
          line("return ", h, "at::stack(steps, 1);");
          break;
        case LayerKind::Attention:
          line("const auto parts = ", m,
               "(x).view({x.size(0), x.size(1), 3, 2, x.size(2) / 2}).permute({2, 0, 3, 1, 4});");
          line(
              "const Tensor attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, "
              "0, ",
              yes(layer.statistics), ");");
          line("return ", h, "out", i, "(attended.transpose(1, 2).reshape(x.sizes()));");
          break;
        case LayerKind::MultiheadAttention:
          line("const Tensor rows = x.transpose(0, 1);");
          line("return ", h, "std::get<0>(", m, "(rows, rows, rows)).transpose(0, 1);");
          break;
        case LayerKind::Dropout:
          line("if (!is_training()) return ", h, "x;");
          line("const Tensor kept = at::rand(x.sizes(), generator(mask_seed + ", i,
               "), at::kFloat) >= 0.25;");
          line("return ", h, "x * kept.to(x.scalar_type()) / 0.75;");
          break;
        case LayerKind::EngineDropout:
          line("if (!is_training()) return ", h, "x;");
          line("if (replay) return ", h, "x * masks[", i, "];");
          line("const Tensor y = at::dropout(x, 0.25, true);");
          line("if (!masks[", i, "].defined()) masks[", i, "] = y.detach().ne(0).to(at::kDouble) / 0.75;");
          line("return ", h, "y;");
          break;
        default:
          line("return ", h, "at::", name(layer.kind), "(x);");
      }
    }
    line("}");
  }

  void model() {
    line("struct Net : nn::Module {");
    {
      Block block(*this);
      line("explicit Net(uint64_t weight_seed) {");
      {
        Block inner(*this);
        if (p_.tokens)
          line("embedding = register_module(\"embedding\", nn::Embedding(nn::EmbeddingOptions(12, ", p_.width,
               ")", p_.max_norm ? ".max_norm(1.0)" : "", "));");
        for (size_t i = 0; i < p_.layers.size(); ++i) {
          const Layer& layer = p_.layers[i];
          if (const std::string module = module_of(layer); !module.empty())
            line("m", i, " = register_module(\"layer", i, "\", ", module, ");");
          if (layer.kind == LayerKind::Attention)
            line("out", i, " = register_module(\"out", i, "\", nn::Linear(nn::LinearOptions(", p_.width, ", ",
                 p_.width, ").bias(", yes(layer.affine), ")));");
          if (layer.kind == LayerKind::RmsNorm && layer.affine)
            line("w", i, " = register_parameter(\"layer", i, "_weight\", at::ones({", p_.width, "}));");
        }
        if (p_.tied)
          line("register_parameter(\"output\", embedding->weight);  // one tensor under two names");
        else
          line("output = register_module(\"output\", nn::Linear(", p_.width, ", ", p_.classes, "));");
        line("torch::NoGradGuard no_grad;");
        line("const auto random = generator(weight_seed);");
        line("for (auto& item : named_parameters()) {");
        line("  Tensor w = item.value();");
        line("  const Tensor drawn = at::randn(w.sizes(), random, at::kFloat);");
        line("  const bool norm = w.dim() == 1 && item.key().find(\"weight\") != std::string::npos;");
        line(
            "  w.copy_(w.dim() == 1 ? drawn * 0.2 + norm : item.key() == \"embedding.weight\" ? drawn * 0.5");
        line(
            "                                          : drawn / std::sqrt(double(w.numel() / w.size(0))));");
        line("}");
      }
      line("}");
      for (size_t i = 0; i < p_.layers.size(); ++i) layer_function(static_cast<int>(i));
      line("void begin(const Batch& batch) {");
      line("  mask_seed = batch.mask_seed;");
      line("  if (!replay) masks.clear();");
      line("}");
      line("Tensor embed(const Batch& batch) { return ", p_.tokens ? "embedding(batch.input)" : "batch.input",
           "; }");
      line("Tensor head(const Tensor& x) { return (",
           p_.tied ? "at::linear(x, embedding->weight)" : "output(x)", ").flatten(0, 1); }");
      line("uint64_t mask_seed = 0;");
      line("bool replay = false;");
      line("std::map<int, Tensor> masks;");
      if (p_.tokens) line("nn::Embedding embedding{nullptr};");
      if (!p_.tied) line("nn::Linear output{nullptr};");
      for (size_t i = 0; i < p_.layers.size(); ++i) {
        const Layer& layer = p_.layers[i];
        if (const std::string module = module_of(layer); !module.empty())
          line(module.substr(0, module.find('(')), " m", i, "{nullptr};");
        if (layer.kind == LayerKind::Attention) line("nn::Linear out", i, "{nullptr};");
        if (layer.kind == LayerKind::RmsNorm && layer.affine) line("Tensor w", i, ";");
      }
    }
    line("};");
    line("");
  }

  // --- Batches and losses ---

  void batches() {
    const int rows = p_.batch * p_.length;
    line("Batch batch_of(uint64_t seed, uint64_t mask_seed) {");
    line("  const auto random = generator(seed);");
    line("  Batch batch{.mask_seed = mask_seed};");
    if (p_.tokens)
      line("  batch.input = at::randint(12, {", p_.batch, ", ", p_.length, "}, random, at::kLong);");
    else
      line("  batch.input = at::randn({", p_.batch, ", ", p_.length, ", ", p_.width,
           "}, random, at::kFloat);");
    const std::string sizes = "{" + std::to_string(rows) + ", " + std::to_string(p_.classes) + "}, random";
    switch (p_.loss) {
      case Loss::CrossEntropy:
        line("  batch.target = at::randint(", p_.classes, ", {", rows, "}, random, at::kLong);");
        break;
      case Loss::BceWithLogits:
        line("  batch.target = at::rand(", sizes, ", at::kFloat);");
        break;
      case Loss::Kl:
        line("  batch.target = at::softmax(at::randn(", sizes, ", at::kFloat), 1);");
        break;
      default:
        line("  batch.target = at::randn(", sizes, ", at::kFloat);");
    }
    line("  return batch;");
    line("}");
    line("");
  }

  void layers_code(int first, int last, size_t next) {
    for (int i = first; i <= last;) {
      while (next < p_.regions.size() && p_.regions[next].first < i) ++next;
      if (next < p_.regions.size() && p_.regions[next].first == i && p_.regions[next].last <= last) {
        const Region region = p_.regions[next];
        ++next;
        region_code(region, next);
        i = region.last + 1;
      } else {
        const bool own = low() &&
                         (p_.placement == Placement::PerLayer || p_.placement == Placement::Nested) &&
                         has_parameters(p_.layers[static_cast<size_t>(i)].kind);
        if (own) line("{");
        if (own) line("  ", scope());
        if (throws())
          line(own ? "  " : "", "if (throw_in_forward == ", i, ") throw Intended(\"in forward\");");
        line(own ? "  " : "", "x = net->layer", i, "(x);");
        if (throws())
          line(own ? "  " : "", "if (throw_in_backward == ", i,
               ") x.register_hook([](const Tensor&) -> Tensor { throw Intended(\"in backward\"); });");
        if (own) line("}");
        ++i;
      }
    }
  }

  void region_code(const Region& region, size_t next) {
    if (is_checkpoint(region.kind)) {
      line("x = hs::checkpoint_activations(");
      line("    [=](Tensor x) {");
      {
        Block a(*this);
        Block b(*this);
        Block c(*this);
        if (region.kind == RegionKind::CheckpointWithScope) line(scope());
        layers_code(region.first, region.last, next);
        line("return x;");
      }
      line("    },");
      line("    x);");
      return;
    }
    line("{");
    {
      Block block(*this);
      if (region.kind == RegionKind::DisabledScope)
        line("const auto disabled = hs::AutocastScope::disabled();\n      x = x.to(at::kFloat);");
      else
        line("const hs::CompressedActivations compressed(hs::Format::",
             region.kind == RegionKind::CompressBf16   ? "BF16"
             : region.kind == RegionKind::CompressE4M3 ? "E4M3"
                                                       : "E5M2",
             ");");
      layers_code(region.first, region.last, next);
    }
    line("}");
  }

  void losses() {
    if (throws()) line("int throw_in_forward = -1, throw_in_backward = -1;");
    line("Tensor loss_from(const Tensor& logits, const Batch& batch) {");
    switch (p_.loss) {
      case Loss::CrossEntropy:
        line("  return F::cross_entropy(logits, batch.target);");
        break;
      case Loss::Mse:
        line("  return F::mse_loss(logits, batch.target);");
        break;
      case Loss::SmoothL1:
        line("  return F::smooth_l1_loss(logits, batch.target);");
        break;
      case Loss::BceWithLogits:
        line("  return F::binary_cross_entropy_with_logits(logits, batch.target);");
        break;
      case Loss::Kl:
        line("  return F::kl_div(at::log_softmax(logits, 1), batch.target,");
        line("                   F::KLDivFuncOptions().reduction(torch::kBatchMean));");
        break;
    }
    line("}");
    line("");
    line("// As the user writes it.");
    line("Tensor logits_of(std::shared_ptr<Net> net, const Batch& batch) {");
    {
      Block block(*this);
      line("net->begin(batch);");
      line("Tensor x = net->embed(batch);");
      layers_code(0, static_cast<int>(p_.layers.size()) - 1, 0);
      if (low() && (p_.placement == Placement::PerLayer || p_.placement == Placement::Nested)) line(scope());
      line("return net->head(x);");
    }
    line("}");
    line("");
    line("// The same in plain LibTorch.");
    line("Tensor plain_logits_of(std::shared_ptr<Net> net, const Batch& batch) {");
    line("  net->begin(batch);");
    line("  Tensor x = net->embed(batch);");
    for (size_t i = 0; i < p_.layers.size(); ++i) line("  x = net->layer", i, "(x);");
    line("  return net->head(x);");
    line("}");
    line("");
  }

  // --- The loop ---

  void optimizer_function() {
    const bool adamw = p_.optimizer == Optimizer::AdamW;
    const std::string options = adamw ? "hs::AdamWOptions" : "hs::SgdOptions";
    const std::string moments = p_.moments == Moments::Fp32   ? "Fp32"
                                : p_.moments == Moments::Bf16 ? "Bf16"
                                                              : "Blockwise8";
    line("using Optimizer = hs::", adamw ? "AdamW" : "SGD", ";");
    line("constexpr double kLr = ", adamw ? "0.01" : "0.1", ", kDecay = ", p_.weight_decay ? "0.1" : "0.0",
         ";");
    line("double lr_of(size_t index, size_t count) { return ",
         p_.two_groups ? "index >= count / 2 ? kLr / 4 : kLr" : "(void)index, (void)count, kLr", "; }");
    line("std::unique_ptr<Optimizer> optimizer_of(const std::vector<hs::Param>& params) {");
    line("  std::vector<hs::ParamGroup<", options, ">> groups;");
    line("  for (size_t i = 0; i < params.size(); ++i) {");
    line("    const double lr = lr_of(i, params.size());");
    line("    if (groups.empty() || groups.back().options.lr != lr)");
    if (adamw)
      line(
          "      groups.push_back({{}, {.lr = lr, .betas = {0.9, 0.99}, .weight_decay = kDecay, .moments = "
          "hs::MomentStorage::",
          moments, "}});");
    else
      line("      groups.push_back({{}, {.lr = lr, .momentum = ",
           p_.optimizer == Optimizer::Sgd ? "0.0" : "0.9",
           ", .weight_decay = kDecay, .nesterov = ", yes(p_.optimizer == Optimizer::SgdNesterov),
           ", .moments = hs::MomentStorage::", moments, "}});");
    line("    groups.back().params.push_back(params[i]);");
    line("  }");
    line("  return std::make_unique<Optimizer>(groups);");
    line("}");
    line("");
    line("/// ", adamw ? "AdamW" : "SGD", " in FP64 beside it, from the same gradients.");
    line("struct Reference {");
    line("  std::vector<Tensor> w, m, v;");
    line("  std::vector<int> t;");
    line("  void adopt(size_t i, const Tensor& full) {");
    line("    if (w.size() <= i) w.resize(i + 1), m.resize(i + 1), v.resize(i + 1), t.resize(i + 1);");
    line("    w[i] = full.to(at::kDouble);");
    line("    if (!m[i].defined()) m[i] = at::zeros_like(w[i]), v[i] = at::zeros_like(w[i]);");
    line("  }");
    line("  void step(size_t i, Tensor g) {");
    line("    const double lr = lr_of(i, w.size());");
    line("    ++t[i];");
    if (adamw) {
      line("    w[i] = w[i] * (1 - lr * kDecay);");
      line("    m[i] = m[i] * 0.9 + g * 0.1;");
      line("    v[i] = v[i] * 0.99 + g * g * 0.01;");
      line("    w[i] = w[i] - lr / (1 - std::pow(0.9, t[i])) * m[i] /");
      line("                      (v[i].sqrt() / std::sqrt(1 - std::pow(0.99, t[i])) + 1e-8);");
    } else {
      line("    g = g + w[i] * kDecay;");
      if (p_.optimizer != Optimizer::Sgd) line("    m[i] = t[i] == 1 ? g : m[i] * 0.9 + g;");
      line("    w[i] = w[i] - lr * (",
           p_.optimizer == Optimizer::Sgd           ? "g"
           : p_.optimizer == Optimizer::SgdNesterov ? "g + 0.9 * m[i]"
                                                    : "m[i]",
           ");");
    }
    line("  }");
    line("};");
    line("");
  }

  void edit_code(const Event& event) {
    const std::string target = std::to_string(event.target) + " % mp->params().size()";
    const std::string rows = "w.narrow(0, 0, (w.size(0) + 1) / 2)";
    if (event.action == Action::LoadFp32File) {
      line("{  // a file that a plain FP32 model saved");
      line("  const auto plain = std::make_shared<Net>(", mixed(p_.seed + 1, 1, 1), "u);");
      line("  torch::save(plain, file);");
      line("  torch::load(net, file);");
      line("  for (size_t i = 0; i < mp->params().size(); ++i) {");
      line("    const Tensor wanted = plain->named_parameters()[mp->params()[i].name].detach();");
      line(
          "    say(step, \"loaded \" + mp->params()[i].name, relative(hs::full_precision(mp->params()[i]), "
          "wanted), "
          "kUsual);");
      line("    reference.adopt(i, wanted);");
      line("  }");
      line("}");
      return;
    }
    line("{");
    {
      Block block(*this);
      line("torch::NoGradGuard no_grad;");
      line("const size_t i = ", target, ";");
      line("Tensor w = mp->params()[i].working;");
      switch (event.action) {
        case Action::Zero:
          line(rows, ".zero_();");
          break;
        case Action::Copy:
          line(rows, ".copy_(", rows, ".flip({0}) * 0.75);");
          break;
        case Action::Fill:
          line(rows, ".fill_(0.3);");
          break;
        case Action::Mul:
          line("w.mul_(0.9);");
          break;
        case Action::Clamp:
          line("w.clamp_(-0.2, 0.9);");
          break;
        case Action::DataZero:
          line("w.data().narrow(0, 0, (w.size(0) + 1) / 2).zero_();");
          break;
        case Action::SetData:
          line("w.set_data((w.detach() * 0.8).contiguous());");
          break;
        case Action::NotFinite:
          line("const Tensor before = ", rows, ".clone();");
          line(rows, ".fill_(NAN);");
          line("const Tensor filled = hs::full_precision(mp->params()[i]).narrow(0, 0, before.size(0));");
          line(
              "say(step, \"NaNs that are not one\", "
              "static_cast<double>((~filled.isnan()).sum().item<int64_t>()), 0);");
          line(rows, ".copy_(before);");
          break;
        default:
          line("hs::set_full_precision(mp->params()[i], hs::full_precision(mp->params()[i]) * 0.9);");
      }
      line("const Tensor full = hs::full_precision(mp->params()[i]);");
      line("say(step, \"", name(event.action), " of \" + mp->params()[i].name, relative(full, w), kUsual);");
      line("reference.adopt(i, w);");
    }
    line("}");
  }

  void resume_code(bool last) {
    line("{  // into fresh objects");
    line(
        "  const auto precision = mp->state_dict(), optimizer_state = optimizer->state_dict(), "
        "module = hs::module_state(*net);");
    line("  auto fresh = std::make_shared<Net>(", mixed(p_.seed + 2, 1, 1), "u);");
    line("  auto fresh_mp = std::make_unique<hs::MixedPrecision>(precision_of(), *fresh, kOptions);");
    line("  auto fresh_optimizer = optimizer_of(fresh_mp->params());");
    if (!last) line("  hs::load_module_state(*fresh, module);");
    line("  fresh_mp->load_state_dict(precision);");
    line("  fresh_optimizer->load_state_dict(optimizer_state);");
    if (last) line("  hs::load_module_state(*fresh, module);");
    line("  for (size_t i = 0; i < mp->params().size(); ++i)");
    line("    fresh_mp->params()[i].working.requires_grad_(mp->params()[i].working.requires_grad());");
    line("  net = fresh;");
    line("  mp = std::move(fresh_mp);");
    line("  optimizer = std::move(fresh_optimizer);");
    line("}");
  }

  void event_code(const Event& event) {
    const std::string target = std::to_string(event.target) + " % mp->params().size()";
    switch (event.action) {
      case Action::SaveLoadFile:
      case Action::LoadModuleState:
        return;
      case Action::Freeze:
      case Action::Unfreeze:
        line("mp->params()[", target, "].working.requires_grad_(", yes(event.action == Action::Unfreeze),
             ");");
        return;
      case Action::Evaluate:
        line("{");
        line("  torch::NoGradGuard no_grad;");
        line("  const Batch batch = batch_of(", mixed(p_.seed, static_cast<uint64_t>(event.step), 9),
             "u, 0);");
        line("  net->eval();");
        line("  const Tensor logits = ", in_scope("logits_of(net, batch)"), ";");
        line("  net->train();");
        line("  load_plain();");
        line("  plain->eval();");
        line(
            "  say(step, \"evaluation\", relative(logits, plain_logits_of(plain, in_fp64(batch))), kUsual);");
        line("  plain->train();");
        line("}");
        return;
      case Action::Resume:
      case Action::ResumeStateLast:
        resume_code(event.action == Action::ResumeStateLast);
        return;
      case Action::ThrowInForward:
      case Action::ThrowInBackward: {
        const std::string which =
            event.action == Action::ThrowInForward ? "throw_in_forward" : "throw_in_backward";
        line("try {");
        line("  ", which, " = ", event.target % static_cast<int>(p_.layers.size()), ";");
        line("  train(batch_of(", mixed(p_.seed, static_cast<uint64_t>(event.step), 0), "u, 0));");
        line("} catch (const Intended&) {");
        line("}");
        line(which, " = -1;");
        line("optimizer->zero_grad();");
        return;
      }
      default:
        if (is_edit(event.action)) edit_code(event);
    }
  }

  std::string in_scope(const std::string& expression) const {
    return p_.placement == Placement::PerLayer ? expression
                                               : "mp->forward([&] { return " + expression + "; })";
  }

  void step_code(int step) {
    line("{  // ---- step ", step, " ----");
    {
      Block block(*this);
      line("step = ", step, ";");
      for (const Event& event : p_.events)
        if (event.step == step - 1 && event.action == Action::SaveLoadFile)
          line("torch::load(net, file);\nadopt_all();");
        else if (event.step == step - 1 && event.action == Action::LoadModuleState)
          line("hs::load_module_state(*net, saved_module);\nadopt_all();");
      for (const Event& event : p_.events)
        if (event.step == step) event_code(event);
      line("load_plain();");
      for (int micro = 0; micro < p_.micro_batches; ++micro) {
        line("{");
        Block inner(*this);
        line("Batch batch = batch_of(",
             mixed(p_.seed, static_cast<uint64_t>(step), static_cast<uint64_t>(micro)), "u, ",
             mixed(p_.seed, 77, static_cast<uint64_t>(step * 16 + micro)), "u);");
        std::string hook;
        for (const Event& event : p_.events)
          if (event.step == step && event.action == Action::ResumeMidStep && micro == 1) resume_code(false);
        for (const Event& event : p_.events) {
          if (event.step != step || event.target % p_.micro_batches != micro) continue;
          if (event.action == Action::InfInput) line("first_element(batch.input[0][0][3]).fill_(INFINITY);");
          if (event.action == Action::NanInput) line("first_element(batch.input[0][0][3]).fill_(NAN);");
          if (event.action == Action::LargeInput) line("batch.input = batch.input * 1e5;");
          if (event.action == Action::HugeLoss) line("batch.loss_factor = 1e36;");
          if (event.action == Action::NanGradHook) {
            hook = "mp->params()[" + std::to_string(event.target) + " % mp->params().size()].working";
            line("const auto hook = ", hook, ".register_hook([](const Tensor& grad) {");
            line("  const Tensor bad = grad.clone();");
            line("  first_element(bad).fill_(NAN);");
            line("  return bad;");
            line("});");
          }
        }
        line("train(batch);");
        if (!hook.empty()) line(hook, ".remove_hook(hook);");
        line("train_plain(batch);");
        --indent_;
        line("}");
        ++indent_;
      }
      for (const Event& event : p_.events)
        if (event.step == step && event.action == Action::InfGradWrite)
          line("first_element(mp->params()[", event.target,
               " % mp->params().size()].working.grad()).fill_(INFINITY);");
      line("finish();");
      for (const Event& event : p_.events)
        if (event.step == step && event.action == Action::SaveLoadFile)
          line("torch::save(net, file);");
        else if (event.step == step && event.action == Action::LoadModuleState)
          line("saved_module = hs::module_state(*net);");
    }
    line("}");
  }

  void loop() {
    optimizer_function();
    static constexpr const char* kStorages[] = {"Fp32",  "Fp32Master", "SplitMaster",
                                                "Kahan", "Stochastic", "Nearest"};
    static constexpr const char* kSums[] = {"None", "Fp32", "Bf16Kahan"};
    line("hs::Precision precision_of() {");
    const bool quantised = p_.recipe != Recipe::None;
    line("  auto precision = hs::Precision::",
         quantised ? "with_recipe(hs::Recipe::" + std::string(name(p_.recipe)) + "(), "
                   : std::string(name(p_.compute)) + "(",
         low() ? std::string("hs::WeightStorage::") + kStorages[static_cast<int>(p_.weights)] : "", ");");
    for (size_t i = 0; i < p_.layers.size() && quantised; ++i)
      if (p_.layers[i].kind == LayerKind::Linear) line("  precision.quantise(\"layer", i, ".weight\");");
    if (quantised) line("  precision.keep_high(\"*\");");
    if (p_.compute == Compute::Fp16) {
      line("  precision.loss_scaling->initial = ", p_.loss_scale, ";");
      line("  precision.loss_scaling->growth_interval = ", p_.growth_interval, ";");
    }
    line("  return precision;");
    line("}");
    line(
        "const hs::MixedPrecisionOptions kOptions{.autocast = kAnyMachine, .accumulation = "
        "hs::Accumulation::",
        kSums[static_cast<int>(p_.sum)], "};");
    line(
        "// More than any sum of roundings in a model of this size; compare with what the other lines show.");
    line("constexpr double kUsual = ",
         p_.compute == Compute::Fp32 ? "1e-4"
         : quantised                 ? "0.5"
                                     : "0.05",
         ";");
    line("");
    line("void run() {");
    {
      Block block(*this);
      line("int step = 0;");
      line("const std::string file = \"usage_program.pt\";");
      line("auto net = std::make_shared<Net>(", mixed(p_.seed, 1, 1),
           "u), plain = std::make_shared<Net>(0);");
      line("for (auto& p : plain->parameters()) p.set_data(p.detach().to(at::kDouble));");
      line("for (auto& b : plain->buffers())");
      line("  if (b.is_floating_point()) b.set_data(b.to(at::kDouble));");
      line("plain->replay = true;");
      line("auto mp = std::make_unique<hs::MixedPrecision>(precision_of(), *net, kOptions);");
      line("auto optimizer = optimizer_of(mp->params());");
      line("Reference reference;");
      line("hs::StateDict saved_module;");
      line("const auto adopt_all = [&] {");
      line("  for (size_t i = 0; i < mp->params().size(); ++i)");
      line("    reference.adopt(i, hs::full_precision(mp->params()[i]));");
      line("};");
      line("adopt_all();");
      line("// The FP64 model takes Halfstep's weights, statistics and freezing.");
      line("const auto load_plain = [&] {");
      line("  torch::NoGradGuard no_grad;");
      line("  for (const auto& param : mp->params()) {");
      line("    Tensor p = plain->named_parameters()[param.name];");
      line("    p.copy_(hs::full_precision(param));");
      line("    p.requires_grad_(param.working.requires_grad());");
      line("    p.mutable_grad() = Tensor();");
      line("  }");
      line("  const auto from = net->buffers(), to = plain->buffers();");
      line("  for (size_t i = 0; i < from.size(); ++i) to[i].copy_(from[i]);");
      line("};");
      line("const auto in_fp64 = [](Batch batch) {");
      line("  for (Tensor* t : {&batch.input, &batch.target})");
      line("    if (t->is_floating_point()) *t = t->to(at::kDouble);");
      line("  return batch;");
      line("};");
      line("const auto train = [&](const Batch& batch) {");
      const std::string upcast = p_.placement == Placement::PerLayer ? ".to(at::kFloat)" : "";
      const std::string loss = "loss_from(logits_of(net, batch)" + upcast +
                               ", batch).to(at::kFloat) * (batch.loss_factor / " +
                               std::to_string(p_.micro_batches) + ")";
      if (p_.placement == Placement::BackwardInside)
        line("  mp->forward([&] { mp->backward(", loss, "); });");
      else
        line("  mp->backward(", in_scope(loss), ");");
      line("};");
      line("const auto train_plain = [&](const Batch& given) {");
      line("  const Batch batch = in_fp64(given);");
      line("  plain->masks = net->masks;");
      line("  (loss_from(plain_logits_of(plain, batch), batch) * (batch.loss_factor / ", p_.micro_batches,
           ")).backward();");
      line("};");
      line("const auto finish = [&] {");
      line("  mp->close_sum();");
      line("  const auto grads = mp->inspect_grads();");
      line("  const auto multiplier = grads.", p_.clip ? "clipped_to(0.05)" : "unclipped()", ";");
      line("  const size_t count = mp->params().size();");
      line("  std::vector<Tensor> taken(count);");
      line("  for (size_t i = 0; i < count; ++i)");
      line("    if (mp->params()[i].working.grad().defined())");
      line("      taken[i] = mp->params()[i].working.grad().to(at::kDouble) / grads.loss_scale();");
      line("  const auto report = optimizer->step(multiplier);");
      line("  std::printf(\"step %d: %s\\n\", step, report.sentence().c_str());");
      line("  mp->advance(grads);");
      line("  optimizer->zero_grad();");
      line("  for (size_t i = 0; i < count; ++i) {");
      line("    const auto& param = mp->params()[i];");
      line("    const Tensor wanted = plain->named_parameters()[param.name].grad();");
      line("    if (report.stepped() && taken[i].defined() && wanted.defined()) {");
      line("      say(step, \"gradient of \" + param.name, relative(taken[i], wanted), kUsual);");
      line("      reference.step(i, taken[i] * (multiplier.value() * grads.loss_scale()));");
      line("    }");
      line(
          "    say(step, \"weight \" + param.name, relative(hs::full_precision(param), reference.w[i]), "
          "kUsual);");
      line("  }");
      line("  for (const auto& item : net->named_buffers())");
      line("    if (!item.value().isfinite().all().item<bool>()) say(step, item.key(), INFINITY, kUsual);");
      line("};");
      for (int step = 0; step < p_.steps; ++step) step_code(step);
    }
    line("}");
  }

  Program p_;
  std::ostringstream out_;
  int indent_ = 0;
};

}  // namespace

std::string print_cpp(const Program& program) {
  std::ostringstream out;
  if (program.on_device) out << "// Ran on the test accelerator; this is the program on the CPU.\n";
  out << "// Seed " << program.seed << ":";
  for (const std::string& feature : features(program)) out << ' ' << feature << ';';
  out << "\n"
      << kPrologue << "namespace first {\n\n"
      << Printer(program).text() << "\n}  // namespace first\n";
  if (program.second)
    out << "\nnamespace second {\n\n" << Printer(*program.second).text() << "\n}  // namespace second\n";
  out << "\nint main() {\n  at::set_num_threads(1);\n";
  if (program.company == Company::DrawingThread)
    out << "  std::atomic<bool> stop = false;\n  std::thread other([&] {\n    while (!stop) "
           "(void)at::rand({64});\n"
           "  });\n  first::run();\n  stop = true;\n  other.join();\n";
  else if (program.company == Company::SecondThread)
    out << "  std::thread other(second::run);\n  first::run();\n  other.join();\n";
  else if (program.company == Company::SecondModel)
    out << "  first::run();\n  second::run();  // in the fuzzer their steps alternate\n";
  else
    out << "  first::run();\n";
  out << "  std::printf(\"%d disagreements\\n\", disagreements);\n  return disagreements == 0 ? 0 : 1;\n}\n";
  return out.str();
}

}  // namespace usage
