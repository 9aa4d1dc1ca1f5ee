#include "checkpoint/content.h"

#include <halfstep/error.h>

#include <algorithm>
#include <random>

#include "checkpoint_format/checkpoint_reader.h"

namespace halfstep::testing {

namespace fs = std::filesystem;

Content::Content(ContentShape shape, int64_t step) {
  std::mt19937_64 random(shape.seed * 1'000'003 + static_cast<uint64_t>(step));
  files::PartToSave model{.name = "model"}, optimizer{.name = "optimizer"};
  optimizer.scalars = {{"steps", step}, {"lr", 1.0 / static_cast<double>(step + 3)}, {"kind", "adamw"}};
  for (int i = 0; i < shape.tensor_count; ++i) {
    const size_t size = i == 0 ? 0 : random() % (shape.largest_bytes + 1);  // the first one is empty
    auto& bytes = bytes_.emplace_back(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    (i % 2 == 0 ? model : optimizer)
        .tensors.push_back({.tensor = {.name = detail::concat("t", i),
                                       .type = TensorType::U8,
                                       .shape = {static_cast<int64_t>(size)},
                                       .bytes = bytes}});
  }
  checkpoint_ = {.step = step, .fingerprint = {{"halfstep", "test"}}, .parts = {model, optimizer}};
}

std::string fault_of(const fs::path& run, ContentShape shape, int64_t step) {
  const Content expected(shape, step);
  try {
    const files::CheckpointReader reader(run, step);
    const auto& parts = reader.manifest().parts;
    if (parts.size() != expected.checkpoint().parts.size()) return "another number of parts";
    for (size_t p = 0; p < parts.size(); ++p) {
      const files::PartToSave& part = expected.checkpoint().parts[p];
      if (parts[p].name != part.name || parts[p].scalars != part.scalars ||
          parts[p].tensors.size() != part.tensors.size())
        return "part '" + part.name + "' differs";
      for (size_t t = 0; t < part.tensors.size(); ++t) {
        std::vector<std::byte> bytes(parts[p].tensors[t].end - parts[p].tensors[t].begin);
        reader.read(parts[p], parts[p].tensors[t], bytes);
        const auto& wanted = part.tensors[t].tensor.bytes;
        if (!std::equal(bytes.begin(), bytes.end(), wanted.begin(), wanted.end()))
          return "tensor '" + part.tensors[t].tensor.name + "' differs";
      }
    }
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace halfstep::testing
