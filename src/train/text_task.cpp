#include <ATen/core/grad_mode.h>
#include <halfstep/chat_template.h>
#include <halfstep/checkpoint.h>
#include <halfstep/data.h>
#include <halfstep/error.h>
#include <halfstep/models.h>
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>

#include "io/durable_file.h"
#include "io/input_file.h"
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

std::string text_of(const Path& path) {
  const files::InputFile file(path);
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
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

/// TokenBatches refuses the same and knows neither the key nor the names.
void check_holds_a_sequence(const std::vector<TokenFile>& files, const RunConfig::Data& data,
                            bool is_held_out) {
  const auto holds_one = [&](const TokenFile& file) { return file.size() > data.sequence_length; };
  if (std::ranges::any_of(files, holds_one)) return;
  const bool is_part = is_held_out && data.validation_fraction;
  const std::vector<std::string>& names = is_held_out && !is_part ? data.validation : data.train;
  std::string which =
      is_part ? detail::concat("data.validation_fraction: ", *data.validation_fraction, " of ", names.front())
      : is_held_out ? "data.validation: " + names.front()
                    : "data.train: " + names.front();
  if (names.size() > 1) which += detail::concat(" and ", names.size() - 1, " more");
  throw Error(detail::concat(which, " is too short: it has ", with_commas(total_size(files)),
                             " tokens, and data.sequence_length = ", data.sequence_length, " takes ",
                             data.sequence_length + 1, " of one file. Give more text, ",
                             is_part ? "raise the fraction, " : "", "or lower data.sequence_length."));
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
  std::string text = config.data.chat_template ? text_of(*config.data.chat_template) : "";
  for (const char* name : {"chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"})
    if (config.model.from && std::filesystem::exists(folder / name)) text += text_of(folder / name);
  return text;
}

/// The files that go with the model, by name: what others read beside the weights and tokens of model.from,
/// but not with another tokenizer. As they are when the run begins: until its end, which may be weeks away,
/// they may be moved or changed.
std::map<std::string, std::string> companions_of(const RunConfig& config,
                                                 const std::optional<Path>& tokenizer) {
  std::map<std::string, std::string> files;
  if (tokenizer) files["tokenizer.json"] = text_of(*tokenizer);
  if (config.model.from) {
    const Path own = tokenizer_file(*config.model.from);
    if (tokenizer ? *tokenizer == own : !std::filesystem::exists(own))
      for (const char* name : {"tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                               "generation_config.json"})
        if (const Path file = Path(*config.model.from) / name; std::filesystem::exists(file))
          files[name] = text_of(file);
  }
  if (config.data.chat_template) files["chat_template.jinja"] = text_of(*config.data.chat_template);
  return files;
}

/// In a state beside that of the training data: not what decides about the next batch.
constexpr const char* kHeldOutDigest = "held_out_digest";

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

bool has_checkpoints(const Path& run) {
  return std::filesystem::exists(run / "checkpoints") && !checkpoint_steps(run / "checkpoints").empty();
}

/// How many tokens the loss of a batch is the mean of.
int64_t learned_in(const TokenBatch& batch) {
  return batch.documents.defined() ? batch.targets.ge(0).sum().item<int64_t>() : batch.targets.numel();
}

class TextTask final : public Task {
 public:
  TextTask(const RunConfig& config, const Path& tokens_folder, int64_t most_text_bytes, const Ranks& ranks)
      : config_(config),
        ranks_(takes_whole_batches(config) ? Ranks() : ranks),
        tokenizer_path_(tokenizer_path(config)),
        tokenizer_(tokenizer_path_ ? Tokenizer::from_file(*tokenizer_path_) : Tokenizer::bytes()),
        companions_(companions_of(config, tokenizer_path_)),
        model_(with_known_tokens(make_model(config, tokenizer_.vocabulary_size()), config, tokenizer_path_)),
        chat_(chat_of(config)),
        sources_(prepare_tokens(config.data, tokenizer_, tokens_folder,
                                {.tokenizer_text = tokenizer_path_ ? companions_["tokenizer.json"] : "",
                                 .chat = chat_,
                                 .chat_text = chat_text_of(config),
                                 .end = end_of(config, tokenizer_),
                                 .most_text_bytes = most_text_bytes,
                                 .has_checkpoints = has_checkpoints(tokens_folder.parent_path()),
                                 .only_read = ranks.rank() > 0})) {
    HALFSTEP_CHECK(tokenizer_.vocabulary_size() <= model_->vocabulary(), "The tokenizer has ",
                   tokenizer_.vocabulary_size(), " tokens and the model knows ", model_->vocabulary(),
                   ". Raise model.vocabulary, or take the model's own tokenizer.");
    HALFSTEP_CHECK(config.data.sequence_length <= model_->shape().context, "data.sequence_length is ",
                   config.data.sequence_length, ", and the model was made for ", model_->shape().context,
                   " tokens. Shorten it.");
    HALFSTEP_CHECK(
        config.train.sample_every == 0 || !config.train.sample_prompt.empty(),
        "train.sample_prompt is empty, and a sample continues at least one token. Write \"The \".");
    model_->recompute_blocks = config.train.recompute_blocks;
    std::vector<TokenFile> files = open_all(sources_.train, model_->vocabulary());
    training_tokens_ = total_size(files);
    check_holds_a_sequence(files, config.data, /*is_held_out=*/false);
    batches_.emplace(std::move(files), batch_options(/*shuffle=*/true));
    // Opened at once, so that what is wrong with it is told before the training and not in the middle of it.
    if (!sources_.validation.empty()) {
      std::vector<TokenFile> held = open_all(sources_.validation, model_->vocabulary());
      held_out_tokens_ = total_size(held);
      check_holds_a_sequence(held, config.data, /*is_held_out=*/true);
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
    const auto& [train, validation, examples, held_out_examples, only] = sources_;
    return detail::concat(only.empty() ? "" : "in " + only + " (the rest was not checked): ",
                          examples.empty() ? "" : examples + "; ", with_commas(training_tokens_),
                          " tokens to train on, ", held_out_tokens_ ? with_commas(held_out_tokens_) : "none",
                          " held out", held_out_examples.empty() ? "" : " (" + held_out_examples + ")",
                          ", sequences of ", config_.data.sequence_length, ", tokenizer ",
                          tokenizer_path_ ? tokenizer_path_->string() : "bytes");
  }

  std::string unit() const override { return "tokens"; }
  int64_t items_per_batch() const override { return config_.data.batch_size * config_.data.sequence_length; }

  std::optional<double> flops_per_batch() const override {
    return model_->flops_per_token(config_.data.sequence_length) * static_cast<double>(items_per_batch());
  }

  /// A batch without a token to learn has no mean loss and is passed over; the position that is saved is
  /// behind it.
  void take_batch() override {
    const int64_t before = batches_->sequences_taken();
    for (;;) {
      const TokenBatch taken = batches_->next_part(ranks_.rank(), ranks_.size());
      weight_ = weight_of(taken);
      batch_ = on_device(taken);
      if (weight_) return;
      // From the middle of an epoch on, two of them hold each sequence at least once.
      HALFSTEP_CHECK(batches_->sequences_taken() - before < 2 * batches_->windows(), "data.train: none of ",
                     batches_->windows(), " sequences has a token to learn. Raise data.sequence_length, ",
                     config_.data.sequence_length, " now, or give data with answers.");
    }
  }
  at::Tensor loss() override {
    const at::Tensor loss = model_->loss(batch_.inputs, batch_.targets, batch_.documents);
    if (*weight_ == 1) return loss;
    // The mean of nothing is NaN, and its gradients are zeros.
    return (*weight_ == 0 ? loss.nan_to_num(0) : loss) * *weight_;
  }

  Score evaluate(const MixedPrecision& precision) override {
    const EvaluationScope evaluation(*model_);
    held_out_->load_state_dict(held_out_beginning_);
    Score score;
    std::vector<at::Tensor> losses;  // read together: an accelerator is waited for once
    std::vector<int64_t> counts;
    for (int64_t batches = 0; held_out_->sequences_taken() < held_out_->windows(); ++batches) {
      if (config_.train.evaluate_batches > 0 && batches == config_.train.evaluate_batches) break;
      const TokenBatch taken = held_out_->next_part(ranks_.rank(), ranks_.size()), batch = on_device(taken);
      const bool learns = learned_in(taken) > 0;  // else the mean of nothing
      // Weights that come and go come to all ranks or to none.
      if (!learns && precision.sharding() != Sharding::Weights) continue;
      const at::Tensor loss =
          precision.forward([&] { return model_->loss(batch.inputs, batch.targets, batch.documents); });
      if (!learns) continue;
      losses.push_back(loss);
      counts.push_back(learned_in(taken));
    }
    HALFSTEP_CHECK(!losses.empty(), "data.validation: of ", held_out_->windows(),
                   " sequences none that is evaluated has a token to learn. Raise train.evaluate_batches, ",
                   config_.train.evaluate_batches, " now, or give data with answers.");
    const Arrival arrival(losses);
    for (size_t i = 0; i < losses.size(); ++i) {
      score.loss += arrival.wait_for(i).item<double>() * static_cast<double>(counts[i]);
      score.count += counts[i];
    }
    return mean_of_ranks(score, ranks_);
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

  StateDict state_dict() const override {
    StateDict state = batches_->state_dict();
    if (held_out_) state.set(kHeldOutDigest, held_out_beginning_.integer("digest"));
    return state;
  }

  void load_state_dict(const StateDict& saved) override {
    check_same_data(saved);
    StateDict of_batches;
    for (const auto& [name, value] : saved)
      if (name != kHeldOutDigest) of_batches.set(name, value);
    batches_->load_state_dict(of_batches);
  }

  std::vector<std::string> changes_since(const StateDict& saved) const override {
    if (!held_out_ || !saved.contains(kHeldOutDigest) ||
        saved.integer(kHeldOutDigest) == held_out_beginning_.integer("digest"))
      return {};
    return {detail::concat(config_.data.validation_fraction ? "data.validation_fraction" : "data.validation",
                           " gives other tokens than before: held-out losses before and after this step are "
                           "of different texts")};
  }

  void write_model(const Path& folder) override {
    save_pretrained(*model_, folder);
    for (const auto& [name, text] : companions_) files::write_durably(folder / name, text);
  }

 private:
  /// TokenBatches refuses the same without the keys that decide about it.
  void check_same_data(const StateDict& saved) const {
    const StateDict own = batches_->state_dict();
    std::string changed;
    for (const auto& [name, key] :
         {std::pair("sequence_length", "data.sequence_length"), std::pair("seed", "data.seed"),
          std::pair("tokens", "the number of tokens that data.train gives")})
      if (saved.contains(name) && saved.integer(name) != own.integer(name))
        changed += detail::concat(changed.empty() ? "" : ", ", key, " was ", saved.integer(name), " and is ",
                                  own.integer(name));
    if (changed.empty() && saved.contains("digest") && saved.integer("digest") != own.integer("digest"))
      changed = "data.train gives other tokens than before";
    HALFSTEP_CHECK(changed.empty(), "this run was trained on other data: ", changed,
                   ". Put the data and its keys back to resume it, or start another run in a new --folder; "
                   "there, model.from = \"RUN/model\" starts from the weights of a finished run.");
  }

  /// What this rank's mean loss counts in the mean over ranks: where not every token is learned, one rank may
  /// have more of them than others. Nothing where no rank has any.
  std::optional<double> weight_of(const TokenBatch& part) const {
    if (!part.documents.defined()) return 1;
    const int64_t mine = learned_in(part);
    const at::Tensor all = at::full({1}, mine, at::kLong);
    ranks_.sum(all);
    const auto total = all.item<int64_t>();
    if (total == 0) return std::nullopt;
    return static_cast<double>(mine * ranks_.size()) / static_cast<double>(total);
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
  Ranks ranks_;
  std::optional<Path> tokenizer_path_;
  Tokenizer tokenizer_;
  std::map<std::string, std::string> companions_;  ///< what is written beside the model, by name
  std::shared_ptr<CausalLM> model_;
  std::optional<ChatTemplate> chat_;
  TokenSources sources_;
  std::optional<TokenBatches> batches_, held_out_;
  StateDict held_out_beginning_;  ///< every evaluation starts here
  int64_t training_tokens_ = 0, held_out_tokens_ = 0;
  TokenBatch batch_;
  std::optional<double> weight_;
};

}  // namespace

std::unique_ptr<Task> text_task(const RunConfig& config, const Path& tokens_folder, int64_t most_text_bytes,
                                const Ranks& ranks) {
  check_batch_divides(config, ranks);
  return std::make_unique<TextTask>(config, tokens_folder, most_text_bytes, ranks);
}

}  // namespace halfstep::train
