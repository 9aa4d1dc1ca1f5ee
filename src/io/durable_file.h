// Files written so that they survive: whole, or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace halfstep::files {

/// The name of a folder, however its path is spelt: with a slash at the end, or as ".".
std::string folder_name(const std::filesystem::path& folder);

/// A new file, written from its beginning. An interrupted or short write is taken up again; every other
/// refusal of the operating system is a FileError, after which every call is an Error: the file is lost. What
/// was written is durable after `sync`; its name, after sync_folder.
class OutputFile {
 public:
  /// Refuses a name that exists, a link included.
  explicit OutputFile(std::filesystem::path path);
  /// Opens what stands under that name and is no regular file: see is_stream.
  static OutputFile into_stream(std::filesystem::path path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }
  /// Writes over bytes that were written before: a count in a header, known only at the end.
  void write_at(uint64_t offset, std::span<const std::byte> bytes);

  /// Puts the bytes on the disk, once. After a failure the file is lost: Linux may have dropped the pages
  /// that it could not write, and a second fsync would report success. Pipes and most devices cannot be
  /// synced: that is no failure.
  void sync();
  void close();

  const std::filesystem::path& path() const { return path_; }

 private:
  OutputFile(std::filesystem::path path, int file);
  [[noreturn]] void fail(std::string_view doing);
  void check_whole() const;

  std::filesystem::path path_;
  int file_ = -1;
  bool failed_ = false;
};

/// Whether the name leads to a device, a FIFO or a socket, or is a link to an open descriptor (/dev/stdout).
/// What is written goes into it: renaming a file over it would destroy it.
bool is_stream(const std::filesystem::path& path);

/// Written aside, synced, and renamed into place by `commit`. Until then what stood under that name stays as
/// it was; without `commit` nothing of the new file is left behind. Two processes that write one file each
/// have a name aside of their own: the last to commit wins, whole. A stream is written directly, and what is
/// written cannot be taken back.
class DurableFile {
 public:
  explicit DurableFile(const std::filesystem::path& path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(std::span<const std::byte> bytes) { file_.write(bytes); }

  /// Not for streams.
  void write_at(uint64_t offset, std::span<const std::byte> bytes) { file_.write_at(offset, bytes); }

  /// Bytes, name and folder are on the disk when this returns.
  void commit();

 private:
  std::filesystem::path path_;
  bool streamed_;
  OutputFile file_;
  bool renamed_ = false;
};

/// A DurableFile of one text.
void write_durably(const std::filesystem::path& path, std::string_view text);

/// Replaces a file at once, whole or not at all, without waiting for the disk: after a power cut the old one,
/// the new one or none may be there. For what is written often and can be missed.
void replace_file(const std::filesystem::path& path, std::string_view text);

/// Removes what processes that died left of files which they wrote aside: of the files of these names, or of
/// all in the folder. For whoever knows that nobody is writing them.
void remove_asides(const std::filesystem::path& folder, const std::vector<std::string>& names = {});

/// Makes the names in a folder durable.
void sync_folder(const std::filesystem::path& folder);

/// Makes a folder and those above it that are missing, durably. One that is there already is made durable as
/// well: whoever made it may have died before.
void make_folders(const std::filesystem::path& path);
void make_folder(const std::filesystem::path& path);

/// The folder of a path: "." for a bare name.
std::filesystem::path folder_of(const std::filesystem::path& path);

}  // namespace halfstep::files
