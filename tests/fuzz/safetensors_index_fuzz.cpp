// An index that is read names only files beside it, and written again gives the same index.
#include <filesystem>

#include "fuzz/fuzz_target.h"
#include "safetensors/safetensors_index.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halfstep;
  files::SafetensorsIndex index;
  bool read = false;
  testing::read_or_refuse([&] {
    index = files::parse_safetensors_index(testing::text_of(data, size), "input");
    read = true;
  });
  if (!read) return 0;
  const std::filesystem::path folder = "/folder";
  for (const std::string& name : index.file_names()) {
    const std::filesystem::path path = folder / name;
    testing::require(path.parent_path() == folder && path.lexically_normal() == path,
                     "a shard is beside its index");
    testing::require(path.native().size() == folder.native().size() + 1 + name.size(), "no NUL cuts a name");
  }
  const auto again = files::parse_safetensors_index(files::safetensors_index_text(index, 0), "written again");
  testing::require(again.file_of == index.file_of, "the index comes back");
  return 0;
}
