// Vectors of any width. Each ISA's file of optimizer stages includes this and the headers on top of it once,
// and supplies the vector types and the few operations that C++ has no operator for. All is local to that
// file, see avx512.cpp for why.
#pragma once

#include "kernels/cast_constants.h"
#include "kernels/update.h"

namespace halfstep {
namespace {

/// `Isa` has the vector types Floats, Words (unsigned) and Doubles (half as many lanes). Comparisons of
/// vectors give lanes of all ones or all zeros; for counting, Isa has comparisons that give its Mask.
template <typename Isa>
struct Vectors {
  using Floats = typename Isa::Floats;
  using Words = typename Isa::Words;
  using Doubles = typename Isa::Doubles;
  using Mask = typename Isa::Mask;
  static constexpr std::size_t kWidth = sizeof(Floats) / sizeof(float);
  static constexpr const UpdateStages& kTwin = kScalarUpdateStages;  // does what is left of a run

  static Floats all(float value) { return value - Floats{}; }
  static Words words_of(Floats values) { return reinterpret_cast<Words>(values); }
  static Floats floats_of(Words words) { return reinterpret_cast<Floats>(words); }
  static Words choose(Words condition, Words then, Words otherwise) {
    return (condition & then) | (~condition & otherwise);
  }
  static Words where(auto comparison) { return reinterpret_cast<Words>(comparison); }
  static Words larger(Words a, Words b) { return choose(where(a > b), a, b); }
  static Words smaller(Words a, Words b) { return choose(where(a < b), a, b); }
  static Words one_where(auto comparison) { return where(comparison) & 1u; }

  /// Calls body(i) for each whole vector; returns the first element behind them.
  template <typename Body>
  static std::size_t for_vectors(std::size_t count, const Body& body) {
    std::size_t i = 0;
    for (; i + kWidth <= count; i += kWidth) body(i);
    return i;
  }

  static std::size_t sum_of(Words lanes) {
    std::size_t sum = 0;
    for (std::size_t i = 0; i < kWidth; ++i) sum += lanes[i];
    return sum;
  }

  template <int format>
  static const void* skip(const void* grads, std::size_t elements) {
    return static_cast<const char*>(grads) + elements * (format == kFp32Grads ? 4 : 2);
  }

  template <int format>
  static Floats grads_at(const void* grads, std::size_t i) {
    if constexpr (format == kFp32Grads) return Isa::load(static_cast<const float*>(grads) + i);
    const auto* codes = static_cast<const std::uint16_t*>(grads) + i;
    if constexpr (format == kBf16Grads) return floats_of(Isa::widen(codes) << 16);
    return Isa::load_fp16(codes);
  }

  /// The master of 16 and 16 bits. See `join` in update_scalar.cpp for the remainders that do not count.
  static Words joined(const std::uint16_t* remainder, Words working) {
    const Words magnitude = working << 17;
    const Words below =
        Isa::zero_unless(Isa::at_most(magnitude, kLargestFinite), Isa::widen_signed(remainder));
    return (working << 16) + Isa::zero_if_negative(below, Isa::is_zero(magnitude));
  }
  static constexpr std::uint32_t kLargestFinite = (kFp32Inf << 1) - 1;  // without its sign

  /// The FP32 master, or the BF16 working copy where the master does not round to it: where the two are more
  /// than half a unit in the last place apart, or just that beside an odd working copy. In a pass that counts
  /// each instruction this is half of what rounding takes. It compares bits as whole numbers, where NaNs of
  /// some payloads lie next to a zero or an Inf: they lose their payload first.
  static Words unless_edited(Floats given, Words working) {
    const Words master = Isa::without_payload(given), edited = working << 16;
    return Isa::choose(Isa::at_most(Isa::absolute(master - edited) + (working & 1u), 0x8000u), master,
                       edited);
  }

  /// Nearest even. A NaN is first freed of its payload, so that nothing is carried.
  static Words bf16_of(Floats values) {
    const Words bits = Isa::without_payload(values);
    return (bits + ((bits >> 16) & 1u) + 0x7fffu) >> 16;
  }

  /// Asks for memory this far ahead: the processor itself does not look across the end of a page.
  static constexpr std::size_t kUpdateAheadBytes = 1024, kReadAheadBytes = 4096;

  static void ask_for(const void* memory, std::size_t ahead_bytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(memory) + ahead_bytes));
  }
};

}  // namespace
}  // namespace halfstep
