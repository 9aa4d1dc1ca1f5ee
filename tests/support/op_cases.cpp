#include "support/op_cases.h"

namespace halfstep::testing {
namespace {

using at::Tensor;

/// An operation that a process without Halfstep lacks.
template <typename... Arguments>
Tensor by_name(const char* op, const Arguments&... arguments) {
  std::vector<c10::IValue> stack{arguments...};
  c10::Dispatcher::singleton().findSchemaOrThrow(op, "").callBoxed(stack);
  return stack[0].toTensor();
}

constexpr int64_t kMean = at::Reduction::Mean;
constexpr int64_t kSum = at::Reduction::Sum;

Tensor classes(int64_t n, int64_t class_count) { return at::arange(n).remainder(class_count); }
Tensor plus_minus_one(int64_t n) { return at::arange(n).remainder(2).mul(2).sub(1).to(at::kFloat); }

OpCase unary(std::string_view op, Tensor (*function)(const Tensor&)) {
  return {op, [function](Inputs& in) { return function(in(3, 4)); }};
}

/// Losses of a prediction and a target of its shape.
OpCase paired_loss(std::string_view op, Tensor (*function)(const Tensor&, const Tensor&, int64_t)) {
  return {op, [function](Inputs& in) { return function(in(3, 4), in(3, 4), kMean); }};
}

OpCase fourier(std::string_view op, Tensor (*function)(const Tensor&, std::optional<int64_t>, int64_t,
                                                       std::optional<std::string_view>)) {
  return {op, [function](Inputs& in) { return function(in(4, 8), std::nullopt, -1, std::nullopt); }};
}
OpCase fourier2(std::string_view op, Tensor (*function)(const Tensor&, at::OptionalIntArrayRef,
                                                        at::IntArrayRef, std::optional<std::string_view>)) {
  return {op, [function](Inputs& in) { return function(in(4, 8), std::nullopt, {-2, -1}, std::nullopt); }};
}
OpCase fourier_n(std::string_view op,
                 Tensor (*function)(const Tensor&, at::OptionalIntArrayRef, at::OptionalIntArrayRef,
                                    std::optional<std::string_view>)) {
  return {op,
          [function](Inputs& in) { return function(in(4, 8), std::nullopt, std::nullopt, std::nullopt); }};
}

std::vector<OpCase> concat(std::initializer_list<std::vector<OpCase>> families) {
  std::vector<OpCase> all;
  for (const auto& family : families) all.insert(all.end(), family.begin(), family.end());
  return all;
}

std::vector<OpCase> products() {
  return {
      {"addbmm", [](Inputs& in) { return at::addbmm(in(3, 5), in(2, 3, 4), in(2, 4, 5)); }},
      {"addmm", [](Inputs& in) { return at::addmm(in(3, 5), in(3, 4), in(4, 5)); }},
      {"_addmm_activation", [](Inputs& in) { return at::_addmm_activation(in(5), in(3, 4), in(4, 5)); },
       /*differentiable=*/false},
      {"addmv", [](Inputs& in) { return at::addmv(in(3), in(3, 4), in(4)); }},
      {"addr", [](Inputs& in) { return at::addr(in(3, 4), in(3), in(4)); }},
      {"baddbmm", [](Inputs& in) { return at::baddbmm(in(2, 3, 5), in(2, 3, 4), in(2, 4, 5)); }},
      {"bmm", [](Inputs& in) { return at::bmm(in(2, 3, 4), in(2, 4, 5)); }},
      {"chain_matmul", [](Inputs& in) { return at::chain_matmul({in(3, 4), in(4, 5), in(5, 2)}); }},
      {.op = "einsum",
       .call = [](Inputs& in) { return at::einsum("ij,jk->ik", {in(3, 4), in(4, 5)}); },
       .ends_in_product = true},
      {"linalg_multi_dot", [](Inputs& in) { return at::linalg_multi_dot({in(3, 4), in(4, 5), in(5, 2)}); }},
      {"linalg_vecdot", [](Inputs& in) { return at::linalg_vecdot(in(3, 4), in(3, 4)); }},
      {"linear", [](Inputs& in) { return at::linear(in(3, 4), in(5, 4), in(5)); }},
      {"matmul", [](Inputs& in) { return at::matmul(in(3, 4), in(4, 5)); }},
      {"mm", [](Inputs& in) { return at::mm(in(3, 4), in(4, 5)); }},
      {"mv", [](Inputs& in) { return at::mv(in(3, 4), in(4)); }},
      {.op = "tensordot",
       .call = [](Inputs& in) { return at::tensordot(in(3, 4), in(4, 5), {1}, {0}); },
       .ends_in_product = true},
      {"prelu", [](Inputs& in) { return at::prelu(in(3, 4), in(4)); }},
  };
}

std::vector<OpCase> convolutions() {
  return {
      {"conv1d", [](Inputs& in) { return at::conv1d(in(1, 2, 6), in(3, 2, 3), in(3)); }},
      {"conv2d", [](Inputs& in) { return at::conv2d(in(1, 2, 6, 6), in(3, 2, 3, 3), in(3)); }},
      {"conv3d", [](Inputs& in) { return at::conv3d(in(1, 2, 4, 4, 4), in(3, 2, 3, 3, 3), in(3)); }},
      {"conv1d.padding", [](Inputs& in) { return at::conv1d(in(1, 2, 6), in(3, 2, 3), in(3), 1, "same"); }},
      {"conv2d.padding",
       [](Inputs& in) { return at::conv2d(in(1, 2, 6, 6), in(3, 2, 3, 3), in(3), 1, "same"); }},
      {"conv3d.padding",
       [](Inputs& in) { return at::conv3d(in(1, 2, 4, 4, 4), in(3, 2, 3, 3, 3), in(3), 1, "same"); }},
      {"conv_tbc", [](Inputs& in) { return at::conv_tbc(in(6, 1, 2), in(3, 2, 3), in(3)); }},
      {"conv_transpose1d", [](Inputs& in) { return at::conv_transpose1d(in(1, 2, 6), in(2, 3, 3), in(3)); }},
      {"conv_transpose2d.input",
       [](Inputs& in) { return at::conv_transpose2d(in(1, 2, 6, 6), in(2, 3, 3, 3), in(3)); }},
      {"conv_transpose3d.input",
       [](Inputs& in) { return at::conv_transpose3d(in(1, 2, 4, 4, 4), in(2, 3, 3, 3, 3), in(3)); }},
      {"convolution",
       [](Inputs& in) {
         return at::convolution(in(1, 2, 6, 6), in(3, 2, 3, 3), in(3), {1, 1}, {0, 0}, {1, 1}, false, {0, 0},
                                1);
       }},
      {"_convolution",
       [](Inputs& in) {
         return at::_convolution(in(1, 2, 6, 6), in(3, 2, 3, 3), in(3), {1, 1}, {0, 0}, {1, 1}, false, {0, 0},
                                 1, false, false, false, false);
       }},
      {"_convolution.deprecated",
       [](Inputs& in) {
         return at::_convolution(in(1, 2, 6, 6), in(3, 2, 3, 3), in(3), {1, 1}, {0, 0}, {1, 1}, false, {0, 0},
                                 1, false, false, false);
       }},
  };
}

Tensor packed_batch_sizes() { return at::tensor({2}, at::kLong); }

/// Input, state and weights of one recurrent layer, 4 wide, with a batch of two. One step, so that a weight
/// is used once: stock's cache of cast weights would change the bits of a second use.
struct RecurrentLayer {
  RecurrentLayer(Inputs& in, int64_t gates, bool packed)
      : input(packed ? in(2, 4) : in(1, 2, 4)),
        h(in(1, 2, 4)),
        weights{in(4 * gates, 4), in(4 * gates, 4), in(4 * gates), in(4 * gates)} {}
  Tensor input, h;
  std::vector<Tensor> weights;
};

OpCase recurrent_layer(std::string_view op, int64_t gates, bool ends_in_product,
                       std::tuple<Tensor, Tensor> (*function)(const Tensor&, const Tensor&, at::TensorList,
                                                              bool, int64_t, double, bool, bool, bool)) {
  return {.op = op,
          .call =
              [=](Inputs& in) {
                const RecurrentLayer layer(in, gates, false);
                return std::get<0>(
                    function(layer.input, layer.h, layer.weights, true, 1, 0.0, true, false, false));
              },
          .ends_in_product = ends_in_product};
}

OpCase packed_recurrent_layer(std::string_view op, int64_t gates, bool ends_in_product,
                              std::tuple<Tensor, Tensor> (*function)(const Tensor&, const Tensor&,
                                                                     const Tensor&, at::TensorList, bool,
                                                                     int64_t, double, bool, bool)) {
  return {.op = op,
          .call =
              [=](Inputs& in) {
                const RecurrentLayer layer(in, gates, true);
                return std::get<0>(function(layer.input, packed_batch_sizes(), layer.h, layer.weights, true,
                                            1, 0.0, true, false));
              },
          .ends_in_product = ends_in_product};
}

std::vector<OpCase> attention_and_recurrence() {
  return {
      {"scaled_dot_product_attention",
       [](Inputs& in) {
         return at::scaled_dot_product_attention(in(1, 2, 4, 8), in(1, 2, 4, 8), in(1, 2, 4, 8));
       }},
      {"_native_multi_head_attention",
       [](Inputs& in) {
         const Tensor x = in(2, 3, 8);
         return std::get<0>(
             at::_native_multi_head_attention(x, x, x, 8, 2, in(24, 8), in(24), in(8, 8), in(8)));
       },
       /*differentiable=*/false},
      {"gru_cell",
       [](Inputs& in) { return at::gru_cell(in(2, 4), in(2, 4), in(12, 4), in(12, 4), in(12), in(12)); }},
      {"lstm_cell",
       [](Inputs& in) {
         return std::get<0>(
             at::lstm_cell(in(2, 4), {in(2, 4), in(2, 4)}, in(16, 4), in(16, 4), in(16), in(16)));
       }},
      {.op = "rnn_relu_cell",
       .call =
           [](Inputs& in) { return at::rnn_relu_cell(in(2, 4), in(2, 4), in(4, 4), in(4, 4), in(4), in(4)); },
       .ends_in_product = true},
      {.op = "rnn_tanh_cell",
       .call =
           [](Inputs& in) { return at::rnn_tanh_cell(in(2, 4), in(2, 4), in(4, 4), in(4, 4), in(4), in(4)); },
       .ends_in_product = true},
      recurrent_layer("gru.input", 3, false, at::gru),
      packed_recurrent_layer("gru.data", 3, false, at::gru),
      recurrent_layer("rnn_relu.input", 1, true, at::rnn_relu),
      packed_recurrent_layer("rnn_relu.data", 1, true, at::rnn_relu),
      recurrent_layer("rnn_tanh.input", 1, true, at::rnn_tanh),
      packed_recurrent_layer("rnn_tanh.data", 1, true, at::rnn_tanh),
      {.op = "lstm.input",
       .call =
           [](Inputs& in) {
             const RecurrentLayer layer(in, 4, false);
             return std::get<0>(at::lstm(layer.input, {layer.h, in(1, 2, 4)}, layer.weights, true, 1, 0.0,
                                         true, false, false));
           },
       .has_fp16_kernel = false,
       .ends_in_product = true},
      {.op = "lstm.data",
       .call =
           [](Inputs& in) {
             const RecurrentLayer layer(in, 4, true);
             return std::get<0>(at::lstm(layer.input, packed_batch_sizes(), {layer.h, in(1, 2, 4)},
                                         layer.weights, true, 1, 0.0, true, false));
           },
       .has_fp16_kernel = false,
       .ends_in_product = true},
      {"mkldnn_rnn_layer",
       [](Inputs& in) {
         constexpr int64_t kLstm = 2;
         return std::get<0>(at::mkldnn_rnn_layer(in(3, 2, 4), in(16, 4), in(16, 4), in(16), in(16),
                                                 in(1, 2, 4), in(1, 2, 4), false, {}, kLstm, 4, 1, true,
                                                 false, false, true));
       },
       /*differentiable=*/true, /*has_fp16_kernel=*/false},
  };
}

std::vector<OpCase> norms_and_softmax() {
  return {
      {"batch_norm",
       [](Inputs& in) {
         return at::batch_norm(in(3, 4), in(4), in(4), in.put(at::zeros(4)), in.put(at::ones(4)), true, 0.1,
                               1e-5, false);
       }},
      {"instance_norm",
       [](Inputs& in) {
         return at::instance_norm(in(2, 4, 5), in(4), in(4), in.put(at::zeros(4)), in.put(at::ones(4)), true,
                                  0.1, 1e-5, false);
       }},
      {"group_norm", [](Inputs& in) { return at::group_norm(in(3, 4), 2, in(4), in(4)); }},
      {"layer_norm", [](Inputs& in) { return at::layer_norm(in(3, 4), {4}, in(4), in(4)); }},
      {"native_layer_norm",
       [](Inputs& in) { return std::get<0>(at::native_layer_norm(in(3, 4), {4}, in(4), in(4), 1e-5)); }},
      {"gelu", [](Inputs& in) { return at::gelu(in(3, 4)); }},
      {"silu", [](Inputs& in) { return at::silu(in(3, 4)); }},
      {"halfstep::swiglu", [](Inputs& in) { return by_name("halfstep::swiglu", in(3, 4), in(3, 4)); }},
      {"halfstep::rotary",
       [](Inputs& in) { return by_name("halfstep::rotary", in(2, 3, 4, 6), in(4, 6), in(4, 6)); }},
      {"halfstep::layer_norm",
       [](Inputs& in) { return by_name("halfstep::layer_norm", in(3, 4), in(4), in(4), 1e-5); }},
      {"halfstep::rms_norm", [](Inputs& in) { return by_name("halfstep::rms_norm", in(3, 4), in(4), 1e-5); }},
      {"rms_norm", [](Inputs& in) { return at::rms_norm(in(3, 4), {4}, in(4)); }},
      {"softmax.int", [](Inputs& in) { return at::softmax(in(3, 4), -1); }},
      {"log_softmax.int", [](Inputs& in) { return at::log_softmax(in(3, 4), -1); }},
      {"logsumexp", [](Inputs& in) { return at::logsumexp(in(3, 4), {1}); }},
      {"logcumsumexp", [](Inputs& in) { return at::logcumsumexp(in(3, 4), 1); }},
  };
}

std::vector<OpCase> losses() {
  return {
      paired_loss("l1_loss", at::l1_loss),
      paired_loss("mse_loss", at::mse_loss),
      {"smooth_l1_loss", [](Inputs& in) { return at::smooth_l1_loss(in(3, 4), in(3, 4)); }},
      {"huber_loss", [](Inputs& in) { return at::huber_loss(in(3, 4), in(3, 4)); }},
      {"kl_div", [](Inputs& in) { return at::kl_div(in(3, 4), in(3, 4)); }},
      {"binary_cross_entropy",
       [](Inputs& in) {
         const at::Tensor probabilities =
             in(3, 4);  // first: compilers differ in which argument they make first
         return at::binary_cross_entropy(probabilities, in(3, 4));
       }},
      {"binary_cross_entropy_with_logits",
       [](Inputs& in) {
         return at::binary_cross_entropy_with_logits(in(3, 4), in(3, 4), in.fixed(4), in.fixed(4));
       }},
      {"poisson_nll_loss",
       [](Inputs& in) { return at::poisson_nll_loss(in(3, 4), in(3, 4), true, true, 1e-8, kMean); }},
      {"soft_margin_loss", [](Inputs& in) { return at::soft_margin_loss(in(4), in.put(plus_minus_one(4))); }},
      {"hinge_embedding_loss",
       [](Inputs& in) { return at::hinge_embedding_loss(in(4), in.put(plus_minus_one(4))); }},
      {"margin_ranking_loss",
       [](Inputs& in) { return at::margin_ranking_loss(in(4), in(4), in.put(plus_minus_one(4)), 0.5); }},
      {"cosine_embedding_loss",
       [](Inputs& in) { return at::cosine_embedding_loss(in(4, 3), in(4, 3), in.put(plus_minus_one(4))); }},
      {"triplet_margin_loss",
       [](Inputs& in) { return at::triplet_margin_loss(in(3, 4), in(3, 4), in(3, 4)); }},
      {"cross_entropy_loss",
       [](Inputs& in) { return at::cross_entropy_loss(in(3, 4), in.put(classes(3, 4)), in.fixed(4)); }},
      {"nll_loss", [](Inputs& in) { return at::nll_loss(in(3, 4), in.put(classes(3, 4)), in.fixed(4)); }},
      {"nll_loss2d",
       [](Inputs& in) {
         return at::nll_loss2d(in(2, 4, 3, 3), in.put(at::ones({2, 3, 3}, at::kLong)), in.fixed(4));
       }},
      {"multi_margin_loss",
       [](Inputs& in) { return at::multi_margin_loss(in(3, 4), in.put(classes(3, 4)), 1, 1, in.fixed(4)); }},
      {"multilabel_margin_loss",
       [](Inputs& in) {
         return at::multilabel_margin_loss(in(3, 4), in.put(at::arange(4).repeat({3, 1}).sub(1).abs()));
       }},
      {"multilabel_margin_loss_forward",
       [](Inputs& in) {
         return std::get<0>(at::multilabel_margin_loss_forward(
             in(3, 4), in.put(at::arange(4).repeat({3, 1}).sub(1).abs()), kMean));
       }},
      {"ctc_loss.IntList",
       [](Inputs& in) {
         return at::ctc_loss(in(6, 2, 4), in.put(at::ones({2, 2}, at::kLong)), {6, 6}, {2, 2}, 0, kSum);
       }},
      {"ctc_loss.Tensor",
       [](Inputs& in) {
         return at::ctc_loss(in(6, 2, 4), in.put(at::ones({2, 2}, at::kLong)),
                             in.put(at::full({2}, 6, at::kLong)), in.put(at::full({2}, 2, at::kLong)), 0,
                             kSum);
       }},
  };
}

std::vector<OpCase> pointwise() {
  return {
      unary("acos", at::acos),
      unary("asin", at::asin),
      unary("cosh", at::cosh),
      unary("erfinv", at::erfinv),
      unary("exp", at::exp),
      unary("exp2", at::exp2),
      unary("expm1", at::expm1),
      unary("log_sigmoid", at::log_sigmoid),
      unary("sigmoid", at::sigmoid),
      {"logaddexp", [](Inputs& in) { return at::logaddexp(in(3, 4), in(3, 4)); }},
      {"logaddexp2", [](Inputs& in) { return at::logaddexp2(in(3, 4), in(3, 4)); }},
      unary("log", at::log),
      unary("log10", at::log10),
      unary("log1p", at::log1p),
      unary("log2", at::log2),
      unary("reciprocal", at::reciprocal),
      unary("rsqrt", at::rsqrt),
      unary("sinh", at::sinh),
      unary("tan", at::tan),
      {"softplus", [](Inputs& in) { return at::softplus(in(3, 4)); }},
      {"pow.Scalar", [](Inputs& in) { return at::pow(2.5, in(3, 4)); }},
      {"pow.Tensor_Scalar", [](Inputs& in) { return at::pow(in(3, 4), 1.5); }},
      {"pow.Tensor_Tensor", [](Inputs& in) { return at::pow(in(3, 4), in(3, 4)); }},
  };
}

std::vector<OpCase> reductions() {
  return {
      {"cumprod", [](Inputs& in) { return at::cumprod(in(3, 4), 1); }},
      {"cumsum", [](Inputs& in) { return at::cumsum(in(3, 4), 1); }},
      {"mean", [](Inputs& in) { return at::mean(in(3, 4)); }},
      {"mean.dim", [](Inputs& in) { return at::mean(in(3, 4), {1}); }},
      {"nansum", [](Inputs& in) { return at::nansum(in(3, 4)); }},
      {"prod", [](Inputs& in) { return at::prod(in(3, 4)); }},
      {"prod.dim_int", [](Inputs& in) { return at::prod(in(3, 4), 1); }},
      {"std.correction", [](Inputs& in) { return at::std(in(3, 4), at::OptionalIntArrayRef({1}), 1); }},
      {"std_mean.correction",
       [](Inputs& in) { return std::get<0>(at::std_mean(in(3, 4), at::OptionalIntArrayRef({1}), 1)); }},
      {"var_mean.correction",
       [](Inputs& in) { return std::get<0>(at::var_mean(in(3, 4), at::OptionalIntArrayRef({1}), 1)); }},
      {"sum", [](Inputs& in) { return at::sum(in(3, 4)); }},
      {"sum.dim_IntList", [](Inputs& in) { return at::sum(in(3, 4), {1}); }},
      {"trace", [](Inputs& in) { return at::trace(in(4, 4)); }},
      {"var.correction", [](Inputs& in) { return at::var(in(3, 4), at::OptionalIntArrayRef({1}), 1); }},
      {"cdist", [](Inputs& in) { return at::cdist(in(3, 4), in(5, 4)); }},
      {"cosine_similarity", [](Inputs& in) { return at::cosine_similarity(in(3, 4), in(3, 4)); }},
      {"dist", [](Inputs& in) { return at::dist(in(3, 4), in(3, 4)); }},
      {"frobenius_norm.dim", [](Inputs& in) { return at::frobenius_norm(in(3, 4), {1}); }},
      {"linalg_matrix_norm", [](Inputs& in) { return at::linalg_matrix_norm(in(3, 4), 2); }},
      {"linalg_matrix_norm.str_ord", [](Inputs& in) { return at::linalg_matrix_norm(in(3, 4), "nuc"); }},
      {"linalg_vector_norm", [](Inputs& in) { return at::linalg_vector_norm(in(3, 4)); }},
      {"norm.Scalar", [](Inputs& in) { return at::norm(in(3, 4), 2); }},
      {"norm.ScalarOpt_dim", [](Inputs& in) { return at::norm(in(3, 4), 2, {1}, false); }},
      {"nuclear_norm", [](Inputs& in) { return at::nuclear_norm(in.spd(3)); }},
      {"nuclear_norm.dim", [](Inputs& in) { return at::nuclear_norm(in.spd(3), {0, 1}); }},
      {"pdist", [](Inputs& in) { return at::pdist(in(3, 4)); }},
      {"renorm", [](Inputs& in) { return at::renorm(in(3, 4), 2, 0, 0.5); }},
      {"quantile", [](Inputs& in) { return at::quantile(in(3, 4), in.fixed(2)); }},
      {"quantile.scalar", [](Inputs& in) { return at::quantile(in(3, 4), 0.3); }},
      {"nanquantile", [](Inputs& in) { return at::nanquantile(in(3, 4), in.fixed(2)); }},
      {"nanquantile.scalar", [](Inputs& in) { return at::nanquantile(in(3, 4), 0.3); }},
      {"fake_quantize_per_tensor_affine",
       [](Inputs& in) { return at::fake_quantize_per_tensor_affine(in(3, 4), 0.01, 0, 0, 255); }},
  };
}

std::vector<OpCase> images() {
  return {
      {"grid_sampler",
       [](Inputs& in) { return at::grid_sampler(in(1, 2, 4, 4), in(1, 3, 3, 2), 0, 0, false); }},
      {"grid_sampler_2d",
       [](Inputs& in) { return at::grid_sampler_2d(in(1, 2, 4, 4), in(1, 3, 3, 2), 0, 0, false); }},
      {"grid_sampler_3d",
       [](Inputs& in) { return at::grid_sampler_3d(in(1, 2, 4, 4, 4), in(1, 3, 3, 3, 3), 0, 0, false); }},
      {"_grid_sampler_2d_cpu_fallback",
       [](Inputs& in) {
         return at::_grid_sampler_2d_cpu_fallback(in(1, 2, 4, 4), in(1, 3, 3, 2), 0, 0, false);
       }},
      {"upsample_nearest1d", [](Inputs& in) { return at::upsample_nearest1d(in(1, 2, 4), {8}); }},
      {"upsample_nearest2d", [](Inputs& in) { return at::upsample_nearest2d(in(1, 2, 4, 4), {8, 8}); }},
      {"upsample_nearest3d", [](Inputs& in) { return at::upsample_nearest3d(in(1, 2, 4, 4, 4), {8, 8, 8}); }},
      {"_upsample_nearest_exact1d",
       [](Inputs& in) { return at::_upsample_nearest_exact1d(in(1, 2, 4), {8}); }},
      {"_upsample_nearest_exact2d",
       [](Inputs& in) { return at::_upsample_nearest_exact2d(in(1, 2, 4, 4), {8, 8}); }},
      {"_upsample_nearest_exact3d",
       [](Inputs& in) { return at::_upsample_nearest_exact3d(in(1, 2, 4, 4, 4), {8, 8, 8}); }},
      {"upsample_linear1d", [](Inputs& in) { return at::upsample_linear1d(in(1, 2, 4), {8}, false); }},
      {"upsample_bilinear2d",
       [](Inputs& in) { return at::upsample_bilinear2d(in(1, 2, 4, 4), {8, 8}, false); }},
      {"_upsample_bilinear2d_aa",
       [](Inputs& in) { return at::_upsample_bilinear2d_aa(in(1, 2, 4, 4), {8, 8}, false); }},
      {"upsample_bicubic2d",
       [](Inputs& in) { return at::upsample_bicubic2d(in(1, 2, 4, 4), {8, 8}, false); }},
      {"_upsample_bicubic2d_aa",
       [](Inputs& in) { return at::_upsample_bicubic2d_aa(in(1, 2, 4, 4), {8, 8}, false); }},
      {"upsample_trilinear3d",
       [](Inputs& in) { return at::upsample_trilinear3d(in(1, 2, 4, 4, 4), {8, 8, 8}, false); }},
      {"adaptive_avg_pool3d",
       [](Inputs& in) { return at::adaptive_avg_pool3d(in(1, 2, 4, 4, 4), {2, 2, 2}); }},
      {"avg_pool3d", [](Inputs& in) { return at::avg_pool3d(in(1, 2, 4, 4, 4), 2); }},
      {"fractional_max_pool2d",
       [](Inputs& in) {
         return std::get<0>(at::fractional_max_pool2d(in(1, 2, 6, 6), {2, 2}, {3, 3}, in.fixed(1, 2, 2)));
       }},
      {"fractional_max_pool3d",
       [](Inputs& in) {
         return std::get<0>(
             at::fractional_max_pool3d(in(1, 2, 6, 6, 6), {2, 2, 2}, {3, 3, 3}, in.fixed(1, 2, 3)));
       }},
      {"adaptive_max_pool3d",
       [](Inputs& in) { return std::get<0>(at::adaptive_max_pool3d(in(1, 2, 4, 4, 4), {2, 2, 2})); }},
      {"max_pool3d", [](Inputs& in) { return at::max_pool3d(in(1, 2, 4, 4, 4), 2); }},
      {"max_unpool2d",
       [](Inputs& in) {
         return at::max_unpool2d(in(1, 1, 2, 2), in.put(at::arange(4).mul(4).view({1, 1, 2, 2})), {4, 4});
       }},
      {"max_unpool3d",
       [](Inputs& in) {
         return at::max_unpool3d(in(1, 1, 2, 2, 2), in.put(at::arange(8).mul(8).view({1, 1, 2, 2, 2})),
                                 {4, 4, 4}, {2, 2, 2}, {0, 0, 0});
       }},
      {"reflection_pad1d", [](Inputs& in) { return at::reflection_pad1d(in(1, 2, 4), {1, 1}); }},
      {"reflection_pad2d", [](Inputs& in) { return at::reflection_pad2d(in(1, 2, 4, 4), {1, 1, 1, 1}); }},
      {"replication_pad1d", [](Inputs& in) { return at::replication_pad1d(in(1, 2, 4), {1, 1}); }},
      {"replication_pad2d", [](Inputs& in) { return at::replication_pad2d(in(1, 2, 4, 4), {1, 1, 1, 1}); }},
      {"replication_pad3d",
       [](Inputs& in) { return at::replication_pad3d(in(1, 2, 4, 4, 4), {1, 1, 1, 1, 1, 1}); }},
  };
}

std::vector<OpCase> several_tensors() {
  return {
      {"addcdiv", [](Inputs& in) { return at::addcdiv(in(3, 4), in(3, 4), in(3, 4)); }},
      {"addcmul", [](Inputs& in) { return at::addcmul(in(3, 4), in(3, 4), in(3, 4)); }},
      {"atan2", [](Inputs& in) { return at::atan2(in(3, 4), in(3, 4)); }},
      {"bilinear", [](Inputs& in) { return at::bilinear(in(3, 4), in(3, 5), in(2, 4, 5), in(2)); }},
      {"cat", [](Inputs& in) { return at::cat({in(3, 4), in(3, 4)}); }},
      {"stack", [](Inputs& in) { return at::stack({in(3, 4), in(3, 4)}); }},
      {"cross", [](Inputs& in) { return at::cross(in(4, 3), in(4, 3), 1); }},
      {"dot", [](Inputs& in) { return at::dot(in(4), in(4)); }},
      {"vdot", [](Inputs& in) { return at::vdot(in(4), in(4)); }},
      {"embedding_bag",
       [](Inputs& in) {
         const Tensor table = in(5, 4);
         return std::get<0>(at::embedding_bag(table, in.put(at::arange(4)), in.put(at::arange(0, 4, 2)),
                                              false, 0, false, in(4)));
       }},
      {"embedding_bag.padding_idx",
       [](Inputs& in) {
         const Tensor table = in(5, 4);
         return std::get<0>(at::embedding_bag(table, in.put(at::arange(4)), in.put(at::arange(0, 4, 2)),
                                              false, 0, false, in(4), false, std::optional<int64_t>(1)));
       }},
      {"index_add_",
       [](Inputs& in) { return in(3, 4).clone().index_add_(0, in.put(at::arange(2)), in(2, 4)); }},
      {"index_copy_",
       [](Inputs& in) { return in(3, 4).clone().index_copy_(0, in.put(at::arange(2)), in(2, 4)); }},
      {"index_put_",
       [](Inputs& in) { return in(3, 4).clone().index_put_({in.put(at::arange(2))}, in(2, 4)); }},
      {"masked_scatter_",
       [](Inputs& in) {
         return in(3, 4).clone().masked_scatter_(in.put(at::arange(12).view({3, 4}) < 5), in(3, 4));
       }},
      {"scatter_.src",
       [](Inputs& in) {
         return in(3, 4).clone().scatter_(0, in.put(at::zeros({1, 4}, at::kLong)), in(1, 4));
       }},
      {"scatter_add_",
       [](Inputs& in) {
         return in(3, 4).clone().scatter_add_(0, in.put(at::zeros({1, 4}, at::kLong)), in(1, 4));
       }},
      {"index_add", [](Inputs& in) { return at::index_add(in(3, 4), 0, in.put(at::arange(2)), in(2, 4)); }},
      {"index_reduce",
       [](Inputs& in) { return at::index_reduce(in(3, 4), 0, in.put(at::arange(2)), in(2, 4), "amax"); }},
      {"lerp.Scalar", [](Inputs& in) { return at::lerp(in(3, 4), in(3, 4), 0.25); }},
      {"lerp.Tensor", [](Inputs& in) { return at::lerp(in(3, 4), in(3, 4), in(3, 4)); }},
      {"masked_scatter",
       [](Inputs& in) {
         return at::masked_scatter(in(3, 4), in.put(at::eye(3, 4).to(at::kBool)), in(3, 4));
       }},
      {.op = "scatter.reduce",
       .call =
           [](Inputs& in) {
             return at::scatter(in(3, 4), 0, in.put(at::zeros({2, 4}, at::kLong)), in(2, 4), "add");
           },
       .differentiable = false},
      {"scatter.src",
       [](Inputs& in) { return at::scatter(in(3, 4), 0, in.put(at::arange(8).view({2, 4}) % 3), in(2, 4)); }},
      {"scatter_reduce.two",
       [](Inputs& in) {
         return at::scatter_reduce(in(3, 4), 0, in.put(at::zeros({2, 4}, at::kLong)), in(2, 4), "sum");
       }},
      {"index_copy", [](Inputs& in) { return at::index_copy(in(3, 4), 0, in.put(at::arange(2)), in(2, 4)); }},
      {"index_put", [](Inputs& in) { return at::index_put(in(3, 4), {in.put(at::arange(2))}, in(2, 4)); }},
      {"scatter_add",
       [](Inputs& in) {
         return at::scatter_add(in(3, 4), 0, in.put(at::zeros({2, 4}, at::kLong)), in(2, 4));
       }},
  };
}

std::vector<OpCase> fourier_and_complex() {
  return {
      fourier("fft_fft", at::fft_fft),
      fourier("fft_ifft", at::fft_ifft),
      fourier("fft_rfft", at::fft_rfft),
      fourier("fft_irfft", at::fft_irfft),
      fourier("fft_hfft", at::fft_hfft),
      fourier("fft_ihfft", at::fft_ihfft),
      fourier2("fft_fft2", at::fft_fft2),
      fourier2("fft_ifft2", at::fft_ifft2),
      fourier2("fft_rfft2", at::fft_rfft2),
      fourier2("fft_irfft2", at::fft_irfft2),
      fourier_n("fft_fftn", at::fft_fftn),
      fourier_n("fft_ifftn", at::fft_ifftn),
      fourier_n("fft_rfftn", at::fft_rfftn),
      fourier_n("fft_irfftn", at::fft_irfftn),
      {"stft",
       [](Inputs& in) {
         return at::_ops::stft::call(in(16), 4, 2, 4, in.fixed(4), false, true, true, std::nullopt);
       }},
      {"stft.center",
       [](Inputs& in) {
         return at::_ops::stft_center::call(in(16), 4, 2, 4, in.fixed(4), true, "reflect", false, true, true,
                                            std::nullopt);
       }},
      {"polar", [](Inputs& in) { return at::polar(in(3, 4), in(3, 4)); }},
      {"view_as_complex", [](Inputs& in) { return at::view_as_complex(in(3, 2)); }},
  };
}

std::vector<OpCase> linear_algebra() {
  constexpr bool kNotDifferentiable = false;
  return {
      {"cholesky", [](Inputs& in) { return at::cholesky(in.spd(3)); }},
      {"cholesky_inverse", [](Inputs& in) { return at::cholesky_inverse(in.spd(3)); }},
      {"cholesky_solve", [](Inputs& in) { return at::cholesky_solve(in(3, 2), in.spd(3)); }},
      {"geqrf", [](Inputs& in) { return std::get<0>(at::geqrf(in.spd(3))); }, kNotDifferentiable},
      {"inverse", [](Inputs& in) { return at::inverse(in.spd(3)); }},
      {"linalg_cholesky", [](Inputs& in) { return at::linalg_cholesky(in.spd(3)); }},
      {"linalg_cholesky_ex", [](Inputs& in) { return std::get<0>(at::linalg_cholesky_ex(in.spd(3))); }},
      {"linalg_cond", [](Inputs& in) { return at::linalg_cond(in.spd(3)); }},
      // LibTorch 2.13 spoils its own backward, with and without autocast: it changes the saved inverse in
      // place.
      {"linalg_cond.p_str", [](Inputs& in) { return at::linalg_cond(in.spd(3), "fro"); }, kNotDifferentiable},
      {"linalg_eig", [](Inputs& in) { return std::get<0>(at::linalg_eig(in.spd(3))); }},
      {"linalg_eigh", [](Inputs& in) { return std::get<0>(at::linalg_eigh(in.spd(3))); }},
      {"linalg_eigvals", [](Inputs& in) { return at::linalg_eigvals(in.spd(3)); }},
      {"linalg_eigvalsh", [](Inputs& in) { return at::linalg_eigvalsh(in.spd(3)); }},
      {"linalg_householder_product",
       [](Inputs& in) { return at::linalg_householder_product(in.spd(3), in(3)); }},
      {"linalg_inv", [](Inputs& in) { return at::linalg_inv(in.spd(3)); }},
      {"linalg_inv_ex", [](Inputs& in) { return std::get<0>(at::linalg_inv_ex(in.spd(3))); }},
      // "gels", because the bits of the default driver change from one call to the next.
      {"linalg_lstsq",
       [](Inputs& in) { return std::get<0>(at::linalg_lstsq(in.spd(3), in(3, 2), std::nullopt, "gels")); }},
      {"linalg_matrix_rank",
       [](Inputs& in) { return at::_ops::linalg_matrix_rank::call(in.spd(3), 0.1, false); },
       kNotDifferentiable},
      {"linalg_matrix_rank.tol_tensor",
       [](Inputs& in) {
         return at::_ops::linalg_matrix_rank_tol_tensor::call(in.spd(3), in.fixed(1), false);
       },
       kNotDifferentiable},
      {"linalg_matrix_rank.atol_rtol_float",
       [](Inputs& in) {
         return at::_ops::linalg_matrix_rank_atol_rtol_float::call(in.spd(3), 0.1, std::nullopt, false);
       },
       kNotDifferentiable},
      {"linalg_matrix_rank.atol_rtol_tensor",
       [](Inputs& in) {
         return at::_ops::linalg_matrix_rank_atol_rtol_tensor::call(in.spd(3), in.fixed(1), std::nullopt,
                                                                    false);
       },
       kNotDifferentiable},
      {"linalg_qr", [](Inputs& in) { return std::get<0>(at::linalg_qr(in.spd(3))); }},
      {"linalg_solve", [](Inputs& in) { return at::linalg_solve(in.spd(3), in(3, 2)); }},
      {"linalg_svd", [](Inputs& in) { return std::get<1>(at::linalg_svd(in.spd(3))); }},
      {"linalg_svdvals", [](Inputs& in) { return at::linalg_svdvals(in.spd(3)); }},
      {"linalg_tensorinv", [](Inputs& in) { return at::linalg_tensorinv(in.spd(3), 1); }},
      {"linalg_tensorsolve", [](Inputs& in) { return at::linalg_tensorsolve(in.spd(3), in(3)); }},
      {"_lu_with_info", [](Inputs& in) { return std::get<0>(at::_lu_with_info(in.spd(3))); }},
      {"lu_solve",
       [](Inputs& in) { return at::lu_solve(in(3, 2), in.spd(3), in.put(at::arange(1, 4, at::kInt))); }},
      {"orgqr", [](Inputs& in) { return at::orgqr(in.spd(3), in(3)); }},
      {"ormqr", [](Inputs& in) { return at::ormqr(in.spd(3), in(3), in(3, 2)); }},
      {"pinverse", [](Inputs& in) { return at::pinverse(in.spd(3)); }},
      {"qr", [](Inputs& in) { return std::get<0>(at::qr(in.spd(3))); }},
      {"svd", [](Inputs& in) { return std::get<1>(at::svd(in.spd(3))); }},
      {"triangular_solve", [](Inputs& in) { return std::get<0>(at::triangular_solve(in(3, 2), in.spd(3))); }},
  };
}

constexpr OpWithoutCpuKernel kWithoutCpuKernel[] = {
    {"_scaled_dot_product_flash_attention",
     "CUDA only; the CPU's is _scaled_dot_product_flash_attention_for_cpu"},
    {"_thnn_fused_gru_cell", "CUDA only; gru_cell calls it there"},
    {"_thnn_fused_lstm_cell", "CUDA only; lstm_cell calls it there"},
    {"cudnn_convolution", "cuDNN only"},
    {"cudnn_convolution_transpose", "cuDNN only"},
};

}  // namespace

std::span<const OpCase> op_cases() {
  static const std::vector<OpCase> cases = concat(
      {products(), convolutions(), attention_and_recurrence(), norms_and_softmax(), losses(), pointwise(),
       reductions(), images(), several_tensors(), fourier_and_complex(), linear_algebra()});
  return cases;
}

std::span<const OpWithoutCpuKernel> ops_without_cpu_kernel() { return kWithoutCpuKernel; }

}  // namespace halfstep::testing
