// A token file that is opened has the tokens that its length says, all of them of the vocabulary.
#include <halfstep/token_file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "fuzz/fuzz_target.h"

// The first byte chooses the format, the next two the vocabulary; the rest is the file.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace halfstep;
  constexpr size_t kChoices = 3;
  if (size < kChoices) return 0;
  static const int file = memfd_create("tokens", 0);
  static const std::string path = "/proc/self/fd/" + std::to_string(file);
  const size_t bytes = size - kChoices;
  testing::require(
      ftruncate(file, 0) == 0 && pwrite(file, data + kChoices, bytes, 0) == static_cast<ssize_t>(bytes),
      "the input is in a file");
  TokenFileOptions options{.vocabulary_size = data[1] << 8 | data[2],
                           .check = data[0] & 8 ? TokenCheck::OnRead : TokenCheck::AtOpen};
  if (data[0] & 4) options.format = static_cast<TokenFormat>(data[0] & 3);
  testing::read_or_refuse([&] {
    const TokenFile tokens(path, options);
    const bool header = tokens.format() == TokenFormat::Llmc16 || tokens.format() == TokenFormat::Llmc32;
    testing::require(
        static_cast<size_t>(tokens.size()) * static_cast<size_t>(bytes_per_token(tokens.format())) +
                (header ? 1024 : 0) ==
            bytes,
        "the tokens fill the file");
    std::vector<int64_t> ids(static_cast<size_t>(tokens.size()), -1);
    tokens.read(0, ids);
    for (const int64_t id : ids)
      testing::require(id >= 0 && id < options.vocabulary_size, "ids are of the vocabulary");
  });
  return 0;
}
