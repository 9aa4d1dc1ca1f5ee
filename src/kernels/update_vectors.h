// The stages of an optimizer step in vectors: same functions, same arithmetic as update_scalar.cpp.
#pragma once

#include "kernels/moment_vectors.h"
#include "kernels/optimizer_vectors.h"

namespace halfstep {
namespace {

template <typename Isa>
struct VectorStages : Vectors<Isa> {
  using Base = Vectors<Isa>;
  using Optimizer = OptimizerStages<Isa>;
  using Moments = MomentStages<Isa>;
  using Base::ask_for, Base::bf16_of, Base::floats_of, Base::for_vectors, Base::joined;
  using Base::kReadAheadBytes, Base::kTwin, Base::kWidth, Base::sum_of, Base::words_of;
  using typename Base::Doubles, typename Base::Floats, typename Base::Words;

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
      ask_for(Base::template skip<format>(grads, i), kReadAheadBytes);
      for (std::size_t v = 0; v < kVectors; ++v) {
        const Floats values = Base::template grads_at<format>(grads, i + v * kWidth);
        const Doubles a = Isa::low_doubles(values), b = Isa::high_doubles(values);
        low[v] += a * a;
        high[v] += b * b;
      }
    }
    for (std::size_t v = 0; v < kVectors; ++v) {
      Isa::store_doubles(lanes + v * kWidth, low[v]);
      Isa::store_doubles(lanes + v * kWidth + kDoubles, high[v]);
    }
    kTwin.sum_of_squares[format](Base::template skip<format>(grads, i), count - i, lanes);
  }

  template <int format>
  static void load_grads(const void* grads, float multiplier, float* values, std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::store(values + i, Base::template grads_at<format>(grads, i) * multiplier);
    });
    kTwin.load_grads[format](Base::template skip<format>(grads, done), multiplier, values + done,
                             count - done);
  }

  template <int format>
  static void accumulate(const void* grads, float* sum, std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::store(sum + i, Isa::load(sum + i) + Base::template grads_at<format>(grads, i));
    });
    kTwin.accumulate[format](Base::template skip<format>(grads, done), sum + done, count - done);
  }

  static void join(const std::uint16_t* working, const std::uint16_t* remainder, float* master,
                   std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      Isa::store(master + i, floats_of(joined(remainder + i, Isa::widen(working + i))));
    });
    kTwin.join(working + done, remainder + done, master + done, count - done);
  }

  static void split(const float* master, std::uint16_t* working, std::uint16_t* remainder,
                    std::size_t count) {
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Words bits = Isa::without_payload(Isa::load(master + i));
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
        .adamw = Optimizer::adamw,
        .fused_adamw = {{Optimizer::template fused_adamw<WeightStorage::Fp32, kFp32Grads>,
                         Optimizer::template fused_adamw<WeightStorage::Fp32, kBf16Grads>,
                         Optimizer::template fused_adamw<WeightStorage::Fp32, kFp16Grads>},
                        {Optimizer::template fused_adamw<WeightStorage::Fp32Master, kFp32Grads>,
                         Optimizer::template fused_adamw<WeightStorage::Fp32Master, kBf16Grads>,
                         Optimizer::template fused_adamw<WeightStorage::Fp32Master, kFp16Grads>},
                        {Optimizer::template fused_adamw<WeightStorage::SplitMaster, kFp32Grads>,
                         Optimizer::template fused_adamw<WeightStorage::SplitMaster, kBf16Grads>,
                         Optimizer::template fused_adamw<WeightStorage::SplitMaster, kFp16Grads>}},
        .sgd = Optimizer::sgd,
        .join = join,
        .split = split,
        .round_bf16 = round_bf16,
        .add = add,
        .left_of = left_of,
        .round_bf16_moment = {Moments::template round_bf16_moment<kFirst>,
                              Moments::template round_bf16_moment<kSecond>},
        .block_scale = {Moments::template block_scale<kFirst>, Moments::template block_scale<kSecond>},
        .round_block_moment = {Moments::template round_block_moment<kFirst>,
                               Moments::template round_block_moment<kSecond>},
        .load_block_moment = {Moments::template load_block_moment<kFirst>,
                              Moments::template load_block_moment<kSecond>},
        .nonzero = nonzero,
        .unmoved_words = unmoved_words,
        .unmoved_codes = unmoved_codes,
    };
  }
};

}  // namespace
}  // namespace halfstep
