// `halfstep evaluate`: what a model makes of text.
#include <ATen/ops/empty.h>
#include <halfstep/error.h>
#include <halfstep/printable.h>
#include <halfstep/text_files.h>

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/number_checks.h"
#include "cli/open_model.h"

namespace halfstep::cli {
namespace {

using Path = std::filesystem::path;

struct EvaluateRequest {
  std::string model, precision = "fp32";
  std::vector<std::string> data;
  int64_t sequence_length = 0;  // the model's own, up to kMostTokens
  int64_t batch_size = 4;
  bool json = false;
};

constexpr int64_t kMostTokens = 1024;
constexpr double kMostOfOption = 1e9;

/// What a text costs the model.
struct Score {
  std::string name;
  int64_t bytes = 0;   // of the predicted tokens
  int64_t tokens = 0;  // that were predicted
  double nats = 0;     // of all of them

  double loss() const { return nats / static_cast<double>(tokens); }
  double bits_per_byte() const { return nats / std::log(2.0) / static_cast<double>(bytes); }
};

/// A folder that is gone afterwards.
class Scratch {
 public:
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "halfstep-evaluate-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr)
      throw FileError(name + ": cannot be made: " + std::strerror(errno) + ".", errno);
    folder_ = name;
  }
  ~Scratch() {
    std::error_code left;
    std::filesystem::remove_all(folder_, left);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Path operator/(const char* name) const { return folder_ / name; }

 private:
  Path folder_;
};

std::string text_of(const TextFile& file, const TextPart& part) {
  if (part.line == 0) {
    std::string text;
    read_text(file, part, [&](std::string_view read) { text += read; });
    return text;
  }
  HALFSTEP_CHECK(
      file.record_kind == RecordKind::Text, file.name,
      " holds examples with answers, and only texts are evaluated. The loss of the answers is what "
      "'halfstep train' reports with data.validation and train.evaluate_every. To evaluate prompts "
      "and completions as texts: jq -c '{text: (.prompt + .completion)}'.");
  return read_record(file, part, std::nullopt).text;
}

/// The first token is not predicted, so its bytes do not count: in short texts they are a large share.
int64_t predicted_bytes(const Tokenizer& tokenizer, const std::string& text,
                        const std::vector<int32_t>& ids) {
  if (ids.size() < 2) return 0;
  const auto first = static_cast<int64_t>(tokenizer.decode({ids.data(), 1}).size());
  return std::max<int64_t>(0, static_cast<int64_t>(text.size()) - first);
}

/// One pass over `ids` in stretches of `length` tokens, of which each but the first one of all is predicted
/// from those before it in its stretch.
void add_stretches(CausalLM& model, MixedPrecision& precision, const std::vector<int32_t>& ids,
                   int64_t length, int64_t batch_size, Score& score) {
  const auto predicted = static_cast<int64_t>(ids.size()) - 1;
  for (int64_t at = 0; at < predicted;) {
    const int64_t width = std::min(length, predicted - at);
    const int64_t rows = std::clamp<int64_t>((predicted - at) / width, 1, batch_size);
    at::Tensor inputs = at::empty({rows, width}, at::kLong), targets = at::empty({rows, width}, at::kLong);
    for (int64_t i = 0; i < rows * width; ++i) {
      inputs.mutable_data_ptr<int64_t>()[i] = ids[static_cast<std::size_t>(at + i)];
      targets.mutable_data_ptr<int64_t>()[i] = ids[static_cast<std::size_t>(at + i + 1)];
    }
    const double mean =
        precision.forward([&] { return model.loss(inputs, targets); }).to(at::kFloat).item<double>();
    score.nats += mean * static_cast<double>(rows * width);
    score.tokens += rows * width;
    at += rows * width;
  }
}

void print(const EvaluateRequest& request, const std::vector<Score>& scores, const Score& total) {
  const auto json_of = [](const Score& score) {
    return nlohmann::ordered_json{{"bytes", score.bytes},
                                  {"tokens", score.tokens},
                                  {"loss", score.loss()},
                                  {"perplexity", std::exp(score.loss())},
                                  {"bits_per_byte", score.bits_per_byte()}};
  };
  if (request.json) {
    nlohmann::ordered_json answer = json_of(total);
    for (const Score& score : scores) answer["files"][score.name] = json_of(score);
    return print_answer(answer);
  }
  std::cout << "    loss  perplexity  bits/byte      tokens\n" << std::fixed;
  const auto line = [](const Score& score) {
    std::cout << std::setprecision(4) << std::setw(8) << score.loss() << std::setw(12)
              << std::exp(score.loss()) << std::setw(11) << score.bits_per_byte() << std::setw(12)
              << score.tokens << "  " << printable(score.name, Unprintable::Replaced) << "\n";
  };
  if (scores.size() > 1)
    for (const Score& score : scores) line(score);
  line(total);
}

void evaluate(const EvaluateRequest& request) {
  OpenModel opened = open_model(request.model, request.precision);
  CausalLM& model = *opened.model;
  const int64_t context = model.shape().context;
  const int64_t length =
      request.sequence_length > 0 ? request.sequence_length : std::min(context, kMostTokens);
  if (length > context)
    throw ExitWith(kUsage, "--sequence-length is " + std::to_string(length) +
                               ", and the model was made for " + std::to_string(context) + " tokens.");
  const EvaluationScope asked(model);
  std::vector<Score> scores;
  Score total{.name = "all"};
  const Scratch scratch;
  std::vector<Path> paths;
  for (const std::string& name : request.data) std::ranges::copy(files_in(name), std::back_inserter(paths));
  for (const Path& path : paths) {
    const TextFile file = look_at_text(path, {.unpack_to = scratch / "unpacked"});
    Score score{.name = path.string()};
    for (const TextPart& part : file.parts) {
      const std::string text = text_of(file, part);
      const std::vector<int32_t> ids = opened.tokenizer.encode(text);
      score.bytes += predicted_bytes(opened.tokenizer, text, ids);
      add_stretches(model, opened.precision, ids, length, request.batch_size, score);
    }
    if (score.tokens == 0) continue;  // of one token nothing is predicted
    total.bytes += score.bytes;
    total.tokens += score.tokens;
    total.nats += score.nats;
    scores.push_back(std::move(score));
  }
  HALFSTEP_CHECK(!scores.empty(), "no file has two tokens: there is nothing to predict.");
  print(request, scores, total);
}

}  // namespace

void add_evaluate(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("evaluate", "The loss and perplexity of a model on text");
  auto request = std::make_shared<EvaluateRequest>();
  command->add_option("MODEL", request->model, std::string("A Hugging Face folder, or the folder of a run"))
      ->required()
      ->type_name("DIR");
  command->add_option("DATA", request->data, std::string("Text, JSON Lines, or folders of them; gzip too"))
      ->required()
      ->type_name("FILE");
  command->add_option("--precision", request->precision, std::string("fp32, bf16, mxfp8, ..."))
      ->type_name("NAME")
      ->capture_default_str();
  const CLI::Validator one_or_more = number_from(1, kMostOfOption, "a whole number of 1 or more");
  command
      ->add_option("--sequence-length", request->sequence_length,
                   std::string("Tokens seen together; 1024 or the model's if not given"))
      ->type_name("N")
      ->check(one_or_more);
  command->add_option("--batch-size", request->batch_size, std::string("Stretches per batch"))
      ->type_name("N")
      ->check(one_or_more)
      ->capture_default_str();
  command->add_flag("--json", request->json, std::string("As JSON"));
  command->footer(
      "Each text is read in stretches of that length; every token but the first is\n"
      "predicted from those before it in its stretch. A line of JSON Lines is a text.\n"
      "Bits per byte are of the bytes of the predicted tokens.");
  command->callback([request] { about_files([&] { evaluate(*request); }); });
}

}  // namespace halfstep::cli
