#include <halfstep/error.h>
#include <halfstep/token_file.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "io/durable_file.h"
#include "io/input_file.h"

namespace halfstep {
namespace {

constexpr size_t kLlmcHeaderWords = 256;
constexpr size_t kLlmcHeaderBytes = kLlmcHeaderWords * sizeof(int32_t);

struct LlmcMark {
  TokenFormat format;
  int32_t magic;
  int32_t version;
};

// The first two from llm.c's dev/data/data_common.py.
constexpr LlmcMark kLlmcMarks[] = {{TokenFormat::Llmc16, 20240520, 1},
                                   {TokenFormat::Llmc32, 20240801, 7},
                                   {TokenFormat::Marked32, 20261118, 1}};

// The marks of a token, above its id.
constexpr uint32_t kBeginsText = uint32_t{1} << 31, kIsGiven = uint32_t{1} << 30;
constexpr uint32_t kId = kIsGiven - 1;

constexpr const LlmcMark* mark_of(TokenFormat format) {
  for (const LlmcMark& mark : kLlmcMarks)
    if (mark.format == format) return &mark;
  return nullptr;
}

constexpr size_t kBlockTokens = 4096;

int32_t word_at(std::span<const std::byte> bytes, size_t word) {
  int32_t value = 0;
  std::memcpy(&value, bytes.data() + word * sizeof value, sizeof value);
  return value;
}

TokenFormat format_of(std::span<const std::byte> bytes, const TokenFileOptions& options) {
  if (options.format) return *options.format;
  if (bytes.size() >= kLlmcHeaderBytes)
    for (const LlmcMark& mark : kLlmcMarks)
      if (word_at(bytes, 0) == mark.magic && word_at(bytes, 1) == mark.version) return mark.format;
  return options.vocabulary_size <= int64_t{1} << 16 ? TokenFormat::Raw16 : TokenFormat::Raw32;
}

// Where the ids begin. A header that does not fit its file is refused.
size_t check_header(std::span<const std::byte> bytes, TokenFormat format, const std::string& path) {
  const LlmcMark* const mark = mark_of(format);
  const auto width = static_cast<size_t>(bytes_per_token(format));
  if (mark == nullptr) {
    HALFSTEP_CHECK(bytes.size() % width == 0, path, ": ", bytes.size(),
                   " bytes are no whole number of ids of ", width,
                   " bytes. Is it a file of another format, or cut short?");
    return 0;
  }
  HALFSTEP_CHECK(bytes.size() >= kLlmcHeaderBytes, path, ": ", bytes.size(),
                 " bytes; llm.c's header alone has ", kLlmcHeaderBytes, ".");
  HALFSTEP_CHECK(word_at(bytes, 0) == mark->magic && word_at(bytes, 1) == mark->version, path,
                 ": begins with ", word_at(bytes, 0), ", version ", word_at(bytes, 1), "; ",
                 to_string(format), " begins with ", mark->magic, ", version ", mark->version, ".");
  const int64_t told = word_at(bytes, 2);
  const uint64_t there = (bytes.size() - kLlmcHeaderBytes) / width;
  HALFSTEP_CHECK(
      told >= 0 && static_cast<uint64_t>(told) == there && (bytes.size() - kLlmcHeaderBytes) % width == 0,
      path, ": the header declares ", told, " ids, but ", bytes.size() - kLlmcHeaderBytes,
      " bytes follow it, ", there, " ids. Was the file cut short?");
  return kLlmcHeaderBytes;
}

// The first id at or above `limit`, or the count. Blocks are asked as a whole, which the compiler turns into
// vectors; only a block with a fault is looked through.
template <typename Id>
size_t first_outside(const std::byte* ids, size_t count, uint64_t limit, Id id_bits) {
  if (limit > id_bits) return count;
  std::array<Id, kBlockTokens> block;
  for (size_t at = 0; at < count; at += kBlockTokens) {
    const size_t here = std::min(kBlockTokens, count - at);
    std::memcpy(block.data(), ids + at * sizeof(Id), here * sizeof(Id));
    Id largest = 0;
    for (size_t i = 0; i < here; ++i) largest = std::max<Id>(largest, block[i] & id_bits);
    if (largest < limit) continue;
    for (size_t i = 0; i < here; ++i)
      if ((block[i] & id_bits) >= limit) return at + i;
  }
  return count;
}

template <typename Id>
void widen(const std::byte* from, std::span<int64_t> ids, Id id_bits) {
  for (size_t i = 0; i < ids.size(); ++i) {
    Id id = 0;
    std::memcpy(&id, from + i * sizeof(Id), sizeof(Id));
    ids[i] = id & id_bits;
  }
}

}  // namespace

std::string_view to_string(TokenFormat format) {
  switch (format) {
    case TokenFormat::Raw16:
      return "raw16";
    case TokenFormat::Raw32:
      return "raw32";
    case TokenFormat::Llmc16:
      return "llmc16";
    case TokenFormat::Llmc32:
      return "llmc32";
    case TokenFormat::Marked32:
      return "marked32";
  }
  HALFSTEP_BUG("no such token format: ", static_cast<int>(format));
}

int bytes_per_token(TokenFormat format) {
  return format == TokenFormat::Raw16 || format == TokenFormat::Llmc16 ? 2 : 4;
}

struct TokenFile::State {
  std::filesystem::path path;
  files::MappedFile file;
  int64_t vocabulary_size;
  TokenFormat format;
  size_t begin;  // of the ids, in bytes
  size_t count;

  State(const std::filesystem::path& at, const TokenFileOptions& options)
      : path(at),
        file(at),
        vocabulary_size(options.vocabulary_size),
        format(format_of(file.bytes(), options)),
        begin(check_header(file.bytes(), format, at.string())),
        count((file.bytes().size() - begin) / static_cast<size_t>(bytes_per_token(format))) {}

  const std::byte* at(size_t id) const {
    return file.bytes().data() + begin + id * static_cast<size_t>(bytes_per_token(format));
  }

  uint32_t id_bits() const { return format == TokenFormat::Marked32 ? kId : ~uint32_t{0}; }

  void copy(size_t first, std::span<int64_t> ids) const {
    bytes_per_token(format) == 2 ? widen<uint16_t>(at(first), ids, 0xFFFF)
                                 : widen<uint32_t>(at(first), ids, id_bits());
  }

  void check_all() const {
    const auto limit = static_cast<uint64_t>(vocabulary_size);
    const size_t good = bytes_per_token(format) == 2
                            ? first_outside<uint16_t>(at(0), count, limit, 0xFFFF)
                            : first_outside<uint32_t>(at(0), count, limit, id_bits());
    if (good == count) return;
    int64_t id = 0;
    copy(good, {&id, 1});
    refuse(good, id);
  }

  [[noreturn]] void refuse(size_t place, int64_t id) const {
    detail::throw_error(
        detail::concat(path.string(), ": token ", place, " (byte ", at(place) - file.bytes().data(), ") is ",
                       id, ", outside the vocabulary of ", vocabulary_size, ". Was the file (read as ",
                       to_string(format), ") made with another tokenizer or in another format?"));
  }
};

TokenFile::TokenFile(const std::filesystem::path& path, const TokenFileOptions& options) {
  HALFSTEP_CHECK(options.vocabulary_size > 0, path.string(), ": TokenFileOptions::vocabulary_size is ",
                 options.vocabulary_size, "; give the rows of the model's embedding.");
  state_ = std::make_unique<const State>(path, options);
  if (options.check == TokenCheck::AtOpen) state_->check_all();
}

TokenFile::~TokenFile() = default;
TokenFile::TokenFile(TokenFile&&) noexcept = default;
TokenFile& TokenFile::operator=(TokenFile&&) noexcept = default;

int64_t TokenFile::size() const { return static_cast<int64_t>(state_->count); }
TokenFormat TokenFile::format() const { return state_->format; }
const std::filesystem::path& TokenFile::path() const { return state_->path; }

uint64_t TokenFile::digest() const {
  // Four words at a time: as fast as memory. The order counts, and so does the count.
  constexpr uint64_t kOdd = 0x9E3779B97F4A7C15, kOther = 0xC2B2AE3D27D4EB4F;
  std::array<uint64_t, 4> lanes = {kOdd, kOther, ~kOdd, ~kOther};
  const size_t bytes = state_->count * static_cast<size_t>(bytes_per_token(state_->format));
  const std::byte* const ids = state_->at(0);
  const auto mix = [&](size_t lane, uint64_t word) {
    lanes[lane] = std::rotl(lanes[lane] ^ (word * kOdd), 29) * kOther;
  };
  std::array<uint64_t, 4> words{};
  size_t at = 0;
  for (; at + sizeof words <= bytes; at += sizeof words) {
    std::memcpy(words.data(), ids + at, sizeof words);
    for (size_t lane = 0; lane < words.size(); ++lane) mix(lane, words[lane]);
  }
  words = {};
  if (at < bytes) std::memcpy(words.data(), ids + at, bytes - at);
  for (size_t lane = 0; lane < words.size(); ++lane) mix(lane, words[lane] ^ bytes);
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all = std::rotl(all ^ lane, 31) * kOdd;
  return all ^ (all >> 32);
}

void TokenFile::read(int64_t first, std::span<int64_t> ids) const {
  HALFSTEP_CHECK(first >= 0 && first <= size() && ids.size() <= static_cast<size_t>(size() - first),
                 state_->path.string(), ": ", ids.size(), " tokens from ", first, " on were asked for, of ",
                 size(), ".");
  state_->file.check_not_cut();
  // The copy is compared, not the file: another process may write into that between two looks.
  state_->copy(static_cast<size_t>(first), ids);
  int64_t largest = 0;  // of all, which the compiler turns into vectors; the culprit is looked for only then
  for (const int64_t id : ids) largest = std::max(largest, id);
  if (largest < state_->vocabulary_size) return;
  const auto outside = [&](int64_t id) { return id >= state_->vocabulary_size; };
  const auto found = std::ranges::find_if(ids, outside);
  state_->refuse(static_cast<size_t>(first) + static_cast<size_t>(found - ids.begin()), *found);
}

void TokenFile::read(int64_t first, std::span<int64_t> ids, std::span<TokenMarks> marks) const {
  HALFSTEP_CHECK(format() == TokenFormat::Marked32, state_->path.string(), ": is read as ",
                 to_string(format()), ", which has no marks.");
  HALFSTEP_CHECK(ids.size() == marks.size(), state_->path.string(), ": room for ", ids.size(), " ids and ",
                 marks.size(), " marks.");
  read(first, ids);
  for (size_t i = 0; i < marks.size(); ++i) {
    uint32_t word = 0;
    std::memcpy(&word, state_->at(static_cast<size_t>(first) + i), sizeof word);
    marks[i] = {.begins_text = (word & kBeginsText) != 0, .is_given = (word & kIsGiven) != 0};
  }
}

struct TokenFileWriter::State {
  std::filesystem::path path;
  TokenFormat format;
  int64_t vocabulary_size;
  files::DurableFile file;
  int64_t count = 0;

  /// Once to make room for it, once when the count is known.
  void write_header() {
    const LlmcMark* const mark = mark_of(format);
    if (mark == nullptr) return;
    const std::array<int32_t, kLlmcHeaderWords> words = {mark->magic, mark->version,
                                                         static_cast<int32_t>(count)};
    const auto bytes = std::as_bytes(std::span(words));
    count == 0 ? file.write(bytes) : file.write_at(0, bytes);
  }

  /// That these may follow.
  void check(std::span<const int32_t> ids) const {
    for (size_t i = 0; i < ids.size(); ++i)
      HALFSTEP_CHECK(ids[i] >= 0 && ids[i] < vocabulary_size, path.string(), ": token ",
                     count + static_cast<int64_t>(i), " is ", ids[i], ", outside the vocabulary of ",
                     vocabulary_size, ".");
    HALFSTEP_CHECK(
        mark_of(format) == nullptr || count + std::ssize(ids) <= std::numeric_limits<int32_t>::max(),
        path.string(), ": the header counts at most ", std::numeric_limits<int32_t>::max(),
        " ids. Write several files, or raw16 or raw32.");
  }
};

namespace {

// Before the file is opened: opening a pipe waits for its reader.
void check_writable(const std::filesystem::path& path, TokenFormat format, int64_t vocabulary_size) {
  const int64_t most = bytes_per_token(format) == 2      ? int64_t{1} << 16
                       : format == TokenFormat::Marked32 ? int64_t{1} << 30
                                                         : int64_t{1} << 31;
  HALFSTEP_CHECK(vocabulary_size > 0 && vocabulary_size <= most, path.string(), ": a vocabulary of ",
                 vocabulary_size, " does not fit into ", to_string(format), ", whose ids have ",
                 8 * bytes_per_token(format), " bits. Use raw32 or llmc32.");
  HALFSTEP_CHECK(
      mark_of(format) == nullptr || !files::is_stream(path), path.string(),
      ": is a pipe or a device, and llm.c's header counts the ids that follow it, which is known only "
      "at the end. Write a regular file, or raw16 or raw32.");
}

}  // namespace

TokenFileWriter::TokenFileWriter(const std::filesystem::path& path, TokenFormat format,
                                 int64_t vocabulary_size) {
  check_writable(path, format, vocabulary_size);
  state_.reset(new State{
      .path = path, .format = format, .vocabulary_size = vocabulary_size, .file = files::DurableFile(path)});
  state_->write_header();
}

TokenFileWriter::~TokenFileWriter() = default;
TokenFileWriter::TokenFileWriter(TokenFileWriter&&) noexcept = default;
TokenFileWriter& TokenFileWriter::operator=(TokenFileWriter&&) noexcept = default;

int64_t TokenFileWriter::size() const { return state_->count; }

void TokenFileWriter::append(std::span<const int32_t> ids, std::span<const TokenMarks> marks) {
  HALFSTEP_CHECK(state_->format == TokenFormat::Marked32, state_->path.string(), ": ",
                 to_string(state_->format), " has no marks.");
  HALFSTEP_CHECK(ids.size() == marks.size(), state_->path.string(), ": ", ids.size(), " ids and ",
                 marks.size(), " marks.");
  state_->check(ids);
  std::vector<uint32_t> words(ids.begin(), ids.end());
  for (size_t i = 0; i < words.size(); ++i)
    words[i] |= (marks[i].begins_text ? kBeginsText : 0) | (marks[i].is_given ? kIsGiven : 0);
  state_->file.write(std::as_bytes(std::span(words)));
  state_->count += std::ssize(ids);
}

void TokenFileWriter::append(std::span<const int32_t> ids) {
  state_->check(ids);
  if (bytes_per_token(state_->format) == 4) {
    state_->file.write(std::as_bytes(ids));
  } else {
    const std::vector<uint16_t> narrow(ids.begin(), ids.end());
    state_->file.write(std::as_bytes(std::span(narrow)));
  }
  state_->count += std::ssize(ids);
}

void TokenFileWriter::commit() {
  if (state_->count > 0) state_->write_header();
  state_->file.commit();
}

}  // namespace halfstep
