// Runs that need no file. Their data comes with Debian packages (tools/apt-packages.txt).
#include <halfstep/run_config.h>

#include <array>

namespace halfstep {
namespace {

constexpr std::string_view kTiny = R"(
[model]
kind = "gpt2"
layers = 4
width = 128
heads = 4
context = 128

[data]
train = ["/usr/share/doc/python3.11/html/_sources"]
validation_fraction = 0.05
tokenizer = "bytes"
sequence_length = 128
batch_size = 16

[precision]
compute = "bf16"

[optimizer]
lr = 1e-3
beta2 = 0.95
weight_decay = 0.1
clip_norm = 1.0
schedule = "cosine"
warmup_steps = 20
final_lr = 1e-4

[train]
steps = 300
evaluate_every = 100
evaluate_batches = 10
sample_every = 100

[checkpoint]
every = 100
)";

constexpr std::string_view kGpt10m = R"(
[model]
kind = "gpt2"
layers = 6
width = 384
heads = 6
context = 256

[data]
train = ["/usr/share/doc/python3.11/html/_sources"]
validation_fraction = 0.05
tokenizer = "bytes"
sequence_length = 256
batch_size = 16

[precision]
compute = "bf16"

[optimizer]
lr = 6e-4
beta2 = 0.95
weight_decay = 0.1
clip_norm = 1.0
schedule = "cosine"
warmup_steps = 100
final_lr = 6e-5

[train]
steps = 1000
evaluate_every = 100
sample_every = 250

[checkpoint]
every = 250
)";

constexpr std::string_view kFinetune = R"(
[model]
from = "SmolLM2-135M"

[data]
train = ["/usr/share/doc/python3.11/html/_sources"]
validation_fraction = 0.05
sequence_length = 256
batch_size = 4

[precision]
compute = "bf16"

[optimizer]
lr = 5e-5
beta2 = 0.95
weight_decay = 0.01
clip_norm = 1.0
schedule = "linear"
warmup_steps = 5

[train]
steps = 50
accumulation = 2
evaluate_every = 25
sample_every = 25

[checkpoint]
every = 25
)";

constexpr std::string_view kResNet = R"(
[model]
kind = "resnet18"

[data]
images = "/usr/share/datasets/fashion-mnist"
batch_size = 128

[precision]
compute = "bf16"

[optimizer]
kind = "sgd"
lr = 0.05
momentum = 0.9
nesterov = true
weight_decay = 5e-4
schedule = "cosine"
warmup_steps = 50

[train]
steps = 1400
evaluate_every = 470
evaluate_batches = 0

[checkpoint]
every = 470
)";

constexpr std::array<ConfigPreset, 4> kPresets = {{
    {"tiny", "A small byte-level GPT on Python's documentation: a first run.", kTiny},
    {"gpt-10m", "A byte-level GPT of about 10M parameters on Python's documentation.", kGpt10m},
    {"finetune-smollm2",
     "SmolLM2-135M, in the folder SmolLM2-135M, trained further on Python's documentation.", kFinetune},
    {"resnet18-fashion", "ResNet-18 on Fashion-MNIST.", kResNet},
}};

}  // namespace

std::span<const ConfigPreset> config_presets() { return kPresets; }

}  // namespace halfstep
