// A manifest that is read can be written and read again as it is; its tensors tile the file. The input is the
// body alone: the seal is put behind it here, for a fuzzer does not guess a SHA-256. Inputs that begin with
// 'R' are a real number's text instead.
#include "checkpoint_format/manifest.h"

#include <algorithm>
#include <bit>

#include "fuzz/fuzz_target.h"

namespace {

using namespace halfstep;

void read_real(std::string_view text) {
  testing::read_or_refuse([&] {
    const double value = files::parse_real(text, "input");
    const double again = files::parse_real(files::to_text(value), "written again");
    testing::require(std::bit_cast<uint64_t>(value) == std::bit_cast<uint64_t>(again),
                     "a real number comes back");
  });
}

void expect_tiled(const files::Manifest& manifest) {
  uint64_t sum = 0;
  for (const auto& part : manifest.parts) {
    for (const auto& tensor : part.tensors) {
      testing::require(tensor.begin <= tensor.end && tensor.end <= manifest.file.data_bytes,
                       "within the file");
      testing::require(tensor.strides.empty() || tensor.strides.size() == tensor.shape.size(),
                       "a stride each");
      sum += tensor.end - tensor.begin;
    }
  }
  testing::require(sum == manifest.file.data_bytes, "every byte is a tensor's");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input = testing::text_of(data, size);
  testing::read_or_refuse([&] { files::parse_manifest(input, "not sealed"); });
  if (input.starts_with('R')) {
    read_real(input.substr(1));
    return 0;
  }
  files::Manifest manifest;
  bool read = false;
  testing::read_or_refuse([&] {
    manifest = files::parse_manifest(files::sealed(input), "input");
    read = true;
  });
  if (!read) return 0;
  expect_tiled(manifest);
  const std::string text = files::to_text(manifest);
  testing::require(files::to_text(files::parse_manifest(text, "written again")) == text,
                   "a manifest comes back");
  return 0;
}
