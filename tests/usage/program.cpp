#include "usage/program.h"

#include <algorithm>
#include <array>
#include <set>

namespace usage {
namespace {

template <typename Enum, size_t N>
std::string_view pick(const std::array<std::string_view, N>& names, Enum value) {
  return names[static_cast<size_t>(value)];
}

constexpr std::array<std::string_view, 3> kCompute{"fp32", "bf16", "fp16"};
constexpr std::array<std::string_view, 6> kWeights{"fp32 weights", "fp32 master", "split master",
                                                   "kahan",        "stochastic",  "nearest"};
constexpr std::array<std::string_view, 7> kRecipe{"no recipe", "fp8_delayed", "fp8_current", "fp8_rowwise",
                                                  "fp8_block", "mxfp8",       "nvfp4"};
constexpr std::array<std::string_view, 3> kMoments{"fp32 moments", "bf16 moments", "8-bit moments"};
constexpr std::array<std::string_view, 4> kOptimizer{"adamw", "sgd", "sgd momentum", "sgd nesterov"};
constexpr std::array<std::string_view, 3> kSum{"no accumulation", "fp32 accumulation", "kahan accumulation"};
constexpr std::array<std::string_view, 5> kLoss{"cross entropy", "mse", "smooth l1", "bce with logits", "kl"};
constexpr std::array<std::string_view, static_cast<size_t>(LayerKind::Count)> kLayer{"linear",
                                                                                     "conv1d",
                                                                                     "conv2d",
                                                                                     "conv_transpose1d",
                                                                                     "conv_transpose2d",
                                                                                     "layer norm",
                                                                                     "group norm",
                                                                                     "batch norm 1d",
                                                                                     "batch norm 2d",
                                                                                     "instance norm",
                                                                                     "rms norm",
                                                                                     "lstm",
                                                                                     "gru",
                                                                                     "lstm cell",
                                                                                     "gru cell",
                                                                                     "attention",
                                                                                     "multihead attention",
                                                                                     "dropout",
                                                                                     "engine dropout",
                                                                                     "gelu",
                                                                                     "silu",
                                                                                     "tanh",
                                                                                     "sigmoid",
                                                                                     "softplus"};
constexpr std::array<std::string_view, 4> kPlacement{"scope around", "scope per layer", "scope nested",
                                                     "backward inside scope"};
constexpr std::array<std::string_view, 6> kRegion{"checkpoint",    "checkpoint with scope", "compress bf16",
                                                  "compress e4m3", "compress e5m2",         "disabled scope"};
constexpr std::array<std::string_view, static_cast<size_t>(Action::Count)> kAction{
    "zero_",
    "copy_",
    "fill_",
    "mul_",
    "clamp_",
    "data zero_",
    "set_data",
    "inf and nan",
    "set_full_precision",
    "load fp32 file",
    "save and load file",
    "load_module_state",
    "inf input",
    "nan input",
    "inf in grad",
    "nan from hook",
    "huge loss",
    "large input",
    "freeze",
    "unfreeze",
    "evaluate",
    "resume",
    "resume, module state last",
    "resume mid-step",
    "throw in forward",
    "throw in backward"};
constexpr std::array<std::string_view, 4> kCompany{"alone", "second model", "second thread",
                                                   "drawing thread"};

}  // namespace

std::string_view name(Compute value) { return pick(kCompute, value); }
std::string_view name(Weights value) { return pick(kWeights, value); }
std::string_view name(Recipe value) { return pick(kRecipe, value); }
std::string_view name(Moments value) { return pick(kMoments, value); }
std::string_view name(Optimizer value) { return pick(kOptimizer, value); }
std::string_view name(Sum value) { return pick(kSum, value); }
std::string_view name(Loss value) { return pick(kLoss, value); }
std::string_view name(LayerKind value) { return pick(kLayer, value); }
std::string_view name(Placement value) { return pick(kPlacement, value); }
std::string_view name(RegionKind value) { return pick(kRegion, value); }
std::string_view name(Action value) { return pick(kAction, value); }
std::string_view name(Company value) { return pick(kCompany, value); }

uint64_t Random::next() {  // SplitMix64
  uint64_t z = (state_ += 0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

bool is_edit(Action action) { return action <= Action::LoadModuleState; }
bool is_injection(Action action) { return action >= Action::InfInput && action <= Action::LargeInput; }
bool has_parameters(LayerKind kind) { return kind < LayerKind::Dropout; }
bool is_compression(RegionKind kind) {
  return kind == RegionKind::CompressBf16 || kind == RegionKind::CompressE4M3 ||
         kind == RegionKind::CompressE5M2;
}

bool is_checkpoint(RegionKind kind) {
  return kind == RegionKind::Checkpoint || kind == RegionKind::CheckpointWithScope;
}

namespace {

bool is_norm(LayerKind kind) { return kind >= LayerKind::LayerNorm && kind <= LayerKind::RmsNorm; }

bool is_attention(const Layer& layer) {
  return layer.kind == LayerKind::Attention || layer.kind == LayerKind::MultiheadAttention;
}

bool contains(const Region& outer, const Region& inner) {
  return outer.first <= inner.first && inner.last <= outer.last;
}
bool disjoint(const Region& a, const Region& b) { return a.last < b.first || b.last < a.first; }

}  // namespace

int checkpoint_depth(const Program& program, int index) {
  int depth = 0;
  for (const Region& region : program.regions)
    if (is_checkpoint(region.kind) && region.first <= index && index <= region.last) ++depth;
  return depth;
}

void settle(Program& p) {
  if (p.layers.empty()) p.layers.push_back({.kind = LayerKind::Linear});
  const int layer_count = static_cast<int>(p.layers.size());
  if (!p.tokens) p.tied = p.max_norm = false;
  if (p.tied) p.classes = 12;

  // Precision: what Precision::check refuses.
  if (p.compute == Compute::Fp32) p.weights = Weights::Fp32;
  if (p.compute == Compute::Fp16 && p.weights == Weights::SplitMaster) p.weights = Weights::Fp32Master;
  if (p.compute != Compute::Fp16) p.loss_scale = 1, p.growth_interval = 2000;
  if (p.optimizer == Optimizer::Sgd) p.moments = Moments::Fp32;  // it keeps none
  if (p.sum == Sum::None && p.weights != Weights::Fp32)
    p.micro_batches = 1;  // refused: autograd's sum rounds

  // A recipe is that of mp.forward: a scope alone has none.
  if (p.compute != Compute::Bf16) p.recipe = Recipe::None;
  if (p.recipe != Recipe::None) {
    if (p.placement == Placement::PerLayer) p.placement = Placement::Nested;
    std::erase_if(p.regions, [](const Region& region) { return region.kind == RegionKind::DisabledScope; });
    if (std::none_of(p.layers.begin(), p.layers.end(),
                     [](const Layer& layer) { return layer.kind == LayerKind::Linear; }))
      p.recipe = Recipe::None;
  }

  // What an accelerator lacks: docs/devices.md.
  if (p.on_device) {
    if (p.recipe > Recipe::Fp8Rowwise) p.recipe = Recipe::Fp8Rowwise;
    if (p.moments == Moments::Blockwise8) p.moments = Moments::Bf16;
    if (p.sum == Sum::Bf16Kahan) p.sum = Sum::Fp32;
    for (Layer& layer : p.layers)  // LibTorch gives recurrent cells to a kernel of CUDA's
      if (layer.kind == LayerKind::Lstm || layer.kind == LayerKind::Gru ||
          layer.kind == LayerKind::LstmCell || layer.kind == LayerKind::GruCell)
        layer.kind = LayerKind::Linear;
    for (Event& event : p.events)
      if ((event.action == Action::DataZero && p.weights == Weights::Fp32Master) ||
          (event.action == Action::LoadFp32File && p.weights != Weights::Fp32))
        event.action = Action::Zero;
  }

  // Regions: inside the layers, nested or disjoint.
  std::vector<Region> regions;
  for (Region region : p.regions) {
    region.last = std::min(region.last, layer_count - 1);
    if (region.first > region.last) continue;
    if (region.kind == RegionKind::CheckpointWithScope && p.compute == Compute::Fp32)
      region.kind = RegionKind::Checkpoint;
    if (region.kind == RegionKind::DisabledScope && p.weights != Weights::Fp32) continue;
    // Backward of attention takes exp of products of what it restores: from FP8 its error has no bound that
    // would show anything (docs/memory.md).
    if ((region.kind == RegionKind::CompressE4M3 || region.kind == RegionKind::CompressE5M2) &&
        std::any_of(p.layers.begin() + region.first, p.layers.begin() + region.last + 1, is_attention))
      region.kind = RegionKind::CompressBf16;
    const bool fits = std::all_of(regions.begin(), regions.end(), [&](const Region& other) {
      return disjoint(region, other) || contains(other, region) || contains(region, other);
    });
    if (fits) regions.push_back(region);
  }
  std::stable_sort(regions.begin(), regions.end(), [](const Region& a, const Region& b) {
    return a.first != b.first ? a.first < b.first : a.last > b.last;
  });
  // What a scope inside a disabled one gives is low, and the next layer of the disabled one refuses it.
  for (Region& region : regions)
    if (region.kind == RegionKind::CheckpointWithScope &&
        std::any_of(regions.begin(), regions.end(), [&](const Region& other) {
          return other.kind == RegionKind::DisabledScope && contains(other, region);
        }))
      region.kind = RegionKind::Checkpoint;
  p.regions = regions;
  // Compression takes tensors of 512 elements or more.
  if (std::any_of(regions.begin(), regions.end(), [](const Region& r) { return is_compression(r.kind); }))
    p.batch = 8, p.length = 8;

  // One injection in a program: whatever is not finite is then its doing. It needs a real input to put a
  // number into, or gradients to write into.
  std::vector<Event> events;
  bool injected = false;
  std::set<int> saved_steps;
  for (const Event& event : p.events) {
    if (event.step >= p.steps) continue;
    const Action a = event.action;
    if ((a == Action::InfInput || a == Action::NanInput || a == Action::LargeInput) && p.tokens) continue;
    if (a == Action::InfGradWrite && p.sum != Sum::None) continue;  // backward took the gradients away
    if (is_injection(a) && std::exchange(injected, true)) continue;
    if (a == Action::ResumeMidStep && (p.sum == Sum::None || p.micro_batches < 2)) continue;
    // Two things that are saved at one step and loaded before the next would undo each other: a step for
    // each.
    Event kept = event;
    if (a == Action::SaveLoadFile || a == Action::LoadModuleState) {
      kept.step = std::min(kept.step, p.steps - 2);
      while (kept.step >= 0 && saved_steps.contains(kept.step)) --kept.step;
      if (kept.step < 0) continue;
      saved_steps.insert(kept.step);
    }
    events.push_back(kept);
  }
  std::stable_sort(events.begin(), events.end(),
                   [](const Event& a, const Event& b) { return a.step < b.step; });
  p.events = events;
  // A step along a gradient of 1e9 leaves a model of which nothing can be told.
  if (std::any_of(events.begin(), events.end(),
                  [](const Event& e) { return e.action == Action::LargeInput; }))
    p.clip = true;
  if (p.company != Company::SecondModel && p.company != Company::SecondThread) p.second.reset();
  if (!p.second && (p.company == Company::SecondModel || p.company == Company::SecondThread))
    p.company = Company::Alone;
}

namespace {

Layer draw_layer(Random& random) {
  return {.kind = static_cast<LayerKind>(random.below(static_cast<int>(LayerKind::Count))),
          .residual = random.chance(0.4),
          .affine = random.chance(0.75),
          .statistics = random.chance(0.7)};
}

Program draw_one(uint64_t seed, Random& random) {
  Program p;
  p.seed = seed;
  p.batch = 2 + random.below(3);
  p.length = random.chance(0.5) ? 4 : 6;
  p.width = random.chance(0.7) ? 8 : 16;
  p.tokens = random.chance(0.4);
  p.tied = random.chance(0.5);
  p.max_norm = random.chance(0.4);
  p.loss = static_cast<Loss>(random.below(5));
  const int layer_count = 1 + random.below(4);
  for (int i = 0; i < layer_count; ++i) p.layers.push_back(draw_layer(random));
  // As models are: an activation between two layers of one kind.
  if (layer_count >= 3 && random.chance(0.3)) {
    p.layers[1] = {.kind = static_cast<LayerKind>(static_cast<int>(LayerKind::Gelu) + random.below(5))};
    p.layers[2].kind = p.layers[0].kind;
    p.layers[0].residual = p.layers[2].residual = false;
  }

  // Each allowed pair of compute and weights alike.
  constexpr std::pair<Compute, Weights> kPrecisions[] = {
      {Compute::Fp32, Weights::Fp32},       {Compute::Bf16, Weights::Fp32},
      {Compute::Bf16, Weights::Fp32Master}, {Compute::Bf16, Weights::SplitMaster},
      {Compute::Bf16, Weights::Kahan},      {Compute::Bf16, Weights::Stochastic},
      {Compute::Bf16, Weights::Nearest},    {Compute::Fp16, Weights::Fp32},
      {Compute::Fp16, Weights::Fp32Master}, {Compute::Fp16, Weights::Kahan},
      {Compute::Fp16, Weights::Stochastic}, {Compute::Fp16, Weights::Nearest}};
  std::tie(p.compute, p.weights) = kPrecisions[random.below(std::size(kPrecisions))];
  // From numbers of its own: programs without a recipe are those that their seeds always gave.
  Random of_recipe(mixed(seed, 0x4EC1, 9));
  if (p.compute == Compute::Bf16 && of_recipe.chance(0.5)) {
    p.recipe = static_cast<Recipe>(1 + of_recipe.below(6));
    for (Layer& layer : p.layers)
      if (of_recipe.chance(0.4)) layer.kind = LayerKind::Linear;
  }
  p.moments = static_cast<Moments>(random.below(3));
  p.optimizer = random.chance(0.5) ? Optimizer::AdamW : static_cast<Optimizer>(1 + random.below(3));
  constexpr double kScales[] = {0x1p4, 0x1p7, 0x1p10, 0x1p12};
  p.loss_scale = random.chance(0.2) ? 0x1p24 : kScales[random.below(4)];
  p.growth_interval = random.chance(0.3) ? 2 : 2000;
  p.weight_decay = random.chance(0.5);
  p.two_groups = random.chance(0.3);
  p.clip = random.chance(0.5);
  p.sum = static_cast<Sum>(random.below(3));
  p.micro_batches = 1 + random.below(3);

  p.placement = static_cast<Placement>(random.below(4));
  const int region_count = random.chance(0.5) ? 1 + random.below(3) : 0;
  for (int i = 0; i < region_count; ++i) {
    const bool all = random.chance(0.4);
    const int first = all ? 0 : random.below(layer_count);
    // More disabled scopes than others: most fall out again, since they need FP32 weights.
    p.regions.push_back({.kind = static_cast<RegionKind>(std::min(random.below(9), 5)),
                         .first = first,
                         .last = all ? layer_count - 1 : first + random.below(layer_count - first)});
  }
  // A checkpointed region and one more inside: nesting is where regions go wrong, and rare by chance alone.
  if (region_count > 0 && random.chance(0.3)) {
    Region& outer = p.regions[0];
    outer.kind = static_cast<RegionKind>(random.below(2));
    const int first = outer.first + random.below(outer.last - outer.first + 1);
    const int last = first + random.below(outer.last - first + 1);
    p.regions.push_back({.kind = static_cast<RegionKind>(random.below(5)), .first = first, .last = last});
  }

  p.steps = 2 + random.below(3);
  const auto add = [&](Action first, Action last) {
    const int range = static_cast<int>(last) - static_cast<int>(first) + 1;
    p.events.push_back({.step = random.below(p.steps),
                        .action = static_cast<Action>(static_cast<int>(first) + random.below(range)),
                        .target = random.below(64)});
  };
  if (random.chance(0.65)) add(Action::Zero, Action::LoadModuleState);
  if (random.chance(0.5)) add(Action::Zero, Action::LoadModuleState);
  if (random.chance(0.4)) add(Action::InfInput, Action::LargeInput);
  if (random.chance(0.6)) add(Action::Freeze, Action::ThrowInBackward);
  if (random.chance(0.3)) add(Action::Freeze, Action::ThrowInBackward);
  for (size_t i = 0; i < p.events.size(); ++i) {
    const Action action = p.events[i].action;
    if (action == Action::InfGradWrite) p.sum = Sum::None;
    if (action == Action::InfInput || action == Action::NanInput || action == Action::LargeInput)
      p.tokens = false;
    if (action == Action::ResumeMidStep) {
      p.micro_batches = 2 + random.below(2);
      if (p.sum == Sum::None) p.sum = random.chance(0.5) ? Sum::Fp32 : Sum::Bf16Kahan;
    }
    if (action == Action::Unfreeze) {  // of what was frozen at the first step
      p.events[i].step = std::max(1, p.events[i].step);
      p.events.push_back({.step = 0, .action = Action::Freeze, .target = p.events[i].target});
    }
  }
  return p;
}

}  // namespace

Program draw(uint64_t seed, const std::vector<std::string>& without, bool on_device) {
  Random random(seed);
  // Drawn again until no feature that is left out is among it; 1000 times are enough for any sensible list.
  for (int attempt = 0; attempt < 1000; ++attempt) {
    Program p = draw_one(seed, random);
    p.on_device = on_device;
    const double company = random.chance(0.16) ? 1 + random.below(3) : 0;
    p.company = static_cast<Company>(company);
    if (p.company == Company::SecondModel || p.company == Company::SecondThread) {
      Program second = draw_one(seed ^ 0x5EC0D, random);
      second.on_device = on_device;
      second.steps = p.steps;
      std::erase_if(second.events, [](const Event& event) { return event.action == Action::LoadFp32File; });
      settle(second);
      p.second = std::make_shared<const Program>(second);
    }
    settle(p);
    const auto mine = features(p);
    const auto theirs = p.second ? features(*p.second) : std::vector<std::string>{};
    const auto excluded = [&](const std::string& feature) {
      return std::find(mine.begin(), mine.end(), feature) != mine.end() ||
             std::find(theirs.begin(), theirs.end(), feature) != theirs.end();
    };
    if (std::none_of(without.begin(), without.end(), excluded)) return p;
  }
  return {};
}

std::vector<std::string> features(const Program& p) {
  std::set<std::string> found;
  const auto add = [&](std::string_view prefix, std::string_view text) {
    found.insert(std::string(prefix) + std::string(text));
  };
  add("", std::string(name(p.compute)) + ' ' + std::string(name(p.weights)));
  if (p.recipe != Recipe::None) add("recipe ", name(p.recipe));
  add("", name(p.optimizer));
  if (p.optimizer != Optimizer::Sgd) add("", name(p.moments));
  if (p.weight_decay) add("", "weight decay");
  if (p.two_groups) add("", "two groups");
  if (p.clip) add("", "clip");
  add("", name(p.sum));
  if (p.micro_batches > 1) add("", "micro-batches");
  if (p.compute == Compute::Fp16) {
    add("", p.loss_scale >= 0x1p20 ? "huge loss scale" : "usual loss scale");
    if (p.growth_interval < 2000) add("", "growing loss scale");
  }
  add("", p.tokens ? "embedding" : "real input");
  if (p.tied) add("", "tied weights");
  if (p.max_norm) add("", "max_norm");
  add("loss ", name(p.loss));
  for (const Layer& layer : p.layers) {
    add("layer ", name(layer.kind));
    if (layer.residual) add("", "residual");
    if ((layer.kind == LayerKind::BatchNorm1d || layer.kind == LayerKind::BatchNorm2d ||
         layer.kind == LayerKind::InstanceNorm) &&
        layer.statistics)
      add("", "running statistics");
    if (is_norm(layer.kind) && !layer.affine) add("", "norm without weight");
  }
  if (p.compute != Compute::Fp32) add("", name(p.placement));
  for (const Region& region : p.regions) add("region ", name(region.kind));
  for (size_t i = 0; i < p.regions.size(); ++i)
    for (size_t j = i + 1; j < p.regions.size(); ++j)
      if (!disjoint(p.regions[i], p.regions[j])) {
        const bool a = is_checkpoint(p.regions[i].kind), b = is_checkpoint(p.regions[j].kind);
        if (a && b) add("", "checkpoint in checkpoint");
        if (a && is_compression(p.regions[j].kind)) add("", "compression in checkpoint");
        if (b && is_compression(p.regions[i].kind)) add("", "checkpoint in compression");
      }
  for (const Event& event : p.events)
    add(is_edit(event.action) ? "edit " : is_injection(event.action) ? "inject " : "do ", name(event.action));
  if (p.company != Company::Alone) add("", name(p.company));
  return {found.begin(), found.end()};
}

const std::vector<Feature>& all_features() {
  static const std::vector<Feature> all = [] {
    // Drawn, not listed: a feature that is never drawn would not be covered, and this way cannot be listed.
    // Groups: what a program has exactly or at most one of.
    std::set<std::string> names;
    for (uint64_t seed = 1; seed <= 4000; ++seed)
      for (const std::string& feature : features(draw(seed))) names.insert(feature);
    std::vector<Feature> list;
    for (const std::string& feature : names) {
      std::string group = feature;
      const auto among = [&](const auto& of) { return std::find(of.begin(), of.end(), feature) != of.end(); };
      if (feature.starts_with("fp32 ") || feature.starts_with("bf16 ") || feature.starts_with("fp16 "))
        group = "precision";
      if (among(kMoments)) group = "moments";
      if (among(kOptimizer)) group = "optimizer";
      if (among(kSum)) group = "sum";
      if (among(kPlacement)) group = "placement";
      if (among(kCompany)) group = "company";
      if (feature.starts_with("recipe ")) group = "recipe";
      if (feature.starts_with("loss ")) group = "loss";
      if (feature.starts_with("inject ")) group = "injection";
      if (feature == "embedding" || feature == "real input") group = "input";
      if (feature.ends_with("loss scale") && !feature.starts_with("growing")) group = "loss scale";
      list.push_back({feature, group});
    }
    return list;
  }();
  return all;
}

bool can_meet(const Feature& a, const Feature& b) {
  if (a.group == b.group) return false;
  const auto both = [&](auto first, auto second) {
    return (first(a.name) && second(b.name)) || (first(b.name) && second(a.name));
  };
  const auto is = [](std::string text) { return [text](const std::string& n) { return n == text; }; };
  const auto low_weights = [](const std::string& n) {
    return (n.starts_with("bf16 ") || n.starts_with("fp16 ")) && !n.ends_with("fp32 weights") &&
           !n.ends_with("moments");
  };
  const auto not_fp16 = [](const std::string& n) {
    return n == "fp32 fp32 weights" || (n.starts_with("bf16 ") && !n.ends_with("moments"));
  };
  const auto scale = [](const std::string& n) { return n.ends_with("loss scale"); };
  const auto placement = [](const std::string& n) {
    return std::find(kPlacement.begin(), kPlacement.end(), n) != kPlacement.end();
  };
  const auto moments = [](const std::string& n) { return n.ends_with(" moments"); };
  const auto recipe = [](const std::string& n) { return n.starts_with("recipe "); };
  const auto not_bf16 = [](const std::string& n) {
    return (n.starts_with("fp32 ") || n.starts_with("fp16 ")) &&
           (n.ends_with("weights") || n.ends_with("master") || n.ends_with("kahan") ||
            n.ends_with("stochastic") || n.ends_with("nearest"));
  };
  const auto input_injection = [](const std::string& n) {
    return n == "inject inf input" || n == "inject nan input" || n == "inject large input";
  };
  const auto with_embedding = [](const std::string& n) {
    return n == "embedding" || n == "tied weights" || n == "max_norm";
  };
  return !(both(is("fp32 fp32 weights"), placement) || both(scale, not_fp16) || both(is("sgd"), moments) ||
           both(is("fp32 fp32 weights"), is("region checkpoint with scope")) ||
           both(low_weights, is("region disabled scope")) || both(input_injection, with_embedding) ||
           both(is("real input"), with_embedding) || both(recipe, not_bf16) || both(recipe, scale) ||
           both(recipe, is("scope per layer")) || both(recipe, is("region disabled scope")) ||
           both(is("do resume mid-step"), is("no accumulation")) ||
           both(is("do resume mid-step"), is("inject inf in grad")) ||
           both(is("inject inf in grad"), is("fp32 accumulation")) ||
           both(is("inject inf in grad"), is("kahan accumulation")));
}

std::vector<Program> smaller(const Program& program) {
  std::vector<Program> found;
  const auto try_with = [&](auto change) {
    Program p = program;
    change(p);
    settle(p);
    found.push_back(std::move(p));
  };
  if (program.second) {
    try_with([](Program& p) { p.second.reset(), p.company = Company::Alone; });
    try_with([](Program& p) { p = Program(*p.second); });
  }
  if (program.company == Company::DrawingThread) try_with([](Program& p) { p.company = Company::Alone; });
  for (size_t i = 0; i < program.events.size(); ++i)
    try_with([&](Program& p) { p.events.erase(p.events.begin() + static_cast<std::ptrdiff_t>(i)); });
  for (size_t i = 0; i < program.regions.size(); ++i)
    try_with([&](Program& p) { p.regions.erase(p.regions.begin() + static_cast<std::ptrdiff_t>(i)); });
  for (size_t i = 0; i < program.layers.size() && program.layers.size() > 1; ++i)
    try_with([&](Program& p) {
      p.layers.erase(p.layers.begin() + static_cast<std::ptrdiff_t>(i));
      for (Region& region : p.regions) {
        if (region.first > static_cast<int>(i)) --region.first;
        if (region.last >= static_cast<int>(i)) --region.last;
      }
    });
  if (program.steps > 1) {
    try_with([](Program& p) { --p.steps; });
    // The first step dropped.
    try_with([](Program& p) {
      --p.steps;
      for (Event& event : p.events) event.step = std::max(0, event.step - 1);
    });
  }
  for (size_t i = 0; i < program.layers.size(); ++i) {
    if (program.layers[i].residual) try_with([&](Program& p) { p.layers[i].residual = false; });
    if (program.layers[i].kind != LayerKind::Linear)
      try_with([&](Program& p) { p.layers[i] = {.kind = LayerKind::Linear}; });
  }
  if (program.tokens) try_with([](Program& p) { p.tokens = false; });
  if (program.tied) try_with([](Program& p) { p.tied = false, p.classes = 5; });
  if (program.max_norm) try_with([](Program& p) { p.max_norm = false; });
  if (program.micro_batches > 1) try_with([](Program& p) { p.micro_batches = 1; });
  if (program.sum != Sum::None) try_with([](Program& p) { p.sum = Sum::None; });
  if (program.clip) try_with([](Program& p) { p.clip = false; });
  if (program.two_groups) try_with([](Program& p) { p.two_groups = false; });
  if (program.weight_decay) try_with([](Program& p) { p.weight_decay = false; });
  if (program.moments != Moments::Fp32) try_with([](Program& p) { p.moments = Moments::Fp32; });
  if (program.optimizer != Optimizer::Sgd) try_with([](Program& p) { p.optimizer = Optimizer::Sgd; });
  if (program.placement != Placement::Around) try_with([](Program& p) { p.placement = Placement::Around; });
  if (program.growth_interval != 2000) try_with([](Program& p) { p.growth_interval = 2000; });
  if (program.compute == Compute::Fp16 && program.loss_scale != 0x1p7)
    try_with([](Program& p) { p.loss_scale = 0x1p7; });
  if (program.recipe != Recipe::None) try_with([](Program& p) { p.recipe = Recipe::None; });
  if (program.compute == Compute::Fp16) try_with([](Program& p) { p.compute = Compute::Bf16; });
  if (program.compute == Compute::Bf16 && program.weights == Weights::Fp32)
    try_with([](Program& p) { p.compute = Compute::Fp32; });
  if (program.weights != Weights::Fp32) try_with([](Program& p) { p.weights = Weights::Fp32; });
  if (program.loss != Loss::Mse) try_with([](Program& p) { p.loss = Loss::Mse; });
  if (program.batch > 2) try_with([](Program& p) { p.batch = 2; });
  if (program.length > 4) try_with([](Program& p) { p.length = 4; });
  return found;
}

}  // namespace usage
