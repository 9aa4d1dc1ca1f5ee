#include "usage/quant_oracle.h"

#include <cmath>

namespace usage {
namespace {

struct Fp {
  int mantissa_bits, least_exponent;
  double max;
};
constexpr Fp kE4M3{3, -6, 448}, kE5M2{2, -14, 57344}, kE2M1{1, 0, 6};

at::Tensor power_of_two(const at::Tensor& exponent) { return at::pow(2.0, exponent.to(at::kDouble)); }
/// The exponent of the highest bit; that of 0 is of no account.
at::Tensor exponent_of(const at::Tensor& values) { return std::get<1>(at::frexp(values)) - 1; }

/// What is not finite is NaN.
at::Tensor nearest(const at::Tensor& values, const Fp& format, const std::optional<at::Generator>& random) {
  const at::Tensor unit =
      power_of_two(exponent_of(values).clamp_min(format.least_exponent) - format.mantissa_bits);
  const at::Tensor count = values / unit;
  const at::Tensor whole =
      random ? (count + at::empty_like(count).uniform_(0, 1, *random)).floor() : count.round();
  const at::Tensor held = (whole * unit).clamp(-format.max, format.max);
  return at::where(values.isfinite(), held, at::full_like(held, std::nan("")));
}

/// The largest magnitude of each block of rows x columns, at each of its elements.
at::Tensor amax_of_blocks(const at::Tensor& values, int64_t rows, int64_t columns) {
  const int64_t height = values.size(0), width = values.size(1);
  rows = rows == 0 ? height : rows;
  columns = columns == 0 ? width : columns;
  const int64_t bands = (height + rows - 1) / rows, across = (width + columns - 1) / columns;
  const at::Tensor padded =
      at::constant_pad_nd(values.abs(), {0, across * columns - width, 0, bands * rows - height}, 0);
  const at::Tensor amax = padded.reshape({bands, rows, across, columns}).amax({1, 3});
  return amax.repeat_interleave(rows, 0)
      .repeat_interleave(columns, 1)
      .narrow(0, 0, height)
      .narrow(1, 0, width);
}

/// An autograd node: three products of rounded operands.
struct RoundedLinear : torch::autograd::Function<RoundedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, int64_t oracle, int64_t layer, bool noted,
                            double amax_off) {
    context->save_for_backward({x, weight});
    context->saved_data["oracle"] = oracle;
    context->saved_data["layer"] = layer;
    context->saved_data["noted"] = noted;
    context->saved_data["amax_off"] = amax_off;
    auto& quant = *reinterpret_cast<QuantOracle*>(oracle);
    const auto one = [&](QuantOracle::Role role, const at::Tensor& values) {
      return quant.rounded(static_cast<int>(layer), role, values, noted, amax_off);
    };
    return one(QuantOracle::Input, x).mm(one(QuantOracle::Weight, weight).t());
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    auto& quant = *reinterpret_cast<QuantOracle*>(context->saved_data["oracle"].toInt());
    const int layer = static_cast<int>(context->saved_data["layer"].toInt());
    const bool noted = context->saved_data["noted"].toBool();
    const double amax_off = context->saved_data["amax_off"].toDouble();
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &dy = grads[0];
    at::Tensor dx, dw;
    if (context->needs_input_grad(0)) {
      const at::Tensor left = quant.rounded(layer, QuantOracle::Grad, dy, noted, amax_off);
      const at::Tensor right = quant.rounded(layer, QuantOracle::Weight, weight.t(), false, amax_off);
      dx = left.mm(right.t());
    }
    if (context->needs_input_grad(1)) {
      at::Tensor left = dy.t(), right = x.t();
      quant.turn(left, right);
      left = quant.rounded(layer, QuantOracle::Grad, left, noted && !dx.defined(), amax_off);
      right = quant.rounded(layer, QuantOracle::Input, right, false, amax_off);
      dw = left.mm(right.t());
    }
    return {dx, dw, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor QuantOracle::rounded(int layer, Role role, const at::Tensor& values, bool noted, double amax_off) {
  const bool is_grad = role == Grad;
  const auto scaled = [&](const at::Tensor& scale, const Fp& format) {
    return nearest(values * scale, format, std::nullopt) / scale;
  };
  switch (recipe_) {
    case Recipe::None:
      return values;
    case Recipe::Fp8Delayed:
    case Recipe::Fp8Current: {
      const Fp& format = is_grad ? kE5M2 : kE4M3;
      const double own = values.abs().max().item<double>();
      const std::pair key{layer, role};
      double amax = own;
      if (recipe_ == Recipe::Fp8Delayed) {
        if (const auto past = past_.find(key); past != past_.end())
          amax = past->second * (1 + amax_off * (2 * at::rand({}, random_, at::kDouble).item<double>() - 1));
        if (noted) {
          const auto before = this_step_.find(key);
          if (before == this_step_.end() || own > before->second || std::isnan(own)) this_step_[key] = own;
        }
      }
      const double scale = std::isfinite(amax) ? format.max / std::max(amax, 1e-12) : 1;
      return scaled(at::full({}, scale, at::kDouble), format);
    }
    case Recipe::Fp8Rowwise:
    case Recipe::Fp8Block: {
      const bool by_rows = recipe_ == Recipe::Fp8Rowwise;
      const bool square = !by_rows && role == Weight;
      const at::Tensor amax = amax_of_blocks(values, square ? 128 : 1, by_rows ? 0 : 128);
      return scaled(power_of_two(exponent_of(kE4M3.max / amax.clamp_min(1e-12))), kE4M3);
    }
    case Recipe::Mxfp8: {
      // The smallest power of two that keeps the largest at or below max, and of E8M0's range.
      const at::Tensor amax = amax_of_blocks(values, 1, 32) / kE4M3.max;
      const auto [mantissa, exponent] = at::frexp(amax);
      const at::Tensor up = at::where(mantissa == 0.5, exponent - 1, exponent);
      return scaled(power_of_two(-at::where(amax == 0, at::full_like(up, -127), up).clamp(-127, 127)), kE4M3);
    }
    case Recipe::Nvfp4: {
      const bool square = role == Weight;
      const double largest = values.abs().max().item<double>();
      const double tensor_scale = largest > 0 && std::isfinite(largest) ? largest / (448 * 6) : 1;
      const at::Tensor amax = amax_of_blocks(values, square ? 16 : 1, 16);
      const at::Tensor block =
          nearest((amax / 6 / tensor_scale).clamp(0x1p-6, 448), kE4M3, std::nullopt) * tensor_scale;
      const auto random = is_grad ? std::optional(random_) : std::nullopt;
      return nearest(values / block, kE2M1, random) * block;
    }
  }
  return values;
}

void QuantOracle::turn(at::Tensor& left, at::Tensor& right) {
  if (recipe_ != Recipe::Nvfp4) return;
  const int64_t whole = left.size(1) / 16 * 16;
  if (whole == 0) return;
  const at::Tensor q = std::get<0>(at::linalg_qr(at::randn({16, 16}, random_, at::kDouble)));
  for (at::Tensor* operand : {&left, &right}) {
    const at::Tensor groups =
        operand->narrow(1, 0, whole).reshape({operand->size(0), whole / 16, 16}).matmul(q);
    *operand = at::cat(
        {groups.reshape({operand->size(0), whole}), operand->narrow(1, whole, operand->size(1) - whole)}, 1);
  }
}

at::Tensor QuantOracle::linear(int layer, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& bias, bool noted, double amax_off) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const bool trains = c10::GradMode::is_enabled() && (x.requires_grad() || weight.requires_grad());
  at::Tensor y =
      RoundedLinear::apply(rows, weight, reinterpret_cast<int64_t>(this), layer, noted && trains, amax_off);
  if (bias.defined()) y = y + bias;
  auto sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  return y.reshape(sizes);
}

void QuantOracle::end_step(bool skipped) {
  for (const auto& [key, amax] : this_step_)
    if (!skipped && std::isfinite(amax) && amax > 0)
      past_[key] = past_.contains(key) ? std::max(past_[key], amax) : amax;
  this_step_.clear();
}

}  // namespace usage
