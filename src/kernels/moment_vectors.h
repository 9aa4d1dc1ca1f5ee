// Moments in 16 and 8 bits, in vectors: same arithmetic as update_scalar.cpp.
#pragma once

#include "kernels/moment_codes.h"
#include "kernels/vectors.h"

namespace halfstep {
namespace {

template <typename Isa>
struct MomentStages : Vectors<Isa> {
  using Base = Vectors<Isa>;
  using Base::all, Base::choose, Base::floats_of, Base::for_vectors, Base::kTwin, Base::kWidth, Base::larger;
  using Base::one_where, Base::smaller, Base::where, Base::words_of;
  using typename Base::Floats, typename Base::Words;

  template <int which>
  static Words dither_at(const Dither& dither, std::size_t i) {
    const Words words = Isa::load_words(dither.words + i);
    return (which == kSecond ? (words << 16) | (words >> 16) : words) + dither.phase;
  }

  template <int which>
  static void round_bf16_moment(const float* values, Dither dither, std::uint16_t* codes, std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Words bits = words_of(Isa::load(values + i)), fraction = bits << 16;
      const Words up = one_where(fraction + dither_at<which>(dither, i) < fraction);
      const Words nan = where((bits & ~kFp32Sign) > kFp32Inf);
      Isa::narrow(codes + i, choose(nan, (bits | kFp32QuietNan) >> 16, (bits >> 16) + up));
    });
    kTwin.round_bf16_moment[which](values + done, {dither.words + done, dither.phase}, codes + done,
                                   count - done);
  }

  template <int which>
  static float block_scale(const float* values, std::size_t count) {
    Words largest = {};
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      largest = larger(largest, words_of(Isa::load(values + i)) & ~kFp32Sign);
    });
    // The scale depends on the largest magnitude alone: ask the twin about those that are left.
    float candidates[2 * kWidth];
    Isa::store(candidates, floats_of(largest));
    std::size_t candidate_count = kWidth;
    for (std::size_t i = done; i < count; ++i) candidates[candidate_count++] = values[i];
    return kTwin.block_scale[which](candidates, candidate_count);
  }

  template <int which>
  static void round_block_moment(const float* values, float scale, Dither dither, std::uint8_t* codes,
                                 std::size_t count) {
    constexpr MomentCodes k = kMomentCodes[which];
    std::size_t done = 0;
    if (scale > 0) {
      const Words first_normal = (words_of(all(scale)) >> 23) - (kTopMomentExponent - 1);
      done = for_vectors(count, [&](std::size_t i) {
        const Words bits = words_of(Isa::load(values + i)), magnitude = bits & ~kFp32Sign;
        const Words normal = where(magnitude >= kFp32HiddenBit);
        const Words significand = (magnitude & (kFp32HiddenBit - 1)) | (normal & kFp32HiddenBit);
        const Words exponent = larger(magnitude >> 23, Words{} + 1u);
        const Words coarse_exponent = larger(exponent, first_normal);
        // The two halves of a 32.32 number: shifts by 32 and more, and by "negative" counts, give 0.
        const Words shift = (coarse_exponent - exponent) + (23u - k.mantissa_bits);
        const Words steps = Isa::shift_right(significand, shift);
        const Words fraction =
            Isa::shift_left(significand, 32u - shift) | Isa::shift_right(significand, shift - 32u);
        const Words up = one_where(fraction + dither_at<which>(dither, i) < fraction);
        Words code = steps + up + ((coarse_exponent - first_normal) << k.mantissa_bits);
        code = smaller(code, Words{} + largest_moment_code(k));
        if constexpr (k.smallest_of_nonzero != 0)
          code = larger(code, where(magnitude != 0u) & k.smallest_of_nonzero);
        if constexpr (k.has_sign) code |= (bits >> 31) << 7;
        Isa::narrow(codes + i, code);
      });
    }
    kTwin.round_block_moment[which](values + done, scale, {dither.words + done, dither.phase}, codes + done,
                                    count - done);
  }

  template <int which>
  static void load_block_moment(const std::uint8_t* codes, float scale, float* values, std::size_t count) {
    constexpr MomentCodes k = kMomentCodes[which];
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Words code = Isa::widen(codes + i);
      const Words magnitude = k.has_sign ? code & 0x7fu : code;
      const Words subnormal = where(magnitude < (1u << k.mantissa_bits));
      const Words normal = (magnitude << (23 - k.mantissa_bits)) + ((127 - kTopMomentExponent) << 23);
      const Words small = words_of(Isa::to_floats(magnitude) * smallest_moment(k));
      Words in_scales = choose(subnormal, small, normal);
      if constexpr (k.has_sign) in_scales |= (code >> 7) << 31;
      Isa::store(values + i, floats_of(in_scales) * scale);
    });
    kTwin.load_block_moment[which](codes + done, scale, values + done, count - done);
  }
};

}  // namespace
}  // namespace halfstep
