// Runs a fuzz target over the files of the folders given: the seeds, without libFuzzer.
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "fuzz/fuzz_target.h"

int main(int argument_count, char** arguments) {
  int replayed = 0;
  for (int i = 1; i < argument_count; ++i) {
    for (const auto& file : std::filesystem::directory_iterator(arguments[i])) {
      std::ifstream stream(file.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
      std::printf("%s\n", file.path().filename().c_str());
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
      ++replayed;
    }
  }
  std::printf("%d inputs replayed\n", replayed);
  return replayed > 0 ? 0 : 1;
}
