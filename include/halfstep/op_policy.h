// Which operation runs in which precision, and why: one table for every device.
#pragma once

#include <halfstep/config.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

namespace halfstep {

/// What an AutocastScope does with the floating-point tensors that an operation is given.
///
/// FP64 tensors are never narrowed: a Low operation that is given one runs as it is. FP8 and FP4 tensors are
/// never cast, because their scale would be lost: Low and Fp32 refuse them with an Error.
enum class OpRule : unsigned char {
  Low,      ///< cast to the scope's type, BF16 or FP16
  Fp32,     ///< cast to FP32; a `dtype` that the caller passes to the operation is obeyed instead
  Promote,  ///< cast all to the widest among them; BF16 beside FP16 gives FP32
  First,    ///< cast all to the type of the first, which the operation writes to or looks things up in
  AsIs,     ///< leave alone; operations that this one is made of still follow their own rows
  Stock,    ///< do what stock LibTorch does on the tensor's device
};

/// What stock LibTorch 2.13 does with an operation inside its own autocast.
enum class StockRule : unsigned char {
  NotListed,  ///< nothing: the operation has no autocast kernel on that device
  Low,
  Fp32,
  Promote,
  Refused,  ///< throws
};

/// One operation. `rule` is the one of OpPolicy::standard().
struct OpRow {
  std::string_view op;  ///< ATen's name with its overload: "mm", "softmax.int"
  OpRule rule;
  std::string_view reason;  ///< one sentence
  StockRule stock_cpu;
  StockRule stock_cuda;
};

/// Every operation that LibTorch's CPU or CUDA autocast knows, and those that Halfstep adds (NotListed on
/// both).
HALFSTEP_API std::span<const OpRow> op_table();

/// "low", "fp32", "promote", "first", "as is", "stock".
HALFSTEP_API std::string_view to_string(OpRule rule);
/// "not listed", "low", "fp32", "promote", "refused".
HALFSTEP_API std::string_view to_string(StockRule rule);

/// Whether a row with this rule treats tensors as stock LibTorch does.
HALFSTEP_API bool agrees_with_stock(OpRule rule, StockRule stock);

/// A rule for each row of the table. A value: copies share their rows until one of them is changed, and a
/// scope keeps the copy that it was opened with, so a later set() changes later scopes only.
///
///   auto policy = halfstep::OpPolicy::standard();
///   policy.set("softmax", halfstep::OpRule::Low);
///   halfstep::AutocastScope scope(at::kBFloat16, policy);
class HALFSTEP_API OpPolicy {
 public:
  /// Matrix products, convolutions and attention in low precision; norms, softmax, losses, logarithms, powers
  /// and long sums in FP32; the same on every device.
  static OpPolicy standard();

  /// Stock LibTorch, whose CPU and CUDA lists differ.
  static OpPolicy stock();

  /// A name with its overload ("prod.dim_int") changes one row; a bare name ("prod") changes the row of that
  /// name and all its overloads. An unknown name is an Error that offers the nearest one.
  OpPolicy& set(std::string_view op, OpRule rule);

  /// The rule of one row, by its full name.
  OpRule rule(std::string_view op) const;

  /// The rule of op_table()[row].
  OpRule rule_of_row(std::size_t row) const noexcept { return (*rules_)[row]; }

  bool operator==(const OpPolicy& other) const { return *rules_ == *other.rules_; }

 private:
  using Rules = std::vector<OpRule>;
  explicit OpPolicy(Rules rules) : rules_(std::make_shared<const Rules>(std::move(rules))) {}

  std::shared_ptr<const Rules> rules_;  // one rule for each row of op_table(); never changed once shared
};

}  // namespace halfstep
