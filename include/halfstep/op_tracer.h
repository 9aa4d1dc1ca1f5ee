// Finds the operation of a training step that first made a number which is not finite.
#pragma once

#include <ATen/core/Tensor.h>
#include <halfstep/config.h>
#include <halfstep/params.h>
#include <halfstep/run_log.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace halfstep {

namespace diagnose {
void watch_backward(const at::Tensor& loss);
}

/// All of it as one text.
[[nodiscard]] HALFSTEP_API std::string sentence(const CulpritRecord& culprit);

/// While one lives, every operation of the thread that made it is looked at, and those that its backward
/// runs: for finding out why a loss or a gradient is not finite. Slow, several times the step; nothing of it
/// is left when it is gone, and results keep their bits.
///
///     halfstep::OpTracer tracer(mp.params());
///     const auto loss = mp.forward([&] { return loss_of(model, batch); });
///     mp.backward(loss);
///     if (const auto culprit = tracer.culprit(loss)) std::puts(halfstep::sentence(*culprit).c_str());
///
/// An Inf that is put in on purpose, as a mask of -Inf, is nobody's fault until an operation makes a NaN of
/// it. Of several tracers of a thread the last one made looks, and the others see nothing meanwhile. Each
/// ends on the thread that made it.
class HALFSTEP_API OpTracer {
 public:
  /// Operations are told by the layers whose weights they are given.
  explicit OpTracer(const std::vector<Param>& params);
  ~OpTracer();
  OpTracer(const OpTracer&) = delete;
  OpTracer& operator=(const OpTracer&) = delete;

  /// Before loss.backward(), so that nodes are seen which are made of no operation of LibTorch's.
  /// MixedPrecision::backward does it by itself.
  void watch_backward(const at::Tensor& loss);

  /// Whose numbers are in this loss; if it is finite, the first whose numbers its backward put into a leaf's
  /// gradient. Nothing if all was well: a number that an operation replaced, as that of a root at 0 behind
  /// a relu, is harmless. `op` is as LibTorch names it; where no operation made the numbers, "weight" or
  /// "input" for what was not finite from the start, the name of the autograd function or "gradient" for what
  /// came out of code that calls no operation. `layer` is that of the
  /// weight which it was given, or the last before it: "after layers.0.up". In backward it is the layer of
  /// the operation whose derivative is taken; a sum of several gradients is of the one that gave the last of
  /// them, and the sum in a leaf's gradient of the leaf. `direction` is "backward" from the first gradient
  /// on, the 1 that a backward begins with; the loss scale is multiplied in forward. Step, seconds and rank
  /// are the caller's to fill in.
  std::optional<CulpritRecord> culprit(const at::Tensor& loss) const;
  /// All that made such numbers, in order, also those whose numbers went nowhere.
  std::vector<CulpritRecord> producers() const;

 private:
  struct State;
  friend void diagnose::watch_backward(const at::Tensor& loss);
  std::shared_ptr<State> state_;
};

}  // namespace halfstep
