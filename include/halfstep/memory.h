// Memory of CPU tensors: an allocator that counts what each part of training holds, and keeps what is freed.
//
//     halfstep::install_cpu_allocator();           // first thing in main
//     { halfstep::MemoryClassScope activations(halfstep::MemoryClass::Activation); loss = forward(batch); }
//     const auto report = halfstep::memory_report();
//     report.at_peak[halfstep::MemoryClass::Activation];
//
// docs/memory.md says what it buys and what it costs. Every function here may be called from any thread.
#pragma once

#include <halfstep/config.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace at {
class Tensor;
}

namespace halfstep {

/// What a block of memory is for.
enum class MemoryClass : std::uint8_t {
  Working,     ///< parameters as the model uses them
  Master,      ///< their FP32 originals, or the bits that the working copy lacks
  Gradient,    ///< what backward makes, of parameters and of activations on the way; sums of micro-batches
  Moments,     ///< the optimizer's state
  Activation,  ///< what forward makes, and makes again for backward
  CastCache,   ///< casts of parameters inside an AutocastScope
  Other,       ///< untagged
};
inline constexpr std::size_t kMemoryClassCount = 7;

/// "working", "master", ...
HALFSTEP_API const char* name_of(MemoryClass memory_class);

/// Tags what this thread allocates until the end of the block; the innermost scope counts. Backward on
/// another thread inherits it, as everything that at::ThreadLocalState carries.
///
/// Cheap (docs/memory.md), and without effect unless the allocator is installed. A tag belongs to the block:
/// views and in-place results keep it. Scopes end in the reverse of the order in which they began.
class HALFSTEP_API MemoryClassScope {
 public:
  explicit MemoryClassScope(MemoryClass memory_class);
  ~MemoryClassScope();
  MemoryClassScope(const MemoryClassScope&) = delete;
  MemoryClassScope& operator=(const MemoryClassScope&) = delete;

 private:
  std::shared_ptr<void> outer_;  // LibTorch's thread-local debug info, as it was
};

/// Bytes by class. Bytes are those that LibTorch asked for: a tensor's elements times their size, without
/// rounding or headers, so that a sum over tensors is exact.
struct MemoryAmounts {
  std::array<std::size_t, kMemoryClassCount> by_class{};
  std::size_t total = 0;

  std::size_t operator[](MemoryClass c) const { return by_class[static_cast<std::size_t>(c)]; }
  friend bool operator==(const MemoryAmounts&, const MemoryAmounts&) = default;
};

/// What the allocator has counted, in bytes.
struct MemoryReport {
  MemoryAmounts live;         ///< now
  MemoryAmounts at_peak;      ///< when the total was highest: a consistent breakdown
  MemoryAmounts class_peaks;  ///< each class at its own highest; `total` as in at_peak
  std::size_t live_blocks = 0;
  std::size_t allocations = 0;  ///< since the allocator was installed
  std::size_t kept_bytes = 0;   ///< free, yet resident (if ever written), to be used without a page fault
  std::size_t given_back_bytes = 0;  ///< handed to the operating system so far
};

/// How much memory may stay resident though it is free.
struct MemoryOptions {
  /// Free resident bytes beyond this are given back at once. Default: half of the memory that this process
  /// may use (the machine's, or its cgroup's). A training step frees most of its peak and wants it back a
  /// moment later, so a bound below that swing costs page faults in every step; half of the machine leaves
  /// the other half to others when a run has shrunk.
  std::optional<std::size_t> kept_bytes_limit = std::nullopt;

  /// Live and kept bytes together stay below this multiple of the highest live bytes, plus 32 MiB: what holes
  /// between blocks may cost. Before a new page is touched beyond it, kept ones are given back.
  double resident_over_peak = 1.10;
};

/// Makes Halfstep's allocator the one for CPU tensors, for the rest of the process. First thing in main:
/// blocks allocated before keep their own deleter and are not counted. Called again it changes nothing.
///
/// Sees what LibTorch allocates for tensors; not what oneDNN, MKL or autograd's graph take from malloc.
/// Not to be called while another thread allocates tensors: LibTorch replaces its allocator without a lock.
HALFSTEP_API void install_cpu_allocator();

/// The same with options, which count from now on also when it was installed before.
HALFSTEP_API void install_cpu_allocator(const MemoryOptions& options);

/// Whether this process has Halfstep's allocator.
HALFSTEP_API bool cpu_allocator_installed();

/// All zero unless installed.
HALFSTEP_API MemoryReport memory_report();

/// Peaks start again from what is live now.
HALFSTEP_API void reset_memory_peak();

/// Hands all free memory to the operating system, and forgets the highest live bytes that
/// `resident_over_peak` goes by. Returns the bytes. For the moment when a large phase is over.
HALFSTEP_API std::size_t empty_cache();

/// Counts the block behind this tensor under another class, for blocks that other code allocated:
/// gradients after backward, for instance. Nothing happens to blocks that are not this allocator's.
HALFSTEP_API void tag_memory(const at::Tensor& tensor, MemoryClass memory_class);

}  // namespace halfstep
