#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fstream>

#include "checkpoint/sweep/sweep.h"
#include "checkpoint_format/checkpoint_reader.h"
#include "checkpoint_format/step_folders.h"

namespace halfstep::testing {
namespace {

namespace fs = std::filesystem;

/// A file's bytes, to be changed where they lie.
class WritableFile {
 public:
  explicit WritableFile(const fs::path& path) : path_(path), size_(fs::file_size(path)) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    start_ = static_cast<unsigned char*>(::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    ::close(file);
    if (start_ == MAP_FAILED) throw std::runtime_error("cannot map " + path.string());
  }
  ~WritableFile() { ::munmap(start_, size_); }
  WritableFile(const WritableFile&) = delete;
  WritableFile& operator=(const WritableFile&) = delete;

  size_t size() const { return size_; }
  unsigned char& operator[](size_t i) { return start_[i]; }

 private:
  fs::path path_;
  size_t size_;
  unsigned char* start_;
};

std::string if_accepted(const fs::path& run) {
  return files::verify_checkpoint(run, 1).empty() ? "accepted" : "";
}

void flip_bits(const fs::path& run, const fs::path& path, int64_t stride, SweepResult& result) {
  WritableFile file(path);
  for (size_t bit = 0; bit < 8 * file.size(); bit += static_cast<size_t>(stride)) {
    const auto mask = static_cast<unsigned char>(1u << (bit % 8));
    file[bit / 8] ^= mask;
    result.add(path.filename().string() + ", bit " + std::to_string(bit), if_accepted(run));
    file[bit / 8] ^= mask;
  }
}

void cut_short(const fs::path& run, const fs::path& path, int64_t stride, SweepResult& result) {
  const size_t size = fs::file_size(path);
  // From the end, so that each is the one before cut once more.
  for (size_t cut = 1; cut <= size; cut += static_cast<size_t>(stride)) {
    fs::resize_file(path, size - cut);
    result.add(path.filename().string() + " cut to " + std::to_string(size - cut), if_accepted(run));
  }
}

}  // namespace

SweepResult sweep_damage(size_t checkpoint_bytes, int64_t stride) {
  SweepResult result;
  constexpr int kTensors = 16;
  // Sizes are even over [0, largest], so the 15 that are not empty have 5/4 of what is asked for between
  // them: room for chance.
  const ContentShape shape{.tensor_count = kTensors,
                           .largest_bytes = 5 * checkpoint_bytes / 2 / (kTensors - 1)};
  for (const std::string_view name : {files::kTensorsName, files::kManifestName}) {
    const ScratchFolder scratch;
    const fs::path run = scratch.path() / "run";
    files::CheckpointWriter(run, {.keep_last = 0}).save(Content(shape, 1).checkpoint());
    const fs::path path = run / files::step_name(1) / name;
    flip_bits(run, path, stride, result);
    if (const std::string fault = fault_of(run, shape, 1); !fault.empty()) result.add("put back", fault);
    cut_short(run, path, stride, result);
  }
  return result;
}

}  // namespace halfstep::testing
