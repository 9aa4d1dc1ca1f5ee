// The configuration of a training run: one plain value, and where each part of it came from. Knows no Torch.
#pragma once

#include <halfstep/config.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace halfstep {

/// What `halfstep train` carries out. docs/configuration.md lists each key; an optional without a value
/// leaves the choice to the part that it configures ("if not given" in that page).
///
/// Words ("bf16", "cosine") are text here. Those in a value from resolve_config() are among ConfigKey::words.
struct RunConfig {
  /// Which model, and how large a new one is.
  struct Model {
    std::optional<std::string> kind{};  ///< gpt2, llama, mistral, qwen2, qwen3, resnet18, own
    std::optional<std::string> from{};  ///< a Hugging Face folder; the sizes below are for new models
    std::optional<int64_t> layers{}, width{}, heads{}, kv_heads{}, ffn_width{}, vocabulary{}, context{};
    std::optional<double> dropout{};
    bool operator==(const Model&) const = default;
  } model{};

  /// What it learns from.
  struct Data {
    std::vector<std::string> train{};       ///< text, JSON Lines, token files, or folders of text
    std::vector<std::string> validation{};  ///< or a part of `train`:
    std::optional<double> validation_fraction{};
    std::optional<std::string> tokenizer{};      ///< "bytes", or a tokenizer.json
    std::optional<std::string> text_field{};     ///< of JSON Lines
    std::optional<std::string> chat_template{};  ///< a file in Jinja
    std::optional<std::string> images{};         ///< a folder of IDX files
    int64_t sequence_length = 256;
    int64_t batch_size = 8;
    int64_t seed = 0;
    bool operator==(const Data&) const = default;
  } data{};

  /// Fields of LossScaling, which has the defaults.
  struct LossScale {
    std::optional<double> initial{}, growth_factor{}, backoff_factor{}, floor{}, cap{};
    std::optional<int64_t> growth_interval{}, hysteresis{}, max_consecutive_skips{};
    bool operator==(const LossScale&) const = default;
  };

  /// In which precision, and how weights and moments are kept.
  struct Precision {
    std::string compute = "fp32";
    std::vector<std::string> keep_high{};  ///< patterns of weights that do not follow the recipe
    std::optional<std::string> weights{};
    std::string moments = "fp32";
    LossScale loss_scale{};
    std::map<std::string, std::string> ops{};  ///< the rule of each operation that has another than standard
    bool operator==(const Precision&) const = default;
  } precision{};

  /// The optimizer, and how its rate moves.
  struct Optimizer {
    std::string kind = "adamw";
    double lr = 3e-4;
    std::optional<double> beta1{}, beta2{}, eps{}, weight_decay{}, momentum{}, dampening{};
    std::optional<bool> nesterov{};
    std::optional<double> clip_norm{};
    std::string schedule = "constant";
    int64_t warmup_steps = 0;
    std::optional<int64_t> decay_steps{};
    std::optional<double> final_lr{};
    bool operator==(const Optimizer&) const = default;
  } optimizer{};

  /// How long it trains, and what happens on the way.
  struct Train {
    int64_t steps = 1000;
    int64_t accumulation = 1;
    int64_t seed = 0;
    bool recompute_blocks = false;
    std::optional<int64_t> threads{};
    int64_t evaluate_every = 0;
    int64_t evaluate_batches = 20;
    int64_t sample_every = 0;
    std::string sample_prompt = "The ";
    int64_t sample_tokens = 64;
    std::string on_divergence = "stop";
    int64_t most_rollbacks = 3;
    std::optional<int64_t> patience{};
    std::optional<double> time_limit_minutes{};
    double watchdog_minutes = 10;
    bool operator==(const Train&) const = default;
  } train{};

  /// When the state is saved, and which checkpoints stay.
  struct Checkpoint {
    int64_t every = 0;
    double every_minutes = 10;
    int64_t keep_last = 2;
    int64_t keep_every = 0;
    bool keep_best = false;
    std::string resume = "auto";
    bool operator==(const Checkpoint&) const = default;
  } checkpoint{};

  /// What is written about each step.
  struct Log {
    int64_t every = 1;
    bool tensorboard = false;
    int64_t trace_steps = 0;
    bool operator==(const Log&) const = default;
  } log{};

  /// What is looked at besides.
  struct Watch {
    int64_t every = 50;
    bool trace_on_skip = true;
    std::optional<std::string> prometheus{};
    bool operator==(const Watch&) const = default;
  } watch{};

  /// Where it runs, and where it writes.
  struct Run {
    std::optional<std::string> folder{};
    std::string device = "cpu";  ///< "cuda:0", or any other that LibTorch knows
    std::string reduction = "fp32";
    std::string shard = "none";
    std::string gather = "own";
    double rank_timeout_seconds = 60;
    bool operator==(const Run&) const = default;
  } run{};

  bool operator==(const RunConfig&) const = default;
};

/// Where a key's value lies in a RunConfig; its alternative is the key's type.
using ConfigField = std::variant<bool*, int64_t*, double*, std::string*, std::optional<bool>*,
                                 std::optional<int64_t>*, std::optional<double>*, std::optional<std::string>*,
                                 std::vector<std::string>*, std::map<std::string, std::string>*>;

/// Of a number. A bound that is left out of the range says so.
struct ConfigRange {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  bool least_excluded = false;
  bool most_excluded = false;
};

/// One row of the table from which parsing, printing, the manual and completion are made.
struct ConfigKey {
  std::string_view path;  ///< "optimizer.lr"
  ConfigField (*field)(RunConfig&);
  std::string_view help;                  ///< one sentence
  std::string_view unit = "";             ///< "steps"
  ConfigRange range{};                    ///< of numbers
  std::vector<std::string_view> words{};  ///< all that a text may be; any if empty
  std::string_view if_not_given = "";     ///< what an optional without a value stands for
  bool names_file = false;                ///< a path that must be there before the run
};

/// All keys, by section.
HALFSTEP_API std::span<const ConfigKey> config_keys();

/// A configuration that comes with Halfstep.
struct ConfigPreset {
  std::string_view name;
  std::string_view summary;  ///< one sentence
  std::string_view toml;
};

/// All presets.
HALFSTEP_API std::span<const ConfigPreset> config_presets();

/// A configuration file that was read.
struct ConfigText {
  std::string name;  ///< for messages: "run.toml"
  std::string text;
};

/// Later ones win: preset, file, environment, unset, set.
struct ConfigSources {
  std::optional<std::string> preset{};
  std::optional<ConfigText> file{};
  std::vector<std::pair<std::string, std::string>> environment{};  ///< names with their values
  std::vector<std::string> unset{};  ///< keys whose value before `set` is the default
  std::vector<std::string> set{};    ///< "optimizer.lr=3e-4"
};

/// Reads a file of at most 256 KiB.
HALFSTEP_API ConfigText read_config_file(const std::filesystem::path& path);

/// The variables of this process that are keys by their name: HALFSTEP_, and two underscores for a dot
/// (HALFSTEP_OPTIMIZER__LR). Those without two underscores are not for the configuration.
HALFSTEP_API std::vector<std::pair<std::string, std::string>> config_environment();

/// A configuration, and where each value came from.
struct ResolvedConfig {
  RunConfig config{};
  std::map<std::string, std::string, std::less<>> origins{};  ///< of the keys that are not defaults
  /// What was left out: "optimizer.final_lr of preset tiny is left out: it has no meaning with ...".
  std::vector<std::string> notes{};

  /// "default", "preset tiny", "run.toml:12", "HALFSTEP_OPTIMIZER__LR", "--set".
  HALFSTEP_API std::string origin(std::string_view path) const;
};

/// Puts the sources together. Throws an Error that lists every fault, each with its file and line, variable
/// or flag and what to write instead: unknown keys, wrong types, numbers out of range, options that
/// contradict each other. A preset's value that another source contradicts is left out, with a note. Looks at
/// no file.
[[nodiscard]] HALFSTEP_API ResolvedConfig resolve_config(const ConfigSources& sources);

/// Throws an Error that lists every file and folder which the configuration names and which is not there.
HALFSTEP_API void check_paths(const ResolvedConfig& resolved);

/// What differs, a sentence for each key: "optimizer.lr is now 0.5, was 3e-4".
[[nodiscard]] HALFSTEP_API std::vector<std::string> config_changes(RunConfig before, RunConfig now);

/// The whole configuration as TOML, from which resolve_config() makes the same one. With the origin of each
/// value as a comment behind it, or without.
HALFSTEP_API std::string to_toml(const ResolvedConfig& resolved, bool with_origins);

}  // namespace halfstep
