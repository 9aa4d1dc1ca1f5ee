// An IDX array that is read has the elements that its shape says.
#include "data_files/idx.h"

#include "fuzz/fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halfstep;
  testing::read_or_refuse([&] {
    const files::IdxArray array = files::parse_idx(std::as_bytes(std::span(data, size)), "input");
    uint64_t bytes = files::bytes_of(array.type);
    for (const int64_t dimension : array.shape) bytes *= static_cast<uint64_t>(dimension);
    testing::require(array.elements.size() == bytes, "the shape tells the elements");
    const bool plain = size > 0 && data[0] == 0;
    testing::require(!plain || bytes + 4 + 4 * array.shape.size() == size, "the elements fill the file");
  });
  return 0;
}
