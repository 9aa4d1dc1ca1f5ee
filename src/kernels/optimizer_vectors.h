// AdamW and SGD in vectors: same arithmetic as update_scalar.cpp.
#pragma once

#include "kernels/vectors.h"

namespace halfstep {
namespace {

template <typename Isa>
struct OptimizerStages : Vectors<Isa> {
  using Base = Vectors<Isa>;
  using Base::all, Base::ask_for, Base::bf16_of, Base::floats_of, Base::for_vectors;
  using Base::joined, Base::kTwin, Base::kUpdateAheadBytes, Base::kWidth, Base::sum_of, Base::unless_edited;
  using Base::words_of;
  using typename Base::Floats, typename Base::Mask, typename Base::Words;

  /// The constants, spread over vectors once.
  struct AdamWVectors {
    explicit AdamWVectors(const AdamWStep& step)
        : from_moment(step.first_weight < 0.5f),
          lerp_weight(all(from_moment ? step.first_weight : step.first_weight - 1)),
          beta2(all(step.beta2)),
          second_weight(all(step.second_weight)),
          second_correction(all(step.second_correction)),
          second_reciprocal(all(1 / step.second_correction)),
          eps(all(step.eps)),
          negative_step_size(all(step.negative_step_size)),
          kept(all(step.kept)),
          decay(all(step.decay)) {}
    bool from_moment;
    Floats lerp_weight, beta2, second_weight, second_correction, second_reciprocal, eps, negative_step_size,
        kept, decay;
  };

  struct Moved {
    Floats first, second, change;  // the change of a weight, without its decay
  };

  /// root / second_correction, rounded as a division is, in a sixth of its time: a quotient by the rounded
  /// reciprocal, at most 1.5 units in the last place off, and one correction by its remainder, which is
  /// exact. That is Markstein's theorem (IBM J. Res. Dev. 34, 1990) but for its first quotient, which would
  /// have to be closer. So all divisors were tried with all roots near enough to a midpoint of two results to
  /// be rounded wrong, in whole numbers: 10^9 pairs, none is. Neither overflow nor underflow is near: a root
  /// is 0 or between 2^-75 and 2^64, a correction at most 1 and at least 2^-27 (beta2 is below 1 in FP64).
  /// The remainder of an Inf, a NaN, is replaced by the lowest number, and the Inf stays.
  static Floats corrected(const AdamWVectors& k, Floats root) {
    const Floats quotient = root * k.second_reciprocal;
    const Floats remainder = Isa::fma(-quotient, k.second_correction, root);
    return Isa::fma(Isa::number_or(remainder, -0x1.fffffep127f), k.second_reciprocal, quotient);
  }

  static Moved moved_moments(const AdamWVectors& k, Floats grad, Floats before, Floats second_before) {
    const Floats first = Isa::fma(k.lerp_weight, grad - before, k.from_moment ? before : grad);
    const Floats second = Isa::fma(k.second_weight * grad, grad, second_before * k.beta2);
    const Floats denominator = corrected(k, Isa::sqrt(second)) + k.eps;
    return {first, second, k.negative_step_size * first / denominator};
  }

  static Floats moved_weight(const AdamWVectors& k, Floats weight, Floats change) {
    return weight * k.kept + change;
  }
  static Floats update_of(const AdamWVectors& k, Floats weight, Floats change) {
    return change - weight * k.decay;
  }

  static UpdateTile behind(const UpdateTile& tile, std::size_t elements) {
    const auto moved = [&](auto* array) { return array ? array + elements : nullptr; };
    return {moved(tile.weight),        moved(tile.grad),        moved(tile.first_moment),
            moved(tile.second_moment), moved(tile.next_weight), moved(tile.update)};
  }

  static void adamw(const AdamWStep& step, const UpdateTile& tile, std::size_t count) {
    const AdamWVectors constants(step);
    const std::size_t done = for_vectors(count, [&](std::size_t i) {
      const Floats weight = Isa::load(tile.weight + i);
      const Moved now = moved_moments(constants, Isa::load(tile.grad + i), Isa::load(tile.first_moment + i),
                                      Isa::load(tile.second_moment + i));
      Isa::store(tile.first_moment + i, now.first);
      Isa::store(tile.second_moment + i, now.second);
      Isa::store(tile.next_weight + i, moved_weight(constants, weight, now.change));
      Isa::store(tile.update + i, update_of(constants, weight, now.change));
    });
    kTwin.adamw(step, behind(tile, done), count - done);
  }

  /// The moments run two vectors ahead of the weights. A root and a division take longer than all else: what
  /// waits for them would fill the processor's queue, so that it found no work beyond (a tenth of the time).
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

    const auto move_moments = [&](std::size_t i) __attribute__((always_inline)) {
      ask_for(Base::template skip<format>(grads, i), kUpdateAheadBytes);
      ask_for(firsts + i, kUpdateAheadBytes);
      ask_for(seconds + i, kUpdateAheadBytes);
      const Moved now = moved_moments(constants, Base::template grads_at<format>(grads, i) * multiplier,
                                      Isa::load(firsts + i), Isa::load(seconds + i));
      Isa::store(firsts + i, now.first);
      Isa::store(seconds + i, now.second);
      return now.change;
    };

    const auto move_weights = [&](std::size_t i, Floats change) __attribute__((always_inline)) {
      if constexpr (low) ask_for(working + i, kUpdateAheadBytes);
      ask_for(split ? static_cast<void*>(remainder + i) : fp32 + i, kUpdateAheadBytes);
      Words working_before = {}, before;
      if constexpr (low) working_before = Isa::widen(working + i);
      if constexpr (split) {
        before = joined(remainder + i, working_before);
      } else {
        before = low ? unless_edited(Isa::load(fp32 + i), working_before) : words_of(Isa::load(fp32 + i));
      }
      const Floats next_weight = moved_weight(constants, floats_of(before), change);
      const Words after = split ? Isa::without_payload(next_weight) : words_of(next_weight);
      const Mask asked = Isa::nonzero(update_of(constants, floats_of(before), change));
      Isa::add_one(nonzero, asked);
      Isa::add_one(lost, Isa::and_equal(asked, before, after));
      if constexpr (low) {
        const Words working_after = split ? (after + 0x8000u) >> 16 : bf16_of(next_weight);
        Isa::add_one(unmoved, Isa::and_equal(asked, working_before, working_after));
        Isa::narrow(working + i, working_after);
      }
      if constexpr (split) {
        Isa::narrow_low_half(remainder + i, after);
      } else {
        Isa::store(fp32 + i, next_weight);
      }
    };

    std::size_t done = 0;
    if (run.count >= 2 * kWidth) {
      Floats change = move_moments(0), next_change = move_moments(kWidth);
      for (; done + 4 * kWidth <= run.count; done += 2 * kWidth) {
        const Floats third = move_moments(done + 2 * kWidth), fourth = move_moments(done + 3 * kWidth);
        move_weights(done, change);
        move_weights(done + kWidth, next_change);
        change = third, next_change = fourth;
      }
      move_weights(done, change);
      move_weights(done + kWidth, next_change);
      done += 2 * kWidth;
    }
    for (; done + kWidth <= run.count; done += kWidth) move_weights(done, move_moments(done));

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
};

}  // namespace
}  // namespace halfstep
