// A model that is asked and not trained, for the commands that do so.
#pragma once

#include <halfstep/mixed_precision.h>
#include <halfstep/models.h>
#include <halfstep/tokenizer.h>

#include <filesystem>
#include <memory>
#include <string>

namespace halfstep::cli {

struct OpenModel {
  std::filesystem::path folder;
  std::shared_ptr<CausalLM> model;
  Tokenizer tokenizer;
  MixedPrecision precision;
};

/// `given` is a Hugging Face folder, or that of a run, which stands for the model that it wrote; `precision`
/// is a word of precision.compute.
OpenModel open_model(const std::string& given, const std::string& precision);

}  // namespace halfstep::cli
