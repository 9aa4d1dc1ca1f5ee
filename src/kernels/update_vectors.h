// The stages of an optimizer step in vectors of any width: same functions, same order, same arithmetic as
// update_scalar.cpp. Each ISA's file includes this once and supplies the vectors and the few operations that
// C++ has no operator for. All is local to that file, see avx512.cpp for why.
#pragma once

#include "kernels/cast_constants.h"
#include "kernels/moment_codes.h"
#include "kernels/update.h"

namespace halfstep {
namespace {

/// `Isa` has the vector types Floats, Words (unsigned) and Doubles (half as many lanes). Comparisons of
/// vectors give lanes of all ones or all zeros; for counting, Isa has comparisons that give its Mask.
template <typename Isa>
struct VectorStages {
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

  template <int format>
  static void sum_of_squares(const void* grads, std::size_t count, double* lanes) {
    constexpr std::size_t kVectors = kSquareLanes / kWidth, kDoubles = kWidth / 2;
    Doubles low[kVectors], high[kVectors];
    for (std::size_t v = 0; v < kVectors; ++v) {
      low[v] = Isa::load_doubles(lanes + v * kWidth);
      high[v] = Isa::load_doubles(lanes + v * kWidth + kDoubles);
    }
    std::size_t i = 0;
    for (; i + kSquareLanes <= count; i += kSquareLanes) {
      ask_for(skip<format>(grads, i), kReadAheadBytes);
      for (std::size_t v = 0; v < kVectors; ++v) {
        const Floats values = grads_at<format>(grads, i + v * kWidth);
        const Doubles a = Isa::low_doubles(values), b = Isa::high_doubles(values);
        low[v] += a * a;
        high[v] += b * b;
      }
    }
    for (std::size_t v = 0; v < kVectors; ++v) {
      Isa::store_doubles(lanes + v * kWidth, low[v]);
      Isa::store_doubles(lanes + v * kWidth + kDoubles, high[v]);
    }
    kTwin.sum_of_squares[format](skip<format>(grads, i), count - i, lanes);
  }

  template <int format>
  static void load_grads(const void* grads, float multiplier, float* values, std::size_t count) {
    const std::size_t done = for_vectors(
        count, [&](std::size_t i) { Isa::store(values + i, grads_at<format>(grads, i) * multiplier); });
    kTwin.load_grads[format](skip<format>(grads, done), multiplier, values + done, count - done);
  }

  template <int format>
  static void accumulate(const void* grads, float* sum, std::size_t count) {
    const std::size_t done = for_vectors(
        count, [&](std::size_t i) { Isa::store(sum + i, Isa::load(sum + i) + grads_at<format>(grads, i)); });
    kTwin.accumulate[format](skip<format>(grads, done), sum + done, count - done);
  }

  /// The constants, spread over vectors once.
  struct AdamWVectors {
    explicit AdamWVectors(const AdamWStep& step)
        : from_moment(step.first_weight < 0.5f),
          lerp_weight(all(from_moment ? step.first_weight : step.first_weight - 1)),
          beta2(all(step.beta2)),
          second_weight(all(step.second_weight)),
          second_correction(all(step.second_correction)),
          eps(all(step.eps)),
          negative_step_size(all(step.negative_step_size)),
          kept(all(step.kept)),
          decay(all(step.decay)) {}
    bool from_moment;
    Floats lerp_weight, beta2, second_weight, second_correction, eps, negative_step_size, kept, decay;
  };

  struct Updated {
    Floats first, second, next_weight, update;
  };

  static Updated adamw_vector(const AdamWVectors& k, Floats weight, Floats grad, Floats before,
                              Floats second_before) {
    const Floats first = Isa::fma(k.lerp_weight, grad - before, k.from_moment ? before : grad);
    const Floats second = Isa::fma(k.second_weight * grad, grad, second_before * k.beta2);
    const Floats denominator = Isa::sqrt(second) / k.second_correction + k.eps;
    const Floats change = k.negative_step_size * first / denominator;
    return {first, second, weight * k.kept + change, change - weight * k.decay};
  }

  static UpdateTile behind(const UpdateTile& tile, std::size_t elements) {
    const auto moved = [&](auto* array) { return array ? array + elements : nullptr; };
    return {moved(tile.weight),        moved(tile.grad),        moved(tile.first_moment),
            moved(tile.second_moment), moved(tile.next_weight), moved(tile.update)};
  }

  static void adamw(const AdamWStep& step, const UpdateTile& tile, std::size_t count) {
    const AdamWVectors constants(step);
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Updated now = adamw_vector(constants, Isa::load(tile.weight + i), Isa::load(tile.grad + i),
                                       Isa::load(tile.first_moment + i), Isa::load(tile.second_moment + i));
      Isa::store(tile.first_moment + i, now.first);
      Isa::store(tile.second_moment + i, now.second);
      Isa::store(tile.next_weight + i, now.next_weight);
      Isa::store(tile.update + i, now.update);
    });
    kTwin.adamw(step, behind(tile, done), count - done);
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

  template <WeightStorage storage, int format>
  static std::size_t fused_adamw(const AdamWStep& step, const UpdateRun& run, UpdateCounts& counts) {
    constexpr bool split = storage == WeightStorage::SplitMaster, low = storage != WeightStorage::Fp32;
    const AdamWVectors constants(step);
    const Floats multiplier = all(step.grad_multiplier);
    const void* const grads = run.grad;
    auto* const fp32 = static_cast<float*>(low ? run.companion : run.working);
    auto* const working = static_cast<std::uint16_t*>(run.working);
    auto* const remainder = static_cast<std::uint16_t*>(run.companion);
    auto* const firsts = static_cast<float*>(run.first_moment);
    auto* const seconds = static_cast<float*>(run.second_moment);
    Words nonzero = {}, unmoved = {}, lost = {};
    const std::size_t done = for_vectors(run.count, [&](std::size_t i) {
      ask_for(skip<format>(grads, i), kUpdateAheadBytes);
      ask_for(firsts + i, kUpdateAheadBytes);
      ask_for(seconds + i, kUpdateAheadBytes);
      if constexpr (low) ask_for(working + i, kUpdateAheadBytes);
      ask_for(split ? static_cast<void*>(remainder + i) : fp32 + i, kUpdateAheadBytes);

      Words working_before = {}, before;
      if constexpr (low) working_before = Isa::widen(working + i);
      if constexpr (split) {
        before = joined(working_before, Isa::widen(remainder + i));
      } else {
        before = words_of(Isa::load(fp32 + i));
      }
      const Updated now = adamw_vector(constants, floats_of(before), grads_at<format>(grads, i) * multiplier,
                                       Isa::load(firsts + i), Isa::load(seconds + i));
      Isa::store(firsts + i, now.first);
      Isa::store(seconds + i, now.second);
      const Words after = words_of(now.next_weight);
      const Mask asked = Isa::nonzero(now.update);
      Isa::add_one(nonzero, asked);
      Isa::add_one(lost, Isa::and_equal(asked, before, after));
      if constexpr (low) {
        const Words working_after = split ? (after + 0x8000u) >> 16 : bf16_of(now.next_weight);
        Isa::add_one(unmoved, Isa::and_equal(asked, working_before, working_after));
        Isa::narrow(working + i, working_after);
      }
      if constexpr (split) {
        Isa::narrow(remainder + i, after & 0xffffu);
      } else {
        Isa::store(fp32 + i, now.next_weight);
      }
    });
    counts.nonzero += sum_of(nonzero);
    counts.working_unmoved += sum_of(low ? unmoved : lost);
    counts.lost += sum_of(lost);
    return done;
  }

  static void sgd(const SgdStep& step, const UpdateTile& tile, std::size_t count) {
    const Floats momentum = all(static_cast<float>(step.momentum));
    const Floats grad_share = all(static_cast<float>(1 - step.dampening));
    const auto decay = static_cast<float>(step.weight_decay);
    const Floats negative_rate = all(static_cast<float>(-step.learning_rate));
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Floats weight = Isa::load(tile.weight + i);
      Floats grad = Isa::load(tile.grad + i);
      if (decay != 0) grad = Isa::fma(all(decay), weight, grad);
      Floats direction = grad;
      if (tile.first_moment) {
        Floats moment = grad;
        if (!step.first) moment = Isa::fma(grad, grad_share, Isa::load(tile.first_moment + i) * momentum);
        Isa::store(tile.first_moment + i, moment);
        direction = step.nesterov ? Isa::fma(moment, momentum, grad) : moment;
      }
      Isa::store(tile.next_weight + i, Isa::fma(negative_rate, direction, weight));
      Isa::store(tile.update + i, negative_rate * direction);
    });
    kTwin.sgd(step, behind(tile, done), count - done);
  }

  /// Sign-extends the lower half of each lane.
  static Words joined(Words working, Words remainder) {
    return (working << 16) + ((remainder ^ 0x8000u) - 0x8000u);
  }

  static void join(const std::uint16_t* working, const std::uint16_t* remainder, float* master,
                   std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::store(master + i, floats_of(joined(Isa::widen(working + i), Isa::widen(remainder + i))));
    });
    kTwin.join(working + done, remainder + done, master + done, count - done);
  }

  static void split(const float* master, std::uint16_t* working, std::uint16_t* remainder,
                    std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Words bits = words_of(Isa::load(master + i));
      Isa::narrow(working + i, (bits + 0x8000u) >> 16);
      Isa::narrow(remainder + i, bits & 0xffffu);
    });
    kTwin.split(master + done, working + done, remainder + done, count - done);
  }

  static void round_bf16(const float* values, std::uint16_t* codes, std::size_t count) {
    const std::size_t done =
        for_vectors(count, [&](std::size_t i) { Isa::narrow(codes + i, bf16_of(Isa::load(values + i))); });
    kTwin.round_bf16(values + done, codes + done, count - done);
  }

  static void add(const float* a, const float* b, float* sum, std::size_t count) {
    const std::size_t done =
        for_vectors(count, [&](std::size_t i) { Isa::store(sum + i, Isa::load(a + i) + Isa::load(b + i)); });
    kTwin.add(a + done, b + done, sum + done, count - done);
  }

  static void left_of(const float* addend, const float* before, const float* after, float* left,
                      std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::store(left + i, Isa::load(addend + i) - (Isa::load(after + i) - Isa::load(before + i)));
    });
    kTwin.left_of(addend + done, before + done, after + done, left + done, count - done);
  }

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

  static std::size_t nonzero(const float* update, std::size_t count) {
    Words found = {};
    const std::size_t done =
        for_vectors(count, [&](std::size_t i) { Isa::add_one(found, Isa::nonzero(Isa::load(update + i))); });
    return sum_of(found) + kTwin.nonzero(update + done, count - done);
  }

  static std::size_t unmoved_words(const float* update, const float* before, const float* after,
                                   std::size_t count) {
    Words found = {};
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::add_one(found, Isa::and_equal(Isa::nonzero(Isa::load(update + i)), words_of(Isa::load(before + i)),
                                         words_of(Isa::load(after + i))));
    });
    return sum_of(found) + kTwin.unmoved_words(update + done, before + done, after + done, count - done);
  }

  static std::size_t unmoved_codes(const float* update, const std::uint16_t* before,
                                   const std::uint16_t* after, std::size_t count) {
    Words found = {};
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::add_one(found, Isa::and_equal(Isa::nonzero(Isa::load(update + i)), Isa::widen(before + i),
                                         Isa::widen(after + i)));
    });
    return sum_of(found) + kTwin.unmoved_codes(update + done, before + done, after + done, count - done);
  }

  static constexpr UpdateStages stages() {
    return {
        .sum_of_squares = {sum_of_squares<kFp32Grads>, sum_of_squares<kBf16Grads>,
                           sum_of_squares<kFp16Grads>},
        .load_grads = {load_grads<kFp32Grads>, load_grads<kBf16Grads>, load_grads<kFp16Grads>},
        .accumulate = {accumulate<kFp32Grads>, accumulate<kBf16Grads>, accumulate<kFp16Grads>},
        .adamw = adamw,
        .fused_adamw = {{fused_adamw<WeightStorage::Fp32, kFp32Grads>,
                         fused_adamw<WeightStorage::Fp32, kBf16Grads>,
                         fused_adamw<WeightStorage::Fp32, kFp16Grads>},
                        {fused_adamw<WeightStorage::Fp32Master, kFp32Grads>,
                         fused_adamw<WeightStorage::Fp32Master, kBf16Grads>,
                         fused_adamw<WeightStorage::Fp32Master, kFp16Grads>},
                        {fused_adamw<WeightStorage::SplitMaster, kFp32Grads>,
                         fused_adamw<WeightStorage::SplitMaster, kBf16Grads>,
                         fused_adamw<WeightStorage::SplitMaster, kFp16Grads>}},
        .sgd = sgd,
        .join = join,
        .split = split,
        .round_bf16 = round_bf16,
        .add = add,
        .left_of = left_of,
        .round_bf16_moment = {round_bf16_moment<kFirst>, round_bf16_moment<kSecond>},
        .block_scale = {block_scale<kFirst>, block_scale<kSecond>},
        .round_block_moment = {round_block_moment<kFirst>, round_block_moment<kSecond>},
        .load_block_moment = {load_block_moment<kFirst>, load_block_moment<kSecond>},
        .nonzero = nonzero,
        .unmoved_words = unmoved_words,
        .unmoved_codes = unmoved_codes,
    };
  }
};

}  // namespace
}  // namespace halfstep
