#include "train/token_sources.h"

#include <halfstep/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <span>

#include "io/durable_file.h"
#include "io/input_file.h"
#include "io/sha256.h"

namespace halfstep::train {
namespace {

using Path = std::filesystem::path;

// Read, encoded and written at a time: memory does not grow with the files.
constexpr uint64_t kPartBytes = uint64_t{1} << 20;

/// A text file, or a part of one.
struct Document {
  Path path;
  uint64_t begin = 0, end = 0;  ///< bytes
  uint64_t size() const { return end - begin; }
};

bool is_hidden(const Path& path) { return path.filename().string().starts_with('.'); }

std::vector<Path> files_below(const Path& folder) {
  std::vector<Path> files;
  auto entry = std::filesystem::recursive_directory_iterator(folder);
  for (const auto end = std::filesystem::end(entry); entry != end; ++entry) {
    if (is_hidden(entry->path())) {
      entry.disable_recursion_pending();
    } else if (entry->is_regular_file()) {
      files.push_back(entry->path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Its bytes would be trained all the same, and nobody would be told.
void check_is_text(const Path& path, std::string_view key) {
  std::string beginning(size_t{64} << 10, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(beginning.data(), static_cast<std::streamsize>(beginning.size()));
  beginning.resize(static_cast<size_t>(file.gcount()));
  HALFSTEP_CHECK(!beginning.starts_with("\x1f\x8b"), key, ": ", path.string(),
                 " is compressed. Unpack it: gunzip.");
  const size_t zero = beginning.find('\0');
  HALFSTEP_CHECK(zero == beginning.npos, key, ": ", path.string(), " is not text: its byte ", zero,
                 " is 0. Name text files, or a folder that has nothing else. A token file ends in .tokens or "
                 ".bin.");
  HALFSTEP_CHECK(
      path.extension() != ".jsonl", key, ": ", path.string(),
      " is JSON Lines, and would be trained with its names and quotes. Take the text out of it: jq -r "
      ".text.");
}

struct Given {
  std::vector<Path> token_files;
  std::vector<Document> documents;
};

Given sort_out(const std::vector<std::string>& names, std::string_view key) {
  Given given;
  for (const Path name : names) {
    const bool folder = std::filesystem::is_directory(name);
    for (const Path& path : folder ? files_below(name) : std::vector<Path>{name}) {
      if (is_token_file(path)) {
        HALFSTEP_CHECK(!folder, key, ": ", path.string(),
                       " is a token file inside a folder of text. Name token files themselves.");
        given.token_files.push_back(path);
      } else if (const uint64_t bytes = std::filesystem::file_size(path); bytes > 0) {
        check_is_text(path, key);
        given.documents.push_back({path, 0, bytes});
      }
    }
  }
  return given;
}

/// Moves the share of `documents` that is held out into a list of its own.
std::vector<Document> hold_out(std::vector<Document>& documents, double fraction) {
  std::vector<Document> held;
  if (documents.size() == 1) {
    Document& whole = documents.front();
    const auto cut = whole.end - static_cast<uint64_t>(static_cast<double>(whole.size()) * fraction);
    held.push_back({whole.path, cut, whole.end});
    whole.end = cut;
    return held;
  }
  std::vector<Document> kept;
  uint64_t seen_bytes = 0, held_bytes = 0;
  for (const Document& document : documents) {
    seen_bytes += document.size();
    const bool hold =
        static_cast<double>(held_bytes + document.size()) <= fraction * static_cast<double>(seen_bytes);
    if (hold) held_bytes += document.size();
    (hold ? held : kept).push_back(document);
  }
  documents = std::move(kept);
  return held;
}

void read_part(std::ifstream& file, const Document& document, uint64_t at, std::string& into) {
  if (!file.read(into.data(), static_cast<std::streamsize>(into.size())))
    throw FileError(detail::concat(document.path.string(), ": cannot be read at byte ", at, ": ",
                                   std::strerror(errno), "."),
                    errno);
}

void cut_to(std::vector<Document>& documents, uint64_t bytes) {
  std::vector<Document> kept;
  for (Document document : documents) {
    if (bytes == 0) break;
    document.end = document.begin + std::min(document.size(), bytes);
    bytes -= document.size();
    kept.push_back(document);
  }
  documents = std::move(kept);
}

std::string file_hash(const Path& path) {
  const files::MappedFile file(path);
  return files::sha256_of(file.bytes());
}

void encode(const Document& document, const Tokenizer& tokenizer, TokenFileWriter& out) {
  std::ifstream file(document.path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(document.begin));
  TokenStream stream(tokenizer);
  std::string part;
  std::vector<int32_t> ids;
  for (uint64_t at = document.begin; at < document.end; at += part.size()) {
    part.resize(std::min(kPartBytes, document.end - at));
    read_part(file, document, at, part);
    try {
      stream.feed(part, ids);
    } catch (const FileError&) {
      throw;
    } catch (const Error& error) {
      throw Error(detail::concat(document.path.string(), ": ", error.what()));
    }
    out.append(ids);
    ids.clear();
  }
  stream.finish(ids);
  out.append(ids);
}

/// Of the text of all documents and of what makes ids of it. Hashing is many times as fast as encoding.
std::string source_hash(const std::vector<Document>& documents, const std::string& tokenizer_text) {
  files::Sha256 hash;
  const auto take = [&](std::string_view text) { hash.update(std::as_bytes(std::span(text))); };
  take(detail::concat("halfstep tokens 1\n", tokenizer_text.size(), "\n", tokenizer_text));
  std::string part;
  for (const Document& document : documents) {
    take(detail::concat("\n", document.size(), "\n"));
    std::ifstream file(document.path, std::ios::binary);
    file.seekg(static_cast<std::streamoff>(document.begin));
    for (uint64_t at = document.begin; at < document.end; at += part.size()) {
      part.resize(std::min(kPartBytes, document.end - at));
      read_part(file, document, at, part);
      take(part);
    }
  }
  return hash.finish();
}

/// The token file that was made of the same text before, if it is there and whole.
bool is_made_already(const Path& path, const Path& stamp, const std::string& source) {
  std::ifstream file(stamp);
  std::string from, made;
  if (!(file >> from >> made) || from != source) return false;
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown)) return false;
  return file_hash(path) == made;
}

Path write_tokens(const std::vector<Document>& documents, const Tokenizer& tokenizer,
                  const std::string& tokenizer_text, const Path& path) {
  files::make_folders(path.parent_path());
  Path stamp = path;
  stamp += ".source";
  const std::string source = source_hash(documents, tokenizer_text);
  if (is_made_already(path, stamp, source)) return path;
  const int64_t vocabulary = tokenizer.vocabulary_size();
  TokenFileWriter out(path, vocabulary <= int64_t{1} << 16 ? TokenFormat::Raw16 : TokenFormat::Raw32,
                      vocabulary);
  const std::optional<int32_t> end_of_text = tokenizer.id_of("<|endoftext|>");
  for (const Document& document : documents) {
    encode(document, tokenizer, out);
    if (end_of_text) out.append({&*end_of_text, 1});
  }
  out.commit();
  files::write_durably(stamp, source + "\n" + file_hash(path) + "\n");
  return path;
}

}  // namespace

bool is_token_file(const Path& path) { return path.extension() == ".bin" || path.extension() == ".tokens"; }

TokenSources prepare_tokens(const RunConfig::Data& data, const Tokenizer& tokenizer, const Path& folder,
                            const TokenOptions& options) {
  Given train = sort_out(data.train, "data.train"), validation = sort_out(data.validation, "data.validation");
  if (data.validation_fraction) {
    HALFSTEP_CHECK(
        train.token_files.empty(), "data.validation_fraction: ", train.token_files.front().string(),
        " is a token file, of which no part can be held out. Name another file in data.validation.");
    validation.documents = hold_out(train.documents, *data.validation_fraction);
    HALFSTEP_CHECK(!validation.documents.empty(), "data.validation_fraction: ", *data.validation_fraction,
                   " of ", train.documents.size(),
                   " documents is less than any of them. Raise it, or name files in data.validation.");
  }
  if (options.most_text_bytes > 0)
    for (auto* documents : {&train.documents, &validation.documents})
      cut_to(*documents, static_cast<uint64_t>(options.most_text_bytes));
  TokenSources sources{.train = train.token_files, .validation = validation.token_files};
  if (!train.documents.empty())
    sources.train.push_back(
        write_tokens(train.documents, tokenizer, options.tokenizer_text, folder / "train.tokens"));
  if (!validation.documents.empty())
    sources.validation.push_back(
        write_tokens(validation.documents, tokenizer, options.tokenizer_text, folder / "validation.tokens"));
  HALFSTEP_CHECK(!sources.train.empty(), "data.train: holds no text and no tokens.");
  return sources;
}

}  // namespace halfstep::train
