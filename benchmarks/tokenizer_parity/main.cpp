// Halfstep's side of tools/tokenizer_parity: encodes texts, looks at what comes back, and measures.
//
//   tokenizer_parity TOKENIZER.json TEXTS IDS
//
// TEXTS and IDS hold one record a text: a 32-bit length and that many bytes, or ids. Then, for each line on
// the standard input, all texts are encoded once more and the seconds of CPU time printed.
#include <halfstep/error.h>
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "support/program.h"

namespace {

using Ids = std::vector<int32_t>;

std::vector<std::string> read_texts(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<std::string> texts;
  for (size_t at = 0; at < all.size();) {
    uint32_t bytes = 0;
    std::memcpy(&bytes, all.data() + at, sizeof bytes);
    texts.push_back(all.substr(at + sizeof bytes, bytes));
    at += sizeof bytes + bytes;
  }
  return texts;
}

/// The ids of a text that arrives in parts of 1 to 4,096 bytes.
Ids encode_in_parts(const halfstep::Tokenizer& tokenizer, std::string_view text, std::mt19937& random) {
  halfstep::TokenStream stream(tokenizer);
  Ids ids;
  while (!text.empty()) {
    const size_t longest = size_t{1} << (random() % 13);
    const size_t bytes = std::min<size_t>(text.size(), 1 + random() % longest);
    stream.feed(text.substr(0, bytes), ids);
    text.remove_prefix(bytes);
  }
  stream.finish(ids);
  return ids;
}

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int run(int argc, char** argv) {
  HALFSTEP_CHECK(argc == 4, "usage: tokenizer_parity TOKENIZER.json TEXTS IDS");
  const auto tokenizer =
      halfstep::Tokenizer::from_file(argv[1], {.missing_bytes = halfstep::MissingBytes::Drop});
  const std::vector<std::string> texts = read_texts(argv[2]);
  std::ofstream out(argv[3], std::ios::binary);
  std::mt19937 random(5);
  size_t came_back = 0, same_in_parts = 0;
  for (const std::string& text : texts) {
    const Ids ids = tokenizer.encode(text);
    const auto count = static_cast<uint32_t>(ids.size());
    out.write(reinterpret_cast<const char*>(&count), sizeof count);
    out.write(reinterpret_cast<const char*>(ids.data()),
              static_cast<std::streamsize>(ids.size() * sizeof ids[0]));
    came_back += tokenizer.decode(ids) == text;
    same_in_parts += encode_in_parts(tokenizer, text, random) == ids;
  }
  HALFSTEP_CHECK(out.flush(), argv[3], ": could not be written.");
  std::printf("{\"texts\": %zu, \"came_back\": %zu, \"same_in_parts\": %zu}\n", texts.size(), came_back,
              same_in_parts);
  std::fflush(stdout);
  Ids ids;
  for (std::string line; std::getline(std::cin, line);) {
    const double begin = cpu_seconds();
    for (const std::string& text : texts) {
      ids.clear();
      tokenizer.encode(text, ids);
    }
    std::printf("%.6f\n", cpu_seconds() - begin);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::exit_code_of(run, argc, argv); }
