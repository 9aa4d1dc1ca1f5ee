#include "train/token_sources.h"

#include <halfstep/error.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>

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

bool is_token_file(const Path& path) { return path.extension() == ".bin" || path.extension() == ".tokens"; }

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

void encode(const Document& document, const Tokenizer& tokenizer, TokenFileWriter& out) {
  std::ifstream file(document.path, std::ios::binary);
  file.seekg(static_cast<std::streamoff>(document.begin));
  TokenStream stream(tokenizer);
  std::string part;
  std::vector<int32_t> ids;
  for (uint64_t at = document.begin; at < document.end; at += part.size()) {
    part.resize(std::min(kPartBytes, document.end - at));
    if (!file.read(part.data(), static_cast<std::streamsize>(part.size())))
      throw FileError(detail::concat(document.path.string(), ": cannot be read at byte ", at, ": ",
                                     std::strerror(errno), "."),
                      errno);
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

Path write_tokens(const std::vector<Document>& documents, const Tokenizer& tokenizer, const Path& path) {
  std::filesystem::create_directories(path.parent_path());
  const int64_t vocabulary = tokenizer.vocabulary_size();
  TokenFileWriter out(path, vocabulary <= int64_t{1} << 16 ? TokenFormat::Raw16 : TokenFormat::Raw32,
                      vocabulary);
  const std::optional<int32_t> end_of_text = tokenizer.id_of("<|endoftext|>");
  for (const Document& document : documents) {
    encode(document, tokenizer, out);
    if (end_of_text) out.append({&*end_of_text, 1});
  }
  out.commit();
  return path;
}

}  // namespace

TokenSources prepare_tokens(const RunConfig::Data& data, const Tokenizer& tokenizer, const Path& folder) {
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
  TokenSources sources{.train = train.token_files, .validation = validation.token_files};
  if (!train.documents.empty())
    sources.train.push_back(write_tokens(train.documents, tokenizer, folder / "train.tokens"));
  if (!validation.documents.empty())
    sources.validation.push_back(write_tokens(validation.documents, tokenizer, folder / "validation.tokens"));
  HALFSTEP_CHECK(!sources.train.empty(), "data.train: holds no text and no tokens.");
  return sources;
}

}  // namespace halfstep::train
