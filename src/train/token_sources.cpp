#include "train/token_sources.h"

#include <halfstep/error.h>
#include <halfstep/text_files.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <fstream>
#include <span>

#include "io/durable_file.h"
#include "io/input_file.h"
#include "io/sha256.h"
#include "train/examples.h"
#include "words/numbers.h"

namespace halfstep::train {
namespace {

using Path = std::filesystem::path;

/// A text, or a part of one.
struct Document {
  const TextFile* file;
  TextPart part;
  uint64_t size() const { return part.size(); }
  bool is_record() const { return part.line > 0; }
};

struct Given {
  std::vector<Path> token_files;
  std::deque<TextFile> files;  // where they are they stay
  std::vector<Document> documents;
};

bool is_example(RecordKind kind) { return kind != RecordKind::Text; }

/// Whether the documents are examples. All of a run are of one sort: what is given is marked in one and not
/// in the other.
bool are_examples(const Given& given) {
  const TextFile* of_text = nullptr;
  const TextFile* of_examples = nullptr;
  for (const TextFile& file : given.files)
    if (!file.parts.empty())
      (file.record_kind && is_example(*file.record_kind) ? of_examples : of_text) = &file;
  HALFSTEP_CHECK(!of_text || !of_examples, of_examples->name, " holds examples and ", of_text->name,
                 " text. Train on one after the other.");
  return of_examples != nullptr;
}

Given sort_out(const RunConfig::Data& data, const std::vector<std::string>& names, std::string_view key,
               const Path& unpack_to) {
  Given given;
  for (const Path name : names) {
    const bool folder = std::filesystem::is_directory(name);
    for (const Path& path : files_in(name)) {
      if (is_token_file(path)) {
        HALFSTEP_CHECK(!folder, key, ": ", path.string(),
                       " is a token file inside a folder of text. Name token files themselves.");
        given.token_files.push_back(path);
        continue;
      }
      Path unpacked = unpack_to;
      unpacked += detail::concat("-", given.files.size());
      try {
        given.files.push_back(look_at_text(path, {.text_field = data.text_field, .unpack_to = unpacked}));
      } catch (const FileError&) {
        throw;
      } catch (const Error& error) {
        throw Error(detail::concat(key, ": ", error.what()));
      }
      for (const TextPart& part : given.files.back().parts)
        given.documents.push_back({&given.files.back(), part});
    }
  }
  return given;
}

/// The end of the largest text, or the last record.
std::vector<Document> hold_out_an_end(std::vector<Document>& documents, double fraction) {
  uint64_t all_bytes = 0;
  Document* largest = nullptr;
  for (Document& document : documents) {
    all_bytes += document.size();
    if (!document.is_record() && (!largest || document.size() > largest->size())) largest = &document;
  }
  if (largest) {
    const auto wanted = static_cast<uint64_t>(static_cast<double>(all_bytes) * fraction);
    if (wanted == 0) return {};
    Document held = *largest;
    // It has more: it was not small enough to be held out itself.
    held.part.begin = largest->part.end -= wanted;
    return {held};
  }
  if (documents.size() < 2) return {};
  const Document last = documents.back();
  documents.pop_back();
  return {last};
}

/// Moves the share of `documents` that is held out into a list of its own.
std::vector<Document> hold_out(std::vector<Document>& documents, double fraction) {
  std::vector<Document> held, kept;
  uint64_t seen_bytes = 0, held_bytes = 0;
  for (const Document& document : documents) {
    seen_bytes += document.size();
    const bool hold =
        static_cast<double>(held_bytes + document.size()) <= fraction * static_cast<double>(seen_bytes);
    if (hold) held_bytes += document.size();
    (hold ? held : kept).push_back(document);
  }
  if (held.empty()) return hold_out_an_end(documents, fraction);
  documents = std::move(kept);
  return held;
}

/// A record is whole or not there. Whether something was left out.
bool cut_to(std::vector<Document>& documents, uint64_t bytes) {
  std::vector<Document> kept;
  bool is_cut = false;
  for (Document document : documents) {
    if (bytes == 0) break;
    const uint64_t taken = std::min(document.size(), bytes);
    if (!document.is_record()) {
      is_cut = is_cut || taken < document.size();
      document.part.end = document.part.begin + taken;
    }
    bytes -= taken;
    kept.push_back(document);
  }
  is_cut = is_cut || kept.size() < documents.size();
  documents = std::move(kept);
  return is_cut;
}

std::string file_hash(const Path& path) {
  const files::MappedFile file(path);
  return files::sha256_of(file.bytes());
}

/// With the name of the file before what the tokenizer or the template says of it.
template <typename Function>
auto about(const Document& document, Function function) {
  try {
    return function();
  } catch (const FileError&) {
    throw;
  } catch (const Error& error) {
    const std::string line = document.is_record() ? detail::concat(", line ", document.part.line) : "";
    throw Error(detail::concat(document.file->name, line, ": ", error.what()));
  }
}

void encode(const Document& document, const Tokenizer& tokenizer,
            const std::optional<std::string>& text_field, TokenFileWriter& out) {
  TokenStream stream(tokenizer);
  std::vector<int32_t> ids;
  const auto feed = [&](std::string_view text) {
    about(document, [&] { stream.feed(text, ids); });
    out.append(ids);
    ids.clear();
  };
  if (document.is_record()) {
    feed(read_record(*document.file, document.part, text_field).text);
  } else {
    read_text(*document.file, document.part, feed);
  }
  stream.finish(ids);
  out.append(ids);
}

/// Of the text of all documents and of what makes ids of it. Hashing is many times as fast as encoding.
std::string source_hash(const std::vector<Document>& documents, const std::string& made_by) {
  files::Sha256 hash;
  const auto take = [&](std::string_view text) { hash.update(std::as_bytes(std::span(text))); };
  take(made_by);
  for (const Document& document : documents) {
    take(detail::concat("\n", document.size(), "\n"));
    read_text(*document.file, document.part, take);
  }
  return hash.finish();
}

/// A token file that is there and whole.
struct Made {
  std::string source;  ///< source_hash
  std::string hash;    ///< of the file
  std::string told;    ///< for people
};

std::optional<Made> made_before(const Path& path, const Path& stamp) {
  std::ifstream file(stamp);
  Made made;
  if (!(file >> made.source >> made.hash)) return std::nullopt;
  std::getline(file >> std::ws, made.told);
  std::error_code unknown;
  if (!std::filesystem::is_regular_file(path, unknown) || file_hash(path) != made.hash) return std::nullopt;
  return made;
}

struct Maker {
  const RunConfig::Data& data;
  const Tokenizer& tokenizer;
  const TokenOptions& options;

  std::optional<int32_t> end_of_text() const { return tokenizer.id_of("<|endoftext|>"); }

  /// All that decides about the ids beside the documents.
  std::string description(bool examples) const {
    std::string text =
        detail::concat("halfstep tokens 1\n", options.tokenizer_text.size(), "\n", options.tokenizer_text);
    if (data.text_field) text += detail::concat("\nfield ", *data.text_field);
    if (examples)
      text += detail::concat("\nexamples 1\n", data.sequence_length, "\n", options.end.value_or(-1), "\n",
                             options.chat_text.size(), "\n", options.chat_text);
    return text;
  }

  void write_texts(const std::vector<Document>& documents, const Path& path) const {
    const int64_t vocabulary = tokenizer.vocabulary_size();
    TokenFileWriter out(path, vocabulary <= int64_t{1} << 16 ? TokenFormat::Raw16 : TokenFormat::Raw32,
                        vocabulary);
    const std::optional<int32_t> end = end_of_text();
    for (const Document& document : documents) {
      encode(document, tokenizer, data.text_field, out);
      if (end) out.append({&*end, 1});
    }
    out.commit();
  }

  std::string write_examples(const std::vector<Document>& documents, const Path& path) const {
    const ExampleReader reader{
        .tokenizer = tokenizer, .chat = options.chat, .end = options.end ? options.end : end_of_text()};
    TokenFileWriter out(path, TokenFormat::Marked32, tokenizer.vocabulary_size());
    ExamplePacker packer(out, data.sequence_length, reader.end.value_or(0));
    for (const Document& document : documents)
      packer.add(about(document, [&] {
        return reader.read(read_record(*document.file, document.part, data.text_field));
      }));
    HALFSTEP_CHECK(packer.examples() > 0 || packer.too_long() > 0, documents.front().file->name, ": none of ",
                   documents.size(),
                   " examples has a token to learn. Leave out those whose answers are empty.");
    HALFSTEP_CHECK(packer.examples() > 0, documents.front().file->name, ": none of ", documents.size(),
                   " examples has anything left to learn in ", data.sequence_length,
                   " tokens: their prompts are longer. Raise data.sequence_length.");
    packer.finish();
    out.commit();
    const double filled = static_cast<double>(packer.fillers()) /
                          static_cast<double>(packer.sequences() * data.sequence_length);
    std::string told =
        detail::concat(counted(packer.examples(), "example"), " in ", counted(packer.sequences(), "sequence"),
                       ", ", std::lround(100 * filled), "% filler");
    if (packer.cut() > 0) told += detail::concat(", ", with_commas(packer.cut()), " cut");
    if (packer.too_long() > 0)
      told += detail::concat(", ", with_commas(packer.too_long()), " left out: too long a prompt");
    if (packer.nothing_to_learn() > 0)
      told += detail::concat(", ", with_commas(packer.nothing_to_learn()), " left out: nothing to learn");
    return told;
  }

  /// What is to be told of it. If `aside` is given, a whole file that is there stays: the new one is made
  /// there, and must be the same.
  std::string write(const std::vector<Document>& documents, bool examples, const Path& path,
                    const std::optional<Path>& aside = {}) const {
    files::make_folders(path.parent_path());
    Path stamp = path;
    stamp += ".source";
    const std::string source = source_hash(documents, description(examples));
    const std::optional<Made> before = made_before(path, stamp);
    if (before && before->source == source) return before->told;
    const Path& to = before && aside ? *aside : path;
    files::make_folders(to.parent_path());
    std::string told;
    if (examples) {
      told = write_examples(documents, to);
    } else {
      write_texts(documents, to);
    }
    const std::string hash = file_hash(to);
    HALFSTEP_CHECK(
        to == path || hash == before->hash, path.string(),
        ": this run was trained on other data than data.train, data.tokenizer and "
        "data.sequence_length give now; the file is left as it was. Put the data and its keys back to "
        "resume the run, or start another one in a new --folder.");
    files::write_durably(stamp, source + "\n" + hash + "\n" + told + "\n");
    return told;
  }
};

/// Unpacked texts are no longer needed when their tokens are written.
class Unpacked {
 public:
  explicit Unpacked(Path folder) : folder_(std::move(folder)) {}
  ~Unpacked() {
    std::error_code left;
    std::filesystem::remove_all(folder_, left);
  }
  Unpacked(const Unpacked&) = delete;
  Unpacked& operator=(const Unpacked&) = delete;
  Path of(const char* which) const { return folder_ / which; }

 private:
  Path folder_;
};

}  // namespace

bool is_token_file(const Path& path) { return path.extension() == ".bin" || path.extension() == ".tokens"; }

/// What another process has made of the same configuration.
static TokenSources made_tokens(const RunConfig::Data& data, const Path& folder) {
  TokenSources sources;
  const auto take = [&](const std::vector<std::string>& names, const Path& made, std::vector<Path>& into) {
    for (const std::string& name : names)
      if (is_token_file(name)) into.push_back(name);
    if (std::filesystem::exists(made)) into.push_back(made);
  };
  take(data.train, folder / "train.tokens", sources.train);
  take(data.validation, folder / "validation.tokens", sources.validation);
  return sources;
}

TokenSources prepare_tokens(const RunConfig::Data& data, const Tokenizer& tokenizer, const Path& folder,
                            const TokenOptions& options) {
  if (options.only_read) return made_tokens(data, folder);
  const Unpacked unpacked(folder / "unpacked");
  Given train = sort_out(data, data.train, "data.train", unpacked.of("train"));
  Given validation = sort_out(data, data.validation, "data.validation", unpacked.of("validation"));
  HALFSTEP_CHECK(data.validation.empty() || !validation.documents.empty() || !validation.token_files.empty(),
                 "data.validation: holds no text and no tokens.");
  const bool examples = are_examples(train), held_out_examples = are_examples(validation);
  if (data.validation_fraction) {
    HALFSTEP_CHECK(
        train.token_files.empty(), "data.validation_fraction: ", train.token_files.front().string(),
        " is a token file, of which no part can be held out. Name another file in data.validation.");
    validation.documents = hold_out(train.documents, *data.validation_fraction);
    uint64_t bytes = 0;
    for (const Document& document : train.documents) bytes += document.size();
    HALFSTEP_CHECK(!validation.documents.empty(), "data.validation_fraction: ", *data.validation_fraction,
                   " of ", train.documents.size(), train.documents.size() == 1 ? " document" : " documents",
                   " with ", bytes,
                   " bytes in all is nothing. Give more text in data.train, raise the fraction, or "
                   "name files in data.validation.");
  }
  TokenSources sources{.train = train.token_files, .validation = validation.token_files};
  if (options.most_text_bytes > 0)
    for (auto* documents : {&train.documents, &validation.documents})
      if (cut_to(*documents, static_cast<uint64_t>(options.most_text_bytes)))
        sources.only = detail::concat("the first ", options.most_text_bytes >> 20, " MiB of text");
  const Maker maker{data, tokenizer, options};
  if (!train.documents.empty()) {
    const Path path = folder / "train.tokens";
    sources.examples =
        maker.write(train.documents, examples, path,
                    options.has_checkpoints ? std::optional(unpacked.of("train.tokens")) : std::nullopt);
    sources.train.push_back(path);
  }
  if (!validation.documents.empty()) {
    const Path path = folder / "validation.tokens";
    sources.held_out_examples =
        maker.write(validation.documents, data.validation_fraction ? examples : held_out_examples, path);
    sources.validation.push_back(path);
  }
  HALFSTEP_CHECK(!sources.train.empty(), "data.train: holds no text and no tokens.");
  return sources;
}

}  // namespace halfstep::train
