// BlockPool as LibTorch's allocator for CPU tensors.
#include <halfstep/error.h>
#include <halfstep/memory.h>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <pthread.h>
#include <algorithm>
#include <atomic>
#include <string_view>

#include "memory/block_pool.h"
#include "memory/system_memory.h"

namespace halfstep {
namespace {

// Its address is the identity; the text shows up in LibTorch's own error messages.
constexpr std::string_view kKindName = "HALFSTEP_MEMORY_CLASS";

struct ClassInfo final : c10::DebugInfoBase {
  explicit ClassInfo(MemoryClass memory_class) : memory_class(memory_class) {}
  const MemoryClass memory_class;
};

// LibTorch's thread-local debug info rather than a thread_local of ours: at::ThreadLocalState carries the
// former to the threads that autograd moves to, and nothing carries the latter.
c10::DebugInfoKind class_kind() { return c10::DebugInfoKind(&kKindName); }

/// One value a class, made once, so that a scope only counts a reference. Never destroyed: scopes may be
/// opened by the destructors of static objects.
const std::shared_ptr<c10::DebugInfoBase>& info_of(MemoryClass memory_class) {
  static const auto* infos = [] {
    auto* made = new std::array<std::shared_ptr<c10::DebugInfoBase>, kMemoryClassCount>;
    for (std::size_t i = 0; i < kMemoryClassCount; ++i)
      (*made)[i] = std::make_shared<ClassInfo>(static_cast<MemoryClass>(i));
    return made;
  }();
  return infos->at(static_cast<std::size_t>(memory_class));
}

}  // namespace

MemoryClass active_class() {
  const auto* info = static_cast<const ClassInfo*>(c10::ThreadLocalDebugInfo::get(class_kind()));
  return info ? info->memory_class : MemoryClass::Other;
}

const char* name_of(MemoryClass memory_class) {
  constexpr std::array<const char*, kMemoryClassCount> kNames = {
      "working", "master", "gradient", "moments", "activation", "cast_cache", "other"};
  return kNames.at(static_cast<std::size_t>(memory_class));
}

MemoryClassScope::MemoryClassScope(MemoryClass memory_class) : outer_(c10::ThreadLocalDebugInfo::current()) {
  c10::ThreadLocalDebugInfo::_push(class_kind(), info_of(memory_class));
}

MemoryClassScope::~MemoryClassScope() {
  c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(
      std::static_pointer_cast<c10::ThreadLocalDebugInfo>(std::move(outer_)));
}

namespace {

// Null until installed; never destroyed, because tensors may outlive every static object.
std::atomic<BlockPool*> the_pool{nullptr};

void deallocate(void* data);

class CpuAllocator final : public c10::Allocator {
 public:
  explicit CpuAllocator(BlockPool& pool) : pool_(pool) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    void* data = pool_.allocate(bytes, active_class());
    if (!data && bytes > 0) refuse(bytes);
    if (data) report_to_profiler(data, static_cast<int64_t>(bytes));
    return {data, data, &deallocate, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void release(void* data) {
    const std::size_t bytes = pool_.deallocate(data);
    report_to_profiler(data, -static_cast<int64_t>(bytes));
  }

 private:
  [[noreturn]] void refuse(std::size_t bytes) const {
    const MemoryReport report = pool_.report();
    TORCH_CHECK_WITH(OutOfMemoryError, false, "Halfstep's CPU allocator: the system has no ", bytes,
                     " bytes for a tensor; live: ", report.live.total, " bytes in ", report.live_blocks,
                     " blocks. Use a smaller batch, activation checkpointing, or smaller optimizer state.");
  }

  /// As LibTorch's own allocator does, for its profiler.
  void report_to_profiler(void* data, int64_t bytes) const {
    if (!c10::memoryProfilingEnabled()) return;
    const MemoryReport report = pool_.report();
    c10::reportMemoryUsageToProfiler(data, bytes, report.live.total, 0, c10::Device(c10::kCPU));
  }

  BlockPool& pool_;
};

std::atomic<CpuAllocator*> the_allocator{nullptr};

void deallocate(void* data) { the_allocator.load(std::memory_order_relaxed)->release(data); }

std::size_t kept_bytes_limit(const MemoryOptions& options, const SystemMemory& memory) {
  return options.kept_bytes_limit.value_or(memory.limit_bytes / 2);
}

CpuAllocator* make_allocator(const MemoryOptions& options) {
  // What must stay available to the rest of the machine before we give up what we keep.
  constexpr std::size_t kMostPressureBytes = std::size_t{4} << 30;
  const SystemMemory memory = system_memory();
  the_pool = new BlockPool({
      // Addresses, not memory: room for holes that were given back.
      .reserved_bytes = std::min(memory.limit_bytes, std::size_t{1} << 44) * 4,
      .kept_bytes_limit = kept_bytes_limit(options, memory),
      .resident_over_peak = options.resident_over_peak,
      .available_bytes = [] { return system_memory().available_bytes; },
      .pressure_bytes = std::min(memory.limit_bytes / 16, kMostPressureBytes),
  });
  pthread_atfork([] { the_pool.load()->lock_for_fork(); }, [] { the_pool.load()->unlock_after_fork(); },
                 [] { the_pool.load()->unlock_after_fork(); });
  the_allocator = new CpuAllocator(*the_pool);
  // Above LibTorch's own (0); others may still come after us with as much.
  constexpr std::uint8_t kPriority = 100;
  c10::SetCPUAllocator(the_allocator, kPriority);
  return the_allocator;
}

void ensure_installed(const MemoryOptions& options) {
  static CpuAllocator* const installed = make_allocator(options);
  HALFSTEP_CHECK(
      c10::GetCPUAllocator() == installed,
      "install_cpu_allocator: another allocator has a higher priority, or came later. Only one can "
      "serve LibTorch's CPU tensors.");
}

}  // namespace

void install_cpu_allocator() { ensure_installed({}); }

void install_cpu_allocator(const MemoryOptions& options) {
  HALFSTEP_CHECK(options.resident_over_peak >= 1, "install_cpu_allocator: resident_over_peak is ",
                 options.resident_over_peak, "; live blocks alone take 1, so use 1 or more (default 1.10).");
  ensure_installed(options);
  the_pool.load()->set_limits(kept_bytes_limit(options, system_memory()), options.resident_over_peak);
}

bool cpu_allocator_installed() {
  return the_allocator.load() && c10::GetCPUAllocator() == the_allocator.load();
}

MemoryReport memory_report() {
  const BlockPool* pool = the_pool;
  return pool ? pool->report() : MemoryReport{};
}

void reset_memory_peak() {
  if (BlockPool* pool = the_pool) pool->reset_peak();
}

std::size_t empty_cache() {
  BlockPool* pool = the_pool;
  return pool ? pool->give_back() : 0;
}

void tag_memory(const at::Tensor& tensor, MemoryClass memory_class) {
  BlockPool* pool = the_pool;
  if (!pool || !tensor.defined() || !tensor.has_storage()) return;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  if (data.get_deleter() == &deallocate) pool->retag(data.get_context(), memory_class);
}

}  // namespace halfstep
