// The smallest tokenizer.json that has all the parts: 256 bytes, no merges, two added tokens.
#pragma once

#include <nlohmann/json.hpp>

#include "text/definition.h"

namespace halfstep::testing {

inline nlohmann::json small_tokenizer() {
  nlohmann::json vocabulary = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte)
    vocabulary[text::byte_characters()[static_cast<size_t>(byte)]] = byte;
  const auto added = [](const char* content, int id) {
    return nlohmann::json{{"id", id}, {"content", content}, {"special", true}, {"normalized", false}};
  };
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", {added("<end>", 256), added("<end>less", 257)}},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", nlohmann::json::array()}}}};
}

}  // namespace halfstep::testing
