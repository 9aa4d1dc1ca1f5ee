#include <ATen/core/grad_mode.h>
#include <halfstep/chat_template.h>
#include <halfstep/data.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "io/durable_file.h"
#include "tensor/transfers.h"
#include "train/tasks.h"
#include "train/token_sources.h"
#include "words/numbers.h"

namespace halfstep::train {
namespace {

using Path = std::filesystem::path;

Path tokenizer_file(const std::string& name) {
  return std::filesystem::is_directory(name) ? Path(name) / "tokenizer.json" : Path(name);
}

/// The file of the tokenizer; nothing for bytes.
std::optional<Path> tokenizer_path(const RunConfig& config) {
  if (config.data.tokenizer)
    return *config.data.tokenizer == "bytes" ? std::nullopt
                                             : std::optional(tokenizer_file(*config.data.tokenizer));
  if (config.model.from && std::filesystem::exists(tokenizer_file(*config.model.from)))
    return tokenizer_file(*config.model.from);
  return std::nullopt;
}

/// "" for bytes. What cannot be read is refused by whoever parses it.
std::string text_of(const std::optional<Path>& path) {
  if (!path) return "";
  std::ifstream file(*path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<CausalLM> make_model(const RunConfig& config, int64_t tokenizer_size) {
  const RunConfig::Model& given = config.model;
  if (given.from) return load_pretrained(*given.from);
  const CausalLMSizes sizes{.vocabulary = given.vocabulary.value_or(tokenizer_size),
                            .context = given.context.value_or(config.data.sequence_length),
                            .layers = *given.layers,
                            .width = *given.width,
                            .heads = *given.heads,
                            .key_value_heads = given.kv_heads,
                            .feed_forward_width = given.ffn_width,
                            .dropout = given.dropout.value_or(0)};
  return make_causal_lm(config_json_of(*given.kind, sizes), static_cast<uint64_t>(config.train.seed));
}

std::vector<TokenFile> open_all(const std::vector<Path>& paths, int64_t vocabulary) {
  std::vector<TokenFile> files;
  for (const Path& path : paths) files.emplace_back(path, TokenFileOptions{.vocabulary_size = vocabulary});
  return files;
}

/// Text that is read, or samples that are written, need the model's own tokens. Told before anything is
/// encoded.
std::shared_ptr<CausalLM> with_known_tokens(std::shared_ptr<CausalLM> model, const RunConfig& config,
                                            const std::optional<Path>& tokenizer) {
  constexpr int64_t kBytes = 256;
  const auto is_text = [](const std::string& name) { return !is_token_file(name); };
  const bool is_needed = config.train.sample_every > 0 || std::ranges::any_of(config.data.train, is_text) ||
                         std::ranges::any_of(config.data.validation, is_text);
  HALFSTEP_CHECK(
      !is_needed || !config.model.from || tokenizer || config.data.tokenizer || model->vocabulary() == kBytes,
      "model.from: ", config.model.from.value_or(""), " has no tokenizer.json, and its ", model->vocabulary(),
      " tokens are not bytes. Put its tokenizer.json there, or name one with data.tokenizer.");
  return model;
}

int64_t total_size(const std::vector<TokenFile>& files) {
  int64_t tokens = 0;
  for (const TokenFile& file : files) tokens += file.size();
  return tokens;
}

/// The template that makes texts of messages, if there is one.
std::optional<ChatTemplate> chat_of(const RunConfig& config) {
  const Path folder = config.model.from.value_or("");
  if (config.data.chat_template) return ChatTemplate::from_file(*config.data.chat_template, folder);
  return config.model.from ? ChatTemplate::from_folder(folder) : std::nullopt;
}

/// All files that it may come from.
std::string chat_text_of(const RunConfig& config) {
  const Path folder = config.model.from.value_or("");
  std::string text = config.data.chat_template ? text_of(Path(*config.data.chat_template)) : "";
  for (const char* name : {"chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"})
    if (config.model.from) text += text_of(folder / name);
  return text;
}

/// The token that ends a completion: the model's own.
std::optional<int32_t> end_of(const RunConfig& config, const Tokenizer& tokenizer) {
  if (!config.model.from) return std::nullopt;
  std::ifstream file(Path(*config.model.from) / "config.json");
  const auto fields = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!fields.is_object() || !fields.contains("eos_token_id")) return std::nullopt;
  const nlohmann::json& given = fields["eos_token_id"];
  const nlohmann::json& first = given.is_array() && !given.empty() ? given.front() : given;
  if (!first.is_number_integer()) return std::nullopt;
  const auto id = first.get<int64_t>();
  if (id < 0 || id >= tokenizer.vocabulary_size()) return std::nullopt;
  return static_cast<int32_t>(id);
}

/// How many tokens the loss of a batch is the mean of.
int64_t learned_in(const TokenBatch& batch) {
  return batch.documents.defined() ? batch.targets.ge(0).sum().item<int64_t>() : batch.targets.numel();
}

class TextTask final : public Task {
 public:
  TextTask(const RunConfig& config, const Path& tokens_folder, int64_t most_text_bytes)
      : config_(config),
        tokenizer_path_(tokenizer_path(config)),
        tokenizer_(tokenizer_path_ ? Tokenizer::from_file(*tokenizer_path_) : Tokenizer::bytes()),
        model_(with_known_tokens(make_model(config, tokenizer_.vocabulary_size()), config, tokenizer_path_)),
        chat_(chat_of(config)),
        sources_(prepare_tokens(config.data, tokenizer_, tokens_folder,
                                {.tokenizer_text = text_of(tokenizer_path_),
                                 .chat = chat_,
                                 .chat_text = chat_text_of(config),
                                 .end = end_of(config, tokenizer_),
                                 .most_text_bytes = most_text_bytes})) {
    HALFSTEP_CHECK(tokenizer_.vocabulary_size() <= model_->vocabulary(), "The tokenizer has ",
                   tokenizer_.vocabulary_size(), " tokens and the model knows ", model_->vocabulary(),
                   ". Raise model.vocabulary, or take the model's own tokenizer.");
    HALFSTEP_CHECK(config.data.sequence_length <= model_->shape().context, "data.sequence_length is ",
                   config.data.sequence_length, ", and the model was made for ", model_->shape().context,
                   " tokens. Shorten it.");
    HALFSTEP_CHECK(
        config.train.sample_every == 0 || !config.train.sample_prompt.empty(),
        "train.sample_prompt is empty, and a sample goes on from at least one token. Write \"The \".");
    model_->recompute_blocks = config.train.recompute_blocks;
    std::vector<TokenFile> files = open_all(sources_.train, model_->vocabulary());
    training_tokens_ = total_size(files);
    batches_.emplace(std::move(files), batch_options(/*shuffle=*/true));
    // Opened at once, so that what is wrong with it is told before the training and not in the middle of it.
    if (!sources_.validation.empty()) {
      std::vector<TokenFile> held = open_all(sources_.validation, model_->vocabulary());
      held_out_tokens_ = total_size(held);
      held_out_.emplace(std::move(held), batch_options(/*shuffle=*/false));
      held_out_beginning_ = held_out_->state_dict();
    }
  }

  torch::nn::Module& model() override { return *model_; }

  std::string model_text() const override {
    const CausalLMShape shape = model_->shape();
    return detail::concat(config_.model.from ? *config_.model.from + ", " : "", shape.family, ": ",
                          shape.layers, " blocks of width ", shape.width);
  }

  std::string data_text() const override {
    return detail::concat(sources_.examples.empty() ? "" : sources_.examples + "; ",
                          with_commas(training_tokens_), " tokens to train on, ",
                          held_out_tokens_ ? with_commas(held_out_tokens_) : "none",
                          " held out, sequences of ", config_.data.sequence_length, ", tokenizer ",
                          tokenizer_path_ ? tokenizer_path_->string() : "bytes");
  }

  std::string unit() const override { return "tokens"; }
  int64_t items_per_batch() const override { return config_.data.batch_size * config_.data.sequence_length; }

  std::optional<double> flops_per_batch() const override {
    return model_->flops_per_token(config_.data.sequence_length) * static_cast<double>(items_per_batch());
  }

  void take_batch() override { batch_ = on_device(batches_->next()); }
  at::Tensor loss() override { return model_->loss(batch_.inputs, batch_.targets, batch_.documents); }

  Score evaluate(const MixedPrecision& precision) override {
    const EvaluationScope evaluation(*model_);
    held_out_->load_state_dict(held_out_beginning_);
    Score score;
    std::vector<at::Tensor> losses;  // read together: an accelerator is waited for once
    std::vector<int64_t> counts;
    for (int64_t batches = 0; held_out_->sequences_taken() < held_out_->windows(); ++batches) {
      if (config_.train.evaluate_batches > 0 && batches == config_.train.evaluate_batches) break;
      const TokenBatch taken = held_out_->next(), batch = on_device(taken);
      if (learned_in(taken) == 0) continue;  // the mean of nothing
      losses.push_back(
          precision.forward([&] { return model_->loss(batch.inputs, batch.targets, batch.documents); }));
      counts.push_back(learned_in(taken));
    }
    const Arrival arrival(losses);
    for (size_t i = 0; i < losses.size(); ++i) {
      score.loss += arrival.wait_for(i).item<double>() * static_cast<double>(counts[i]);
      score.count += counts[i];
    }
    score.loss /= static_cast<double>(score.count);
    return score;
  }

  std::optional<Sample> sample(const MixedPrecision& precision, uint64_t seed) override {
    const std::vector<int32_t> encoded = tokenizer_.encode(config_.train.sample_prompt);
    const std::vector<int64_t> prompt(encoded.begin(), encoded.end());
    const GenerateOptions options{
        .tokens = config_.train.sample_tokens, .context = model_->shape().context, .seed = seed};
    const std::vector<int64_t> written =
        precision.forward([&] { return generate(*model_, prompt, options); });
    // A model may have more ids than its tokenizer: rows that were added for a round number.
    std::vector<int32_t> ids;
    for (const int64_t id : written)
      if (id < tokenizer_.vocabulary_size()) ids.push_back(static_cast<int32_t>(id));
    return Sample{config_.train.sample_prompt, tokenizer_.decode(ids)};
  }

  StateDict state_dict() const override { return batches_->state_dict(); }
  void load_state_dict(const StateDict& saved) override { batches_->load_state_dict(saved); }

  void write_model(const Path& folder) override {
    save_pretrained(*model_, folder);
    // Written, not copied: a file that nobody may write to stays where it is.
    const auto copy = [&](const Path& file, const char* name) {
      files::write_durably(folder / name, text_of(file));
    };
    if (tokenizer_path_) copy(*tokenizer_path_, "tokenizer.json");
    if (keeps_companions(folder))
      for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                               "generation_config.json"})
        if (const Path file = Path(*config_.model.from) / name; std::filesystem::exists(file))
          copy(file, name);
    if (config_.data.chat_template) copy(*config_.data.chat_template, "chat_template.jinja");
  }

 private:
  /// Whether what others read beside the weights and tokens of model.from goes with the model: not to another
  /// tokenizer.
  bool keeps_companions(const Path& folder) const {
    if (!config_.model.from) return false;
    const Path from(*config_.model.from), own = tokenizer_file(from.string());
    const bool is_own = tokenizer_path_ ? *tokenizer_path_ == own : !std::filesystem::exists(own);
    return is_own && !std::filesystem::equivalent(from, folder);
  }

  TokenBatch on_device(const TokenBatch& batch) const {
    const at::Device device = model_->parameters().front().device();
    return {.inputs = sent_to(device, batch.inputs),
            .targets = sent_to(device, batch.targets),
            .documents = batch.documents.defined() ? sent_to(device, batch.documents) : at::Tensor()};
  }

  TokenBatchOptions batch_options(bool shuffle) const {
    return {.batch_size = config_.data.batch_size,
            .sequence_length = config_.data.sequence_length,
            .seed = static_cast<uint64_t>(config_.data.seed),
            .shuffle = shuffle};
  }

  RunConfig config_;
  std::optional<Path> tokenizer_path_;
  Tokenizer tokenizer_;
  std::shared_ptr<CausalLM> model_;
  std::optional<ChatTemplate> chat_;
  TokenSources sources_;
  std::optional<TokenBatches> batches_, held_out_;
  StateDict held_out_beginning_;  ///< every evaluation starts here
  int64_t training_tokens_ = 0, held_out_tokens_ = 0;
  TokenBatch batch_;
};

}  // namespace

std::unique_ptr<Task> text_task(const RunConfig& config, const Path& tokens_folder, int64_t most_text_bytes) {
  return std::make_unique<TextTask>(config, tokens_folder, most_text_bytes);
}

}  // namespace halfstep::train
