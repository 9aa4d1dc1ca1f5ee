// A scope in which each operation runs in the precision that the policy gives it.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <halfstep/config.h>
#include <halfstep/machine.h>
#include <halfstep/op_policy.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>

namespace halfstep {

class QuantSession;  // Halfstep's own: the layers of a recipe

/// How this machine computes products of this type: the worst among its GPUs where LibTorch sees any, else
/// the CPU's. `compute` is FP32, BF16 or FP16; anything else is an Error. The machine is looked at once a
/// process.
[[nodiscard]] HALFSTEP_API const PrecisionSupport& precision_support(c10::ScalarType compute);

/// What a scope of type `low` with OpPolicy::standard() does with an operation on the CPU of this machine:
/// the rule of its row, or OpRule::Fp32 where the processor has no instructions for the type and the
/// operation would only become slower by it. `op` is the full name of a row.
[[nodiscard]] HALFSTEP_API OpRule rule_on_this_cpu(std::string_view op, c10::ScalarType low);

/// What an AutocastScope does besides casting.
struct AutocastOptions {
  /// `false` is AutocastScope::disabled(): for a program that decides at run time.
  bool enabled = true;

  /// Accept BF16 on hardware that can only imitate it: right, but slower than FP32. For studying numerics.
  bool allow_emulated = false;

  /// Where an operation gets an FP32 copy of a BF16 or FP16 tensor, keep the tensor for backward instead of
  /// the copy, and cast again there: the same bits in half the bytes. Price: changing such a tensor in place
  /// before backward is an Error, as it is in a step without autocast. With `false` the copies are kept, as
  /// stock does.
  bool repeat_upcasts = true;

  /// Where an operation of the policy, such as a product, takes what GELU, SiLU, a layer norm or an RMS norm
  /// has just put out, keep that operation's input, which is kept anyway, and compute its output again in
  /// backward: one more pass over the elements, one tensor less. The bits are the same with the same number
  /// of threads. Inside `checkpoint_activations`
  /// it does nothing; inside `CompressedActivations` it works on the compressed input.
  bool repeat_outputs = true;

  /// How the CPU computes products and convolutions. `true`: in FP32, of operands that are rounded to the
  /// scope's type, with one rounding of the result; backward keeps the low operands. `false`: by LibTorch's
  /// low operations, which are many times slower where the processor has no instructions for the type.
  ///
  /// Left empty, it is `false` where the processor has them. Where it has not, products are as with `true`,
  /// and convolutions and recurrent layers stay in FP32, as rule_on_this_cpu() tells: no rounding would make
  /// them faster. For the numbers of another machine set it to `true`.
  std::optional<bool> products_in_fp32{};
};

/// Mixed precision from here to the end of the block, for tensors of every device that LibTorch has.
///
///   torch::Tensor loss;
///   {
///     halfstep::AutocastScope scope(at::kBFloat16);
///     loss = loss_of(model, batch);
///   }
///   loss.backward();
///
/// Parameters stay FP32; each use of one casts it anew. LibTorch's own cache of cast weights is off inside
/// the scope, because it keeps serving the old value after the weight is updated; an optimizer step inside
/// the scope is therefore seen at the next use. In-place operations and those with an `out` argument are left
/// alone by LibTorch's autocast, hence by this one too.
///
/// Backward follows the types that forward chose and belongs outside the scope, as in the example.
///
/// TorchScript modules run inside the scope without TorchScript's graph optimizer, whose own derivatives do
/// not know the policy's casts; at the end of the scope the optimizer is as it was.
///
/// Where a part of the model must not be cast, `AutocastScope::disabled()` turns autocast off until the end
/// of the block, as torch's autocast(enabled=False) does:
///
///   const auto full = halfstep::AutocastScope::disabled();
///   energy = torch::logdet(covariance.to(torch::kFloat));   // tensors come as they are: cast them yourself
///
/// Scopes nest: the inner type and policy hold until the inner scope ends. A scope may also open inside a
/// bare at::autocast region, whose state is found again when the scope ends, also when it ends by an
/// exception.
///
/// Threads. A scope holds for the thread that opened it and must end on that thread, in reverse order of
/// opening; make it a local variable. A std::thread that is started inside starts without it. Whatever
/// LibTorch runs elsewhere under an at::ThreadLocalState, autograd's re-entrant threads among it, sees type
/// and policy, and at::ThreadLocalStateGuard brings them into a thread of your own. at::parallel_for does not
/// carry them.
class HALFSTEP_API AutocastScope {
 public:
  /// `low` is at::kBFloat16 or at::kHalf. Anything else is an Error that says what to use instead, and so is
  /// BF16 where it would be emulated: on any GPU, where LibTorch sees some, else on the CPU.
  /// `recipe` is MixedPrecision's to give.
  [[nodiscard]] explicit AutocastScope(c10::ScalarType low, OpPolicy policy = OpPolicy::standard(),
                                       AutocastOptions options = {},
                                       std::shared_ptr<QuantSession> recipe = nullptr);
  ~AutocastScope();

  /// No autocast until the end of the block, of Halfstep's or LibTorch's, on any device. A scope that is
  /// opened inside works as usual. Outside any scope it changes nothing.
  [[nodiscard]] static AutocastScope disabled();

  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

  /// How this machine computes the scope's type (that of FP32 for a disabled scope): FP16 is not refused
  /// where it is only emulated, so a program that wants speed asks here.
  [[nodiscard]] const PrecisionSupport& support() const { return precision_support(compute_); }

 private:
  struct Disabled {};
  explicit AutocastScope(Disabled);

  /// What the devices had before; put back when the scope ends.
  class OuterRegions {
   public:
    /// Turns autocast off where there is no type to lower to.
    explicit OuterRegions(std::optional<c10::ScalarType> low);
    ~OuterRegions();
    OuterRegions(const OuterRegions&) = delete;
    OuterRegions& operator=(const OuterRegions&) = delete;

   private:
    struct Region {
      c10::DeviceType device;
      bool was_enabled;
      c10::ScalarType low;
    };
    static constexpr std::size_t kMostDevices = 10;
    std::array<Region, kMostDevices> regions_;
    std::size_t count_ = 0;
  };

  AutocastScope(std::shared_ptr<c10::DebugInfoBase> policy, std::optional<c10::ScalarType> low);

  c10::DebugInfoGuard policy_guard_;
  OuterRegions outer_;
  bool outer_cache_enabled_;
  bool outer_graph_optimizer_;
  c10::ScalarType compute_;  // FP32 for a disabled scope
};

}  // namespace halfstep
