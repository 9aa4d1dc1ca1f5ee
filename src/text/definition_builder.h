// A Definition from a vocabulary, its merges and its added tokens, each checked as it comes.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/definition.h"

namespace halfstep::text {

/// `where` begins every message: the path of the file.
class DefinitionBuilder {
 public:
  explicit DefinitionBuilder(std::string where) : where_(std::move(where)) {}

  /// As the file writes it: in GPT-2's alphabet of bytes. An id twice or out of range is refused.
  void add_to_vocabulary(const std::string& token, int64_t id);
  /// A merge that names no token is refused; one that stands twice, by `build`.
  void add_merge(std::string_view left, std::string_view right);
  void add_added_token(const std::string& content, int64_t id, bool normalized);

  bool has_every_byte() const;
  bool has(const std::string& token) const { return id_of_token_.contains(token); }

  /// The vocabulary, merges and added tokens; stages are the caller's.
  Definition build();

 private:
  int32_t id_in_vocabulary(std::string_view token, std::string_view of_what) const;
  void check_merges_differ() const;
  void set_bytes(int32_t id, std::string bytes);

  std::string where_;
  TextMap<int32_t> id_of_token_;
  std::vector<std::optional<std::string>> bytes_of_id_;
  std::vector<Merge> merges_;
  TextMap<int32_t> id_of_added_;
  int64_t last_added_ = -1;
  size_t added_bytes_ = 0;
  AddedTokens first_added_, second_added_;
};

}  // namespace halfstep::text
