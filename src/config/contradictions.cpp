#include "config/sources.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/key_text.h"

namespace halfstep::config {
namespace {

class Finder {
 public:
  explicit Finder(const ResolvedConfig& resolved) : resolved_(resolved), config_(resolved.config) {}

  std::vector<Contradiction> find() {
    model();
    sizes();
    data();
    precision();
    loss_scale();
    optimizer();
    schedule();
    train();
    watch();
    run();
    return std::move(found_);
  }

 private:
  template <typename... Parts>
  void fault(std::string_view path, const Parts&... parts) {
    found_.push_back({std::string(path), detail::concat(parts...)});
  }

  /// "optimizer.lr (--set)": the other side of a contradiction.
  std::string other(std::string_view path) const {
    return std::string(path) + " (" + resolved_.origin(path) + ")";
  }

  bool given(std::string_view path) {
    const auto text = toml_text(find_key(path)->field(config_));
    return text && *text != "[]";
  }

  template <typename Paths>
  void none_of(const Paths& paths, const std::string& why) {
    for (const std::string_view path : paths)
      if (given(path)) fault(path, why);
  }

  bool own() const { return config_.model.kind == "own"; }
  bool images() const { return config_.model.kind == "resnet18"; }
  bool low() const { return config_.precision.compute != "fp32" && config_.precision.compute != "tf32"; }
  bool has_recipe() const {
    return low() && config_.precision.compute != "bf16" && config_.precision.compute != "fp16";
  }

  /// Node exporter reads no other names, and nothing else that a run writes has one.
  void watch() {
    const auto& figures = config_.watch.prometheus;
    if (figures && !figures->ends_with(".prom"))
      fault("watch.prometheus", *figures,
            " does not end in .prom. The file of that name is replaced at logged steps: "
            "metrics.prom in the run's folder, or a path.");
  }

  void run() {
    if (config_.run.gather != "own" && config_.run.shard != "weights")
      fault("run.gather", "is for run.shard = \"weights\", and ", other("run.shard"), " is ",
            config_.run.shard);
  }

  static constexpr std::array<std::string_view, 8> kSizes = {
      "model.layers",    "model.width",      "model.heads",   "model.kv_heads",
      "model.ffn_width", "model.vocabulary", "model.context", "model.dropout"};

  void model() {
    if (config_.model.from) {
      none_of(kSizes,
              "is for new models, and " + other("model.from") + " has its sizes. Leave one of them out.");
      if (own()) fault("model.from", "is for Halfstep's models, and model.kind is own. Leave it out.");
      if (images()) fault("model.from", "cannot be a resnet18. Leave model.from out and train a new one.");
    } else if (!config_.model.kind) {
      fault("model.kind",
            "is not given. Write kind = \"gpt2\", or name a folder with model.from, or take a preset.");
    } else if (own()) {
      none_of(kSizes, "is for language models, and model.kind is own. Leave it out.");
    } else if (images()) {
      none_of(kSizes, "is for language models; a resnet18 has fixed sizes. Leave it out.");
    } else {
      for (const std::string_view path : {"model.layers", "model.width", "model.heads"})
        if (!given(path))
          fault(path, "is not given, and a new ", *config_.model.kind, " needs it. A preset has all sizes.");
      if (config_.model.kind == "gpt2" && config_.model.kv_heads)
        fault("model.kv_heads",
              "is for llama and its relatives; gpt2 has as many as model.heads. Leave it out.");
    }
  }

  void sizes() {
    const auto& [kind, from, layers, width, heads, kv_heads, ffn, vocabulary, context, dropout] =
        config_.model;
    if (width && heads && *width % *heads != 0)
      fault("model.width", "is ", *width, ", not a multiple of ", other("model.heads"), ", ", *heads,
            ". Write ", (*width / *heads + 1) * *heads, ", or other heads.");
    else if (width && heads && kind && kind != "gpt2" && *width / *heads % 2 != 0)
      fault("model.width", "gives heads of ", *width / *heads,
            " elements, and rotary positions turn pairs. Write ", (*width / *heads + 1) * *heads, ".");
    if (heads && kv_heads && *heads % *kv_heads != 0)
      fault("model.kv_heads", "is ", *kv_heads, ", which does not divide ", other("model.heads"), ", ",
            *heads, ". Choose a divisor.");
    if (context && *context < config_.data.sequence_length)
      fault("model.context", "is ", *context, " tokens, fewer than ", other("data.sequence_length"), ", ",
            config_.data.sequence_length, ". Raise it or shorten the sequences.");
    if (vocabulary && *vocabulary < 256 && config_.data.tokenizer.value_or("bytes") == "bytes")
      fault("model.vocabulary", "is ", *vocabulary,
            ", and the tokenizer \"bytes\" has 256 tokens. Leave it out.");
  }

  void data() {
    if (own()) {
      constexpr std::array<std::string_view, 7> all = {
          "data.train",     "data.validation", "data.validation_fraction",
          "data.tokenizer", "data.text_field", "data.chat_template",
          "data.images"};
      none_of(all, "is for data that Halfstep reads, and model.kind is own. Leave it out.");
      return;
    }
    if (images()) {
      constexpr std::array<std::string_view, 6> text = {
          "data.train",     "data.validation", "data.validation_fraction",
          "data.tokenizer", "data.text_field", "data.chat_template"};
      none_of(text, "is for text, and model.kind is resnet18. Use data.images.");
      if (!config_.data.images)
        fault("data.images",
              "is not given, and a resnet18 needs it: a folder with the IDX files of Fashion-MNIST.");
      return;
    }
    constexpr std::array<std::string_view, 1> image = {"data.images"};
    none_of(image, "is for resnet18. Use data.train for text.");
    if (config_.data.train.empty())
      fault("data.train",
            "is not given. Name a text file, a token file or a folder: train = [\"book.txt\"].");
    if (!config_.data.validation.empty() && config_.data.validation_fraction)
      fault("data.validation_fraction",
            "and data.validation both say what is held out. Leave one of them out.");
  }

  void precision() {
    const RunConfig::Precision& precision = config_.precision;
    if (precision.weights && *precision.weights != "fp32" && !low())
      fault("precision.weights", "is ", *precision.weights, ", and ", other("precision.compute"), " is ",
            precision.compute, ", whose weights are fp32. Leave it out, or compute in bf16.");
    if (precision.weights == "split_master" && precision.compute == "fp16")
      fault("precision.weights",
            "is split_master, the 16 bits below a BF16 weight; with fp16 use fp32_master.");
    if (!precision.keep_high.empty() && !has_recipe())
      fault("precision.keep_high", "is for recipes such as mxfp8, and ", other("precision.compute"), " is ",
            precision.compute, ". Leave it out.");
    if (!precision.ops.empty() && !low())
      fault("precision.ops." + precision.ops.begin()->first, "is a rule for bf16 and fp16, and ",
            other("precision.compute"), " is ", precision.compute, ". Leave it out.");
  }

  void loss_scale() {
    if (config_.precision.compute != "fp16") {
      for (const ConfigKey& key : config_keys())
        if (key.path.starts_with("precision.loss_scale.") && given(key.path))
          fault(key.path, "is for fp16, and ", other("precision.compute"), " is ", config_.precision.compute,
                ", which needs no loss scale. Leave it out.");
      return;
    }
    const RunConfig::LossScale& scale = config_.precision.loss_scale;
    // LossScaling's defaults where a bound is not given.
    const double initial = scale.initial.value_or(0x1p16);
    if (scale.floor.value_or(0x1p-24) > initial)
      fault("precision.loss_scale.floor", "is above the initial scale, ", number_text(initial),
            ". Lower it.");
    if (scale.cap.value_or(0x1p126) < initial)
      fault("precision.loss_scale.cap", "is below the initial scale, ", number_text(initial), ". Raise it.");
  }

  void optimizer() {
    constexpr std::array<std::string_view, 3> sgd = {"optimizer.momentum", "optimizer.dampening",
                                                     "optimizer.nesterov"};
    constexpr std::array<std::string_view, 3> adamw = {"optimizer.beta1", "optimizer.beta2", "optimizer.eps"};
    if (config_.optimizer.kind == "adamw")
      none_of(sgd, "is for sgd, and optimizer.kind is adamw. Leave it out; adamw has beta1 and beta2.");
    if (config_.optimizer.kind == "sgd")
      none_of(adamw, "is for adamw, and optimizer.kind is sgd. Leave it out; sgd has momentum.");
    if (config_.optimizer.nesterov.value_or(false) &&
        (config_.optimizer.momentum.value_or(0) == 0 || config_.optimizer.dampening.value_or(0) != 0))
      fault("optimizer.nesterov", "needs a momentum above 0 and no dampening. Write momentum = 0.9.");
  }

  void schedule() {
    const RunConfig::Optimizer& optimizer = config_.optimizer;
    const int64_t steps = config_.train.steps;
    const bool constant = optimizer.schedule == "constant";
    if (optimizer.warmup_steps > steps || (!constant && optimizer.warmup_steps == steps))
      fault("optimizer.warmup_steps", "is ", optimizer.warmup_steps, ", and ", other("train.steps"), " is ",
            steps, ". Lower optimizer.warmup_steps.");
    else if (optimizer.schedule == "wsd" && !optimizer.decay_steps)
      fault("optimizer.decay_steps", "is not given, and wsd needs it. Usual is a tenth of train.steps.");
    else if (optimizer.schedule == "wsd" && *optimizer.decay_steps > steps - optimizer.warmup_steps)
      fault("optimizer.decay_steps", "is ", *optimizer.decay_steps, ", and after warm-up ",
            steps - optimizer.warmup_steps, " steps are left. Lower it.");
    if (optimizer.schedule != "wsd" && optimizer.decay_steps)
      fault("optimizer.decay_steps", "is for the schedule wsd, and optimizer.schedule is ",
            optimizer.schedule, ". Leave it out.");
    if (optimizer.final_lr && constant)
      fault("optimizer.final_lr", "has no meaning with a constant schedule. Use linear, cosine or wsd.");
    else if (optimizer.final_lr && *optimizer.final_lr > optimizer.lr)
      fault("optimizer.final_lr", "is ", number_text(*optimizer.final_lr), ", above ", other("optimizer.lr"),
            ", ", number_text(optimizer.lr), ". Rates fall; lower it.");
  }

  void train() {
    const RunConfig::Train& train = config_.train;
    if (train.evaluate_every > 0 && !images() && !own() && config_.data.validation.empty() &&
        !config_.data.validation_fraction)
      fault("train.evaluate_every", "is ", train.evaluate_every,
            ", and nothing is held out. Name data.validation or a data.validation_fraction.");
    constexpr std::array<std::string_view, 1> patience = {"train.patience"};
    if (train.evaluate_every == 0) none_of(patience, "counts evaluations, and train.evaluate_every is 0.");
    if (train.evaluate_every == 0 && config_.checkpoint.keep_best)
      fault("checkpoint.keep_best",
            "uses the held-out loss, and train.evaluate_every is 0. Set train.evaluate_every.");
    if (images() && train.sample_every > 0)
      fault("train.sample_every", "is for text, and model.kind is resnet18. Leave it out.");
    if ((images() || own()) && train.recompute_blocks)
      fault("train.recompute_blocks", "is for language models, and model.kind is ", *config_.model.kind,
            ". Leave it out.");
    if (config_.log.trace_steps > train.steps)
      fault("log.trace_steps", "is ", config_.log.trace_steps, ", and the run has ", train.steps, " steps.",
            " Lower it.");
    if (config_.checkpoint.resume == "must" && !config_.run.folder)
      fault("checkpoint.resume",
            "is must, and run.folder is not given. Name the folder of the run to resume.");
  }

  const ResolvedConfig& resolved_;
  RunConfig config_;  // a copy: the table's fields are pointers to what may be written
  std::vector<Contradiction> found_;
};

}  // namespace

std::vector<Contradiction> contradictions(const ResolvedConfig& resolved) { return Finder(resolved).find(); }

}  // namespace halfstep::config
