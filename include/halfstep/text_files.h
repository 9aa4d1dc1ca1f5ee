// Text as people keep it: plain files, folders of them and JSON Lines, compressed with gzip or not. Knows no
// Torch.
#pragma once

#include <halfstep/chat_template.h>
#include <halfstep/config.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep {

/// What a line of a JSON Lines file holds.
enum class RecordKind : uint8_t {
  Text,      ///< "text", or the field that was asked for
  Prompt,    ///< "prompt" and "completion"
  Messages,  ///< "messages": a list of {"role", "content"}, some of them the assistant's
};

/// A line of a JSON Lines file, read; `kind` says which fields it has.
struct TextRecord {
  RecordKind kind = RecordKind::Text;
  std::string text{};
  std::string prompt{}, completion{};
  std::vector<ChatMessage> messages{};
};

/// Reads one line. An Error says what is wrong with it; whoever knows file and line puts them before it.
HALFSTEP_API TextRecord read_record(std::string_view line, const std::optional<std::string>& text_field);

/// A part of a file that is one text.
struct TextPart {
  uint64_t begin = 0, end = 0;  ///< bytes
  int64_t line = 0;             ///< from 1 on in JSON Lines; 0: not such a file
  uint64_t size() const { return end - begin; }
};

/// A file that was looked at: which texts it holds.
struct TextFile {
  std::filesystem::path path;               ///< to read it from
  std::string name;                         ///< to speak of it: the compressed file, where it was one
  std::optional<RecordKind> record_kind{};  ///< of JSON Lines: of its first line, and so of all
  std::vector<TextPart> parts{};            ///< none if it is empty
};

/// How look_at_text reads a file.
struct TextFileOptions {
  std::optional<std::string> text_field{};  ///< of JSON Lines: only this one; nothing: what is there
  /// The file that a compressed one is unpacked into; it stays there.
  std::filesystem::path unpack_to{};
};

/// The files of these names; of a folder every file in it that is not hidden, in the order of their names.
HALFSTEP_API std::vector<std::filesystem::path> files_in(const std::filesystem::path& name);

/// Looks at a file, at every line of it if it is JSON Lines (.jsonl, .ndjson). What is no text is refused,
/// and so is the first line that is no record of the kind of the first one.
HALFSTEP_API TextFile look_at_text(const std::filesystem::path& path, const TextFileOptions& options);

/// The bytes of a part, 1 MiB at a time.
HALFSTEP_API void read_text(const TextFile& file, const TextPart& part,
                            const std::function<void(std::string_view)>& take);
/// The record of a part of a JSON Lines file.
HALFSTEP_API TextRecord read_record(const TextFile& file, const TextPart& part,
                                    const std::optional<std::string>& text_field);

}  // namespace halfstep
