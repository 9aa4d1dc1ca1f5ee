#include "memory/active_class.h"

#include <c10/util/ThreadLocalDebugInfo.h>

#include <string_view>

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

}  // namespace halfstep
