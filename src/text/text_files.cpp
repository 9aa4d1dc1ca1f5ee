#include <halfstep/error.h>
#include <halfstep/text_files.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "io/durable_file.h"
#include "io/json.h"
#include "words/names.h"

namespace halfstep {
namespace {

using Path = std::filesystem::path;
using Json = nlohmann::json;

// Read at a time: memory does not grow with the files.
constexpr std::size_t kPartBytes = std::size_t{1} << 20;
constexpr std::size_t kMostLineBytes = std::size_t{64} << 20;

std::string text_at(const Json& record, const char* name) {
  const auto found = record.find(name);
  HALFSTEP_CHECK(found != record.end() && found->is_string(), in_quotes(name),
                 found == record.end() ? " is missing." : " is not text.");
  return found->get<std::string>();
}

/// Refuses fields that the text would be without, so that something else would be learned than what was
/// meant. Null, an empty text or list and a weight of 1 say nothing.
void refuse_unread(const Json& fields, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    const auto found = fields.find(name);
    if (found == fields.end() || found->empty() || *found == "" || *found == 1) continue;
    throw Error(detail::concat(in_quotes(name),
                               " is not supported and would be lost. Remove the field, or render the "
                               "conversation yourself and give it as 'prompt' and 'completion'."));
  }
}

std::string content_of(const Json& message) {
  const auto found = message.find("content");
  HALFSTEP_CHECK(found == message.end() || !found->is_array(),
                 "'content' is a list. Join its text parts into one string; images and sound are not "
                 "supported.");
  HALFSTEP_CHECK(found == message.end() || !found->is_null(),
                 "'content' is null. Write \"\" for no text, or leave the record out.");
  return text_at(message, "content");
}

std::vector<ChatMessage> messages_of(const Json& list) {
  HALFSTEP_CHECK(list.is_array() && !list.empty(), "'messages' is not a list of messages.");
  std::vector<ChatMessage> messages;
  for (const Json& one : list) {
    const std::string which = detail::concat("message ", messages.size() + 1, ": ");
    HALFSTEP_CHECK(one.is_object(), which, "is not an object with 'role' and 'content'.");
    try {
      refuse_unread(one, {"tool_calls", "function_call", "reasoning_content", "thinking", "weight"});
      messages.push_back({.role = text_at(one, "role"), .content = content_of(one)});
    } catch (const Error& error) {
      throw Error(which + error.what());
    }
  }
  const auto is_answer = [](const ChatMessage& message) { return message.role == "assistant"; };
  HALFSTEP_CHECK(std::ranges::any_of(messages, is_answer),
                 "no message has the role 'assistant': there is nothing to learn.");
  return messages;
}

std::string names_of(const Json& record) {
  std::string names;
  for (const auto& [name, value] : record.items()) names += (names.empty() ? "" : ", ") + in_quotes(name);
  return names.empty() ? "none" : names;
}

/// The bytes of `path` from a place on, with errors that name it.
class Reader {
 public:
  explicit Reader(const Path& path, uint64_t from = 0) : path_(path), file_(path, std::ios::binary) {
    if (!file_) fail();
    file_.seekg(static_cast<std::streamoff>(from));
  }

  /// Exactly as many bytes.
  void read(std::string& into) {
    if (!file_.read(into.data(), static_cast<std::streamsize>(into.size()))) fail();
  }

  /// At most as many; what is returned is in `into`.
  std::string_view read_some(std::string& into) {
    file_.read(into.data(), static_cast<std::streamsize>(into.size()));
    if (file_.bad()) fail();
    return std::string_view(into).substr(0, static_cast<std::size_t>(file_.gcount()));
  }

 private:
  [[noreturn]] void fail() const {
    throw FileError(detail::concat(path_.string(), ": cannot be read: ", std::strerror(errno), "."), errno);
  }

  Path path_;
  std::ifstream file_;
};

bool is_gzip(const Path& path) {
  std::string mark(2, '\0');
  return Reader(path).read_some(mark) == "\x1f\x8b";
}

void unpack(const Path& from, const Path& to) {
  files::make_folders(to.parent_path());
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(from.c_str(), "rb"), gzclose);
  if (!in)
    throw FileError(detail::concat(from.string(), ": cannot be read: ", std::strerror(errno), "."), errno);
  files::DurableFile out(to);
  std::string part(kPartBytes, '\0');
  for (;;) {
    const int count = gzread(in.get(), part.data(), static_cast<unsigned>(part.size()));
    int fault = Z_OK;
    const char* const why = gzerror(in.get(), &fault);
    HALFSTEP_CHECK(count >= 0 && (fault == Z_OK || fault == Z_STREAM_END), from.string(),
                   ": cannot be unpacked: ", why, ". Was the file cut short?");
    if (count == 0) break;
    out.write(std::as_bytes(std::span(part.data(), static_cast<std::size_t>(count))));
  }
  out.commit();
}

/// The name without .gz decides what is in it.
bool is_json_lines(Path name) {
  if (name.extension() == ".gz") name = name.stem();
  return name.extension() == ".jsonl" || name.extension() == ".ndjson";
}

/// Its bytes would be trained all the same, and nobody would be told.
void check_is_text(const TextFile& file) {
  std::string beginning(std::size_t{64} << 10, '\0');
  const std::string_view read = Reader(file.path).read_some(beginning);
  const std::size_t zero = read.find('\0');
  HALFSTEP_CHECK(zero == read.npos, file.name, " is not text: its byte ", zero,
                 " is 0. Name text files, or a folder that has nothing else. A token file ends in .tokens or "
                 ".bin.");
}

const char* told(RecordKind kind) {
  switch (kind) {
    case RecordKind::Text:
      return "a text";
    case RecordKind::Prompt:
      return "a prompt and a completion";
    case RecordKind::Messages:
      return "messages";
  }
  HALFSTEP_BUG("no such kind of record: ", static_cast<int>(kind));
}

TextRecord read_line(const TextFile& file, int64_t line, std::string_view text,
                     const std::optional<std::string>& text_field) {
  try {
    return read_record(text, text_field);
  } catch (const Error& error) {
    throw Error(detail::concat(file.name, ", line ", line, ": ", error.what()));
  }
}

bool is_blank(std::string_view line) { return line.find_first_not_of(" \t\r") == line.npos; }

/// Adds a part for each line that is not blank.
void look_at_lines(TextFile& file, const std::optional<std::string>& text_field) {
  Reader reader(file.path);
  std::string part(kPartBytes, '\0'), line;
  uint64_t begin = 0;
  int64_t number = 0;
  const auto take_line = [&] {
    ++number;
    if (!is_blank(line)) {
      const RecordKind kind = read_line(file, number, line, text_field).kind;
      if (!file.record_kind) file.record_kind = kind;
      HALFSTEP_CHECK(kind == *file.record_kind, file.name, ", line ", number, ": holds ", told(kind),
                     ", and the lines before it hold ", told(*file.record_kind),
                     ". Put them into a file of their own.");
      file.parts.push_back({.begin = begin, .end = begin + line.size(), .line = number});
    }
    begin += line.size() + 1;
    line.clear();
  };
  for (std::string_view read; !(read = reader.read_some(part)).empty();) {
    for (std::size_t at = 0; at < read.size();) {
      const std::size_t end = std::min(read.find('\n', at), read.size());
      line.append(read, at, end - at);
      HALFSTEP_CHECK(line.size() <= kMostLineBytes, file.name, ", line ", number + 1, ": has more than ",
                     kMostLineBytes >> 20, " MiB.");
      if (end < read.size()) take_line();
      at = end + 1;
    }
  }
  if (!line.empty()) take_line();
}

}  // namespace

TextRecord read_record(std::string_view line, const std::optional<std::string>& text_field) {
  Json record = files::read_json(line, "JSON");
  HALFSTEP_CHECK(record.is_object(), "is not a JSON object: {\"text\": ...}.");
  if (text_field) return {.text = text_at(record, text_field->c_str())};
  if (record.contains("messages")) {
    refuse_unread(record, {"tools", "functions"});
    return {.kind = RecordKind::Messages, .messages = messages_of(record["messages"])};
  }
  if (record.contains("prompt") && record.contains("completion")) {
    TextRecord found{.kind = RecordKind::Prompt,
                     .prompt = text_at(record, "prompt"),
                     .completion = text_at(record, "completion")};
    HALFSTEP_CHECK(!found.completion.empty(), "'completion' is empty: there is nothing to learn.");
    return found;
  }
  HALFSTEP_CHECK(record.contains("text"), "has the fields ", names_of(record),
                 "; expected 'text', 'prompt' and 'completion', or 'messages'. Another field of text "
                 "is named with data.text_field in a configuration, or renamed: jq -c '{text: .NAME}'.");
  return {.text = text_at(record, "text")};
}

std::vector<Path> files_in(const Path& name) {
  if (!std::filesystem::is_directory(name)) return {name};
  std::vector<Path> files;
  auto entry = std::filesystem::recursive_directory_iterator(name);
  for (const auto end = std::filesystem::end(entry); entry != end; ++entry) {
    if (entry->path().filename().string().starts_with('.')) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      files.push_back(entry->path());
    }
  }
  std::ranges::sort(files);
  return files;
}

TextFile look_at_text(const Path& path, const TextFileOptions& options) {
  TextFile file{.path = path, .name = path.string()};
  if (is_gzip(path)) {
    unpack(path, options.unpack_to);
    file.path = options.unpack_to;
  }
  check_is_text(file);
  if (is_json_lines(path)) {
    look_at_lines(file, options.text_field);
  } else if (const uint64_t bytes = std::filesystem::file_size(file.path); bytes > 0) {
    file.parts.push_back({.begin = 0, .end = bytes});
  }
  return file;
}

void read_text(const TextFile& file, const TextPart& part,
               const std::function<void(std::string_view)>& take) {
  Reader reader(file.path, part.begin);
  std::string bytes;
  for (uint64_t at = part.begin; at < part.end; at += bytes.size()) {
    bytes.resize(std::min<uint64_t>(kPartBytes, part.end - at));
    reader.read(bytes);
    take(bytes);
  }
}

TextRecord read_record(const TextFile& file, const TextPart& part,
                       const std::optional<std::string>& text_field) {
  std::string line(part.size(), '\0');
  Reader(file.path, part.begin).read(line);
  return read_line(file, part.line, line, text_field);
}

}  // namespace halfstep
