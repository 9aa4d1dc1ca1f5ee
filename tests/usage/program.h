// A random small training program as a plain value: what it trains, in which precision, and what its user
// does between the library's calls. Knows neither LibTorch nor Halfstep.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace usage {

enum class Compute { Fp32, Bf16, Fp16 };
enum class Weights { Fp32, Fp32Master, SplitMaster, Kahan, Stochastic, Nearest };
enum class Moments { Fp32, Bf16, Blockwise8 };
enum class Optimizer { AdamW, Sgd, SgdMomentum, SgdNesterov };
enum class Sum { None, Fp32, Bf16Kahan };
/// Of linear layers: FP8, MXFP8 or NVFP4 products.
enum class Recipe { None, Fp8Delayed, Fp8Current, Fp8Rowwise, Fp8Block, Mxfp8, Nvfp4 };
enum class Loss { CrossEntropy, Mse, SmoothL1, BceWithLogits, Kl };

enum class LayerKind {
  Linear,
  Conv1d,
  Conv2d,
  ConvTranspose1d,
  ConvTranspose2d,
  LayerNorm,
  GroupNorm,
  BatchNorm1d,
  BatchNorm2d,
  InstanceNorm,
  RmsNorm,
  Lstm,
  Gru,
  LstmCell,
  GruCell,
  Attention,
  MultiheadAttention,
  Dropout,        // its mask comes from a generator of its own: the oracle draws the same
  EngineDropout,  // at::dropout: the oracle is given the mask of the first forward
  Gelu,
  Silu,
  Tanh,
  Sigmoid,
  Softplus,
  Count
};

struct Layer {
  LayerKind kind{};
  bool residual = false;
  bool affine = true;      ///< a bias, or the weight and bias of a norm
  bool statistics = true;  ///< running statistics, for the norms that can have them
};

/// Where the program opens the autocast scope.
enum class Placement {
  Around,          ///< mp.forward around the whole loss
  PerLayer,        ///< a scope of its own around each layer that has parameters; all else runs outside
  Nested,          ///< mp.forward, and in each layer a second scope of the same type
  BackwardInside,  ///< mp.forward around the loss and backward
};

/// Something that encloses the layers first..last. Two regions are disjoint, or one lies inside the other.
enum class RegionKind {
  Checkpoint,
  CheckpointWithScope,
  CompressBf16,
  CompressE4M3,
  CompressE5M2,
  DisabledScope
};
struct Region {
  RegionKind kind{};
  int first = 0, last = 0;
};

enum class Action {
  // Edits of a weight, before the forward of a step.
  Zero,
  Copy,
  Fill,
  Mul,
  Clamp,
  DataZero,
  SetData,
  NotFinite,  ///< an Inf and a NaN, seen by full_precision, and the old values again
  SetFullPrecision,
  LoadFp32File,     ///< torch::load of a file that a plain FP32 model saved
  SaveLoadFile,     ///< torch::save at this step, torch::load before the next
  LoadModuleState,  ///< halfstep::module_state at this step, load_module_state before the next
  // Non-finite numbers in this step.
  InfInput,
  NanInput,
  InfGradWrite,  ///< written into .grad after backward
  NanGradHook,   ///< by a hook of the parameter
  HugeLoss,
  LargeInput,  ///< 1e5 times the input: overflows FP16 in forward
  // Other things between two steps.
  Freeze,
  Unfreeze,
  Evaluate,
  Resume,           ///< state_dict into fresh objects, module state first
  ResumeStateLast,  ///< the same, module state last
  ResumeMidStep,    ///< the same between two micro-batches that are summed
  ThrowInForward,   ///< an exception from inside a layer, caught; the forward is repeated
  ThrowInBackward,  ///< the same from a hook in backward
  Count
};
struct Event {
  int step = 0;
  Action action{};
  int target = 0;  ///< parameter or layer; taken modulo their number
};

enum class Company { Alone, SecondModel, SecondThread, DrawingThread };

struct Program {
  uint64_t seed = 0;
  int batch = 2, length = 4, width = 8, classes = 5;
  bool tokens = false;    ///< token ids through an embedding, instead of real inputs
  bool tied = false;      ///< the embedding is the output layer too
  bool max_norm = false;  ///< of the embedding
  std::vector<Layer> layers;
  Loss loss{};

  Compute compute{};
  Weights weights{};
  Recipe recipe{};
  Moments moments{};
  Optimizer optimizer{};
  double loss_scale = 1;
  int growth_interval = 2000;
  bool weight_decay = false, two_groups = false, clip = false;
  Sum sum{};
  int micro_batches = 1;

  Placement placement{};
  std::vector<Region> regions;
  std::vector<Event> events;
  int steps = 3;

  bool on_device = false;  ///< on the test accelerator
  Company company{};
  std::shared_ptr<const Program> second;  ///< with SecondModel and SecondThread
};

/// The program of a seed. `without` are names of features to leave out.
Program draw(uint64_t seed, const std::vector<std::string>& without = {}, bool on_device = false);

/// Puts right what does not go together, as documented refusals; what is drawn or shrunk passes through it.
void settle(Program& program);

/// What the program does, by name: "layer lstm", "bf16 kahan", "edit zero_". Sorted, each once.
std::vector<std::string> features(const Program& program);

/// Every feature there is, with its choice group: two of one group never meet in a program.
struct Feature {
  std::string name, group;
};
const std::vector<Feature>& all_features();
/// Whether two features of different groups can meet at all.
bool can_meet(const Feature& a, const Feature& b);

/// Programs that are smaller than this one by one thing.
std::vector<Program> smaller(const Program& program);

std::string_view name(Compute);
std::string_view name(Weights);
std::string_view name(Recipe);
std::string_view name(Moments);
std::string_view name(Optimizer);
std::string_view name(Sum);
std::string_view name(Loss);
std::string_view name(LayerKind);
std::string_view name(Placement);
std::string_view name(RegionKind);
std::string_view name(Action);
std::string_view name(Company);

bool is_edit(Action action);
bool is_injection(Action action);
bool has_parameters(LayerKind kind);
bool is_checkpoint(RegionKind kind);
bool is_compression(RegionKind kind);
/// How many checkpointed regions enclose layer `index`.
int checkpoint_depth(const Program& program, int index);

/// Counter-based random numbers: the same on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next();
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
  bool chance(double p) { return static_cast<double>(next() >> 11) * 0x1p-53 < p; }

 private:
  uint64_t state_;
};

/// One seed of three numbers.
inline uint64_t mixed(uint64_t a, uint64_t b, uint64_t c) {
  Random random(a * 0x9E3779B97F4A7C15 + b * 0xD1B54A32D192ED03 + c);
  return random.next();
}

}  // namespace usage
