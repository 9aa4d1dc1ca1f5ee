// Known models: GPT-2, Llama and its relatives from and to Hugging Face folders, and a ResNet-18.
//
//     halfstep::Llama model(halfstep::LlamaConfig{.hidden_size = 768}, /*seed=*/1);   // new weights
//     const auto qwen = halfstep::load_pretrained("Qwen3-0.6B");                      // any family
//     model->apply([](torch::nn::Module& module) { ... });
//
// Ordinary torch::nn::Modules in module holders, with Hugging Face's (torchvision's) parameter names:
// `apply`, `modules()`, `torch::save` and `torch::load` work. The models know nothing of precision: wrap them
// in MixedPrecision, or run them in an AutocastScope.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace halfstep {

/// For models whose parameters the caller fills: they are left uninitialized. On the meta device they have no
/// memory either.
struct Uninitialized {
  at::Device device = at::kCPU;
  at::ScalarType type = at::kFloat;
};

/// The sizes of a language model, under the same names for every family.
struct CausalLMShape {
  std::string family{};  ///< config.json's model_type
  int64_t vocabulary = 0;
  int64_t context = 0;  ///< the longest sequence that it was made for
  int64_t layers = 0;
  int64_t width = 0;
  int64_t heads = 0;
  int64_t key_value_heads = 0;
  int64_t head_size = 0;
  int64_t looked_up_weights = 0;  ///< elements of embeddings that are looked up and never multiplied
};

/// The keys and values of what a model has read, so that it can read on without reading that again.
class HALFSTEP_API KeyValueCache {
 public:
  KeyValueCache() = default;
  KeyValueCache(KeyValueCache&&) = default;
  KeyValueCache& operator=(KeyValueCache&&) = default;
  /// None: two texts that go on from one would write into the same memory.
  KeyValueCache(const KeyValueCache&) = delete;
  KeyValueCache& operator=(const KeyValueCache&) = delete;

  int64_t length() const { return layers_.empty() ? 0 : layers_.front().length; }  ///< tokens

  /// For models: appends those of a layer, [batch, heads, new tokens, head size], and returns all. Layers
  /// come in their order.
  std::pair<at::Tensor, at::Tensor> append(std::size_t layer, const at::Tensor& keys,
                                           const at::Tensor& values);

 private:
  struct Layer {
    at::Tensor keys, values;  // with room for more tokens
    int64_t length = 0;
  };
  std::vector<Layer> layers_;
};

/// For models: what the ids of a call stand behind and among.
struct Surroundings {
  KeyValueCache* cache = nullptr;  ///< of what was read before
  at::Tensor documents{};          ///< CausalLM::forward_packed's; undefined: one text a row
};

/// A model that gives each next token a logit.
class HALFSTEP_API CausalLM : public torch::nn::Module {
 public:
  /// Logits [batch, length, vocabulary] of ids [batch, length], int64.
  at::Tensor forward(const at::Tensor& ids) { return logits(ids, {}); }

  /// The same where a row holds several texts one behind the other: `documents`, int64 of the shape of `ids`,
  /// numbers them: a text begins where the number differs from the one before, and numbers may come again. A
  /// token sees its own text only, and the positions begin anew with each: the logits are those of the texts
  /// by themselves. Undefined: one text a row.
  at::Tensor forward_packed(const at::Tensor& ids, const at::Tensor& documents);

  /// The same of ids that follow those which the cache holds; it takes them in. For writing: call it without
  /// gradients, and in evaluation.
  at::Tensor read_on(const at::Tensor& ids, KeyValueCache& cache) { return logits(ids, {.cache = &cache}); }

  /// Mean cross-entropy of `targets`, of the shape of `ids`; those that are -100 do not count. Nothing is
  /// shifted: the target of ids[b, i] is targets[b, i], usually ids[b, i + 1]. `documents` as in
  /// forward_packed.
  at::Tensor loss(const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& documents = {});

  /// Its sizes.
  virtual CausalLMShape shape() const = 0;
  int64_t vocabulary() const { return shape().vocabulary; }

  /// Operations of forward and backward per token: two for each weight of a matrix product in forward and
  /// four in backward; attention over half of the sequence on average, whatever its window.
  double flops_per_token(int64_t sequence_length) const;

  /// Draws new weights, as the family's authors did. Depends on the seed alone.
  virtual void reset_parameters(uint64_t seed) = 0;

  /// The model's Hugging Face config.json, without the type of its weights.
  virtual std::string config_json() const = 0;

  /// Backward computes each block again instead of keeping what it computed: docs/memory.md. The gradients
  /// are the same.
  bool recompute_blocks = false;

 private:
  virtual at::Tensor logits(const at::Tensor& ids, const Surroundings& surroundings) = 0;
};

/// Fields of config.json, under its names. The defaults are GPT-2's with 124M parameters.
struct Gpt2Config {
  int64_t vocab_size = 50257;
  int64_t n_positions = 1024;  ///< the longest sequence
  int64_t n_embd = 768;        ///< width
  int64_t n_layer = 12;
  int64_t n_head = 12;
  std::optional<int64_t> n_inner{};  ///< width inside the feed-forward part; 4 * n_embd if not given
  std::string activation_function = "gelu_new";
  double resid_pdrop = 0.1, embd_pdrop = 0.1, attn_pdrop = 0.1;  ///< dropout, in training only
  double layer_norm_epsilon = 1e-5;
  double initializer_range = 0.02;               ///< standard deviation of new weights
  bool scale_attn_weights = true;                ///< divide attention logits by sqrt(head size)
  bool scale_attn_by_inverse_layer_idx = false;  ///< and by layer + 1
  bool tie_word_embeddings = true;
  std::string rest = "{}";  ///< what else config.json held: written again by save_pretrained
};

/// How fast each pair of a head's elements turns with the position.
struct RopeParameters {
  std::string rope_type = "default";  ///< default, linear, llama3
  double rope_theta = 10000;
  double factor = 1;  ///< linear, llama3: slow pairs turn this many times slower
  double low_freq_factor = 1, high_freq_factor = 4;  ///< llama3: which pairs are slow, and which are not
  int64_t original_max_position_embeddings = 8192;   ///< llama3: the context before it was stretched
};

/// Fields of config.json, under its names. The defaults are Hugging Face's: Llama's with 7B parameters.
struct LlamaConfig {
  int64_t vocab_size = 32000;
  int64_t hidden_size = 4096;
  int64_t intermediate_size = 11008;
  int64_t num_hidden_layers = 32;
  int64_t num_attention_heads = 32;
  std::optional<int64_t> num_key_value_heads{};  ///< as many as attention heads if not given
  std::optional<int64_t> head_dim{};             ///< hidden_size / num_attention_heads if not given
  int64_t max_position_embeddings = 2048;        ///< metadata only; longer sequences still work
  std::string hidden_act = "silu";
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  double attention_dropout = 0;
  RopeParameters rope{};
  bool attention_bias = false;
  bool mlp_bias = false;
  std::optional<int64_t>
      pad_token_id{};  ///< its embedding gets no gradient as an input; from the end if negative
  bool tie_word_embeddings = false;
  std::string rest = "{}";  ///< what else config.json held: written again by save_pretrained
};

/// GPT-2: learned positions, layer norm before each part, biases everywhere. Linear weights lie as Hugging
/// Face's Conv1D has them, [inputs, outputs].
class HALFSTEP_API Gpt2Impl : public CausalLM {
 public:
  Gpt2Impl(Gpt2Config config, uint64_t seed);
  Gpt2Impl(Gpt2Config config, Uninitialized uninitialized);

  CausalLMShape shape() const override;
  void reset_parameters(uint64_t seed) override;
  std::string config_json() const override;
  const Gpt2Config& config() const { return config_; }

 private:
  struct Transformer;
  at::Tensor logits(const at::Tensor& ids, const Surroundings& surroundings) override;
  Gpt2Config config_;
  std::shared_ptr<Transformer> transformer_;
  at::Tensor free_head_;
};
TORCH_MODULE(Gpt2);

/// Llama: rotary positions, RMS norm before each part, SwiGLU, several query heads per head of keys and
/// values.
class HALFSTEP_API LlamaImpl : public CausalLM {
 public:
  LlamaImpl(LlamaConfig config, uint64_t seed);
  LlamaImpl(LlamaConfig config, Uninitialized uninitialized);

  CausalLMShape shape() const override;
  void reset_parameters(uint64_t seed) override;
  std::string config_json() const override;
  const LlamaConfig& config() const { return config_; }

 private:
  struct Body;
  at::Tensor logits(const at::Tensor& ids, const Surroundings& surroundings) override;
  LlamaConfig config_;
  std::shared_ptr<Body> body_;
};
TORCH_MODULE(Llama);

/// Sizes from which every family can make a new model.
struct CausalLMSizes {
  int64_t vocabulary = 0;
  int64_t context = 0;
  int64_t layers = 0;
  int64_t width = 0;
  int64_t heads = 0;
  std::optional<int64_t> key_value_heads{};     ///< as many as heads if not given
  std::optional<int64_t> feed_forward_width{};  ///< the family's usual multiple of the width if not given
  double dropout = 0;
};

/// A config.json of these sizes, the family's defaults for all else: "gpt2", "llama" or a relative of it. An
/// Error lists the families.
HALFSTEP_API std::string config_json_of(const std::string& family, const CausalLMSizes& sizes);

/// A new model of any family from the text of a config.json, with weights drawn from the seed.
HALFSTEP_API std::shared_ptr<CausalLM> make_causal_lm(const std::string& config_json, uint64_t seed);

/// How load_pretrained makes a model.
struct LoadOptions {
  /// The parameters' type: FP32 is what mixed precision starts from. BF16 and FP16 files are widened, which
  /// is exact.
  at::ScalarType type = at::kFloat;
};

/// Opens a Hugging Face folder: config.json, and model.safetensors or its shards.
///
/// Every tensor of the files is asked for by the model and of its shape, in F32, BF16 or F16, and the
/// reverse; else an Error lists all that do not fit. Pickles (pytorch_model.bin) are not opened.
///
/// The model is in training mode, as every new module: dropout works until you call `eval()`.
HALFSTEP_API std::shared_ptr<CausalLM> load_pretrained(const std::filesystem::path& folder,
                                                       const LoadOptions& options = {});

/// Writes config.json and model.safetensors, durably, into a folder that is made if it is not there; each
/// file appears whole or not at all, the weights first. A tokenizer is not written.
HALFSTEP_API void save_pretrained(const CausalLM& model, const std::filesystem::path& folder);

/// How `generate` writes.
struct GenerateOptions {
  int64_t tokens = 64;       ///< to write
  double temperature = 0.8;  ///< 0: always the likeliest token
  int64_t top_k = 0;         ///< only so many of the likeliest tokens; 0: all
  double top_p = 1;          ///< only the likeliest tokens that have this probability together
  int64_t context = 0;       ///< how many of the last tokens the model is shown; 0: all
  uint64_t seed = 0;
  std::vector<int64_t> ends{};                   ///< tokens that end it; the last id returned is then one
  bool cache = true;                             ///< keep keys and values instead of reading all again
  std::function<void(int64_t id)> each_token{};  ///< told as they are written, but for an end
};

/// Goes on from `prompt` (at least one id) and returns the new ids. Deterministic by the seed alone:
/// LibTorch's own generators are not touched. From the token on that no longer fits into `context` the model
/// is run as a whole for each one. Call it inside MixedPrecision::forward for its precision.
HALFSTEP_API std::vector<int64_t> generate(CausalLM& model, const std::vector<int64_t>& prompt,
                                           const GenerateOptions& options = {});

/// Sizes of a ResNet-18.
struct ResNet18Options {
  int64_t classes = 1000;
  int64_t channels = 3;       ///< of the images
  bool small_images = false;  ///< about 32 x 32: a first convolution of 3 x 3 and no pooling behind it
};

/// ResNet-18 with torchvision's parameter and buffer names, new weights drawn as torchvision draws them.
class HALFSTEP_API ResNet18Impl : public torch::nn::Module {
 public:
  ResNet18Impl(ResNet18Options options, uint64_t seed);

  /// Logits [batch, classes] of images [batch, channels, height, width].
  at::Tensor forward(const at::Tensor& images);

 private:
  struct Layers;
  bool small_images_;
  std::shared_ptr<Layers> layers_;
};
TORCH_MODULE(ResNet18);

/// A model that is asked, not trained: no dropout and no autograd until the end of the block. Then each
/// submodule has its own mode again, which need not be that of the whole: a frozen part of a model that
/// trains is often in evaluation.
class EvaluationScope {
 public:
  explicit EvaluationScope(torch::nn::Module& model) : modes_{{&model, model.is_training()}} {
    for (const auto& module : model.modules(/*include_self=*/false)) {
      modes_.emplace_back(module.get(), module->is_training());
    }
    model.eval();
  }
  /// `train` speaks for all that a module holds; modules() lists a holder before what it holds.
  ~EvaluationScope() {
    for (const auto& [module, was_training] : modes_) module->train(was_training);
  }
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  at::NoGradGuard no_grad_;
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
};

}  // namespace halfstep
