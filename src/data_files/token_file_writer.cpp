#include <halfstep/error.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "io/durable_file.h"
#include "data_files/token_file.h"

namespace halfstep {

struct TokenFileWriter::State {
  std::filesystem::path path;
  TokenFormat format;
  int64_t vocabulary_size;
  files::DurableFile file;
  int64_t count = 0;

  /// Once to make room for it, once when the count is known.
  void write_header() {
    const files::LlmcMark* const mark = files::mark_of(format);
    if (mark == nullptr) return;
    const std::array<int32_t, files::kLlmcHeaderWords> words = {mark->magic, mark->version,
                                                                static_cast<int32_t>(count)};
    const auto bytes = std::as_bytes(std::span(words));
    count == 0 ? file.write(bytes) : file.write_at(0, bytes);
  }
};

namespace {

// Before the file is opened: opening a pipe waits for its reader.
void check_writable(const std::filesystem::path& path, TokenFormat format, int64_t vocabulary_size) {
  const int64_t most = bytes_per_token(format) == 2 ? int64_t{1} << 16 : int64_t{1} << 31;
  HALFSTEP_CHECK(vocabulary_size > 0 && vocabulary_size <= most, path.string(), ": a vocabulary of ",
                 vocabulary_size, " does not fit into ", to_string(format), ", whose ids have ",
                 8 * bytes_per_token(format), " bits. Use raw32 or llmc32.");
  HALFSTEP_CHECK(
      files::mark_of(format) == nullptr || !files::is_stream(path), path.string(),
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

void TokenFileWriter::append(std::span<const int32_t> ids) {
  for (size_t i = 0; i < ids.size(); ++i)
    HALFSTEP_CHECK(ids[i] >= 0 && ids[i] < state_->vocabulary_size, state_->path.string(), ": token ",
                   state_->count + static_cast<int64_t>(i), " is ", ids[i], ", outside the vocabulary of ",
                   state_->vocabulary_size, ".");
  const int64_t count = state_->count + static_cast<int64_t>(ids.size());
  HALFSTEP_CHECK(files::mark_of(state_->format) == nullptr || count <= std::numeric_limits<int32_t>::max(),
                 state_->path.string(), ": llm.c's header counts at most ",
                 std::numeric_limits<int32_t>::max(), " ids. Write several files, or raw16 or raw32.");
  if (bytes_per_token(state_->format) == 4) {
    state_->file.write(std::as_bytes(ids));
  } else {
    const std::vector<uint16_t> narrow(ids.begin(), ids.end());
    state_->file.write(std::as_bytes(std::span(narrow)));
  }
  state_->count = count;
}

void TokenFileWriter::commit() {
  if (state_->count > 0) state_->write_header();
  state_->file.commit();
}

}  // namespace halfstep
