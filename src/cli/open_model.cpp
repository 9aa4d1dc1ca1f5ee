#include "cli/open_model.h"

#include <halfstep/error.h>

#include <algorithm>
#include <cctype>

#include "cli/commands.h"

namespace halfstep::cli {
namespace {

using Path = std::filesystem::path;

/// A run writes its tokenizer beside the model, unless that is bytes.
Tokenizer tokenizer_of(const Path& folder, int64_t vocabulary, bool is_of_run) {
  constexpr int64_t kBytes = 256;
  if (const Path file = folder / "tokenizer.json"; std::filesystem::exists(file)) {
    Tokenizer tokenizer = Tokenizer::from_file(file);
    HALFSTEP_CHECK(tokenizer.vocabulary_size() <= vocabulary, file.string(), " has ",
                   tokenizer.vocabulary_size(), " tokens, and the model knows ", vocabulary,
                   ": they do not belong together.");
    return tokenizer;
  }
  HALFSTEP_CHECK(vocabulary == kBytes || (is_of_run && vocabulary > kBytes), folder.string(),
                 " has no tokenizer.json, and its ", vocabulary, " tokens are not bytes.");
  return Tokenizer::bytes();
}

/// A run writes its model when it is done.
void refuse_without_model(const Path& folder) {
  const bool has_model = std::filesystem::exists(folder / "config.json");
  const bool is_run =
      std::filesystem::exists(folder / "config.toml") && std::filesystem::exists(folder / "checkpoints");
  HALFSTEP_CHECK(has_model || !is_run, folder.string(),
                 ": this run has no model yet; it writes one when it is done. Let it finish: halfstep train ",
                 (folder / "config.toml").string(), " --folder ", folder.string(),
                 ". The weights of a checkpoint alone: halfstep checkpoint export ", folder.string(),
                 " --full-precision -o weights.safetensors.");
}

Precision precision_called(const std::string& name) {
  for (const Precision& each : {Precision::fp32(), Precision::tf32(), Precision::bf16(), Precision::fp16(),
                                Precision::fp8_delayed(), Precision::fp8_current(), Precision::fp8_rowwise(),
                                Precision::fp8_block(), Precision::mxfp8(), Precision::nvfp4()}) {
    std::string known = each.name();
    std::ranges::transform(known, known.begin(), [](unsigned char c) { return std::tolower(c); });
    if (known == name) return each;
  }
  throw ExitWith(kUsage, "--precision: there is no '" + name +
                             "'. There are fp32, tf32, bf16, fp16, fp8-delayed, fp8-current, fp8-rowwise, "
                             "fp8-block, mxfp8, nvfp4.");
}

}  // namespace

OpenModel open_model(const std::string& given, const std::string& precision) {
  const Precision asked = precision_called(precision);
  const Path inside = Path(given) / "model";
  const bool is_of_run = std::filesystem::exists(inside / "config.json");
  const Path folder = is_of_run ? inside : Path(given);
  refuse_without_model(folder);
  const std::shared_ptr<CausalLM> model = load_pretrained(folder);
  return {.folder = folder,
          .model = model,
          .tokenizer = tokenizer_of(folder, model->vocabulary(), is_of_run),
          .precision = MixedPrecision(asked, *model, {.autocast = {.allow_emulated = true}})};
}

}  // namespace halfstep::cli
