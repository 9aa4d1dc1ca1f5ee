// LibTorch's modules and functions, trained for one step in each precision and storage of weights: nothing
// throws, and loss and gradients are those of FP32 within what the roundings allow.
#include <gtest/gtest.h>
#include <halfstep/mixed_precision.h>
#include <torch/torch.h>

#include "support/any_machine.h"
#include "support/error_of.h"

namespace halfstep::testing {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

/// Holds the modules of one case.
struct Parts : nn::Module {
  template <typename Holder>
  Holder add(Holder module) {
    register_module("part" + std::to_string(count++), module);
    return module;
  }
  int count = 0;
};

/// Makes the modules and inputs; what it returns computes the loss.
using Make = std::function<Tensor()> (*)(Parts&);

struct ModuleCase {
  const char* name;
  Make make;
  /// Roundings in a row between the input and the worst gradient, forward and back: products with their
  /// inputs and outputs, and elementwise operations on low tensors.
  int roundings = 8;
};

Tensor mean_square(const Tensor& y) { return y.to(torch::kFloat).pow(2).mean(); }

const ModuleCase kCases[] = {
    {"LSTM",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::LSTM(nn::LSTMOptions(16, 24).num_layers(2).batch_first(true)));
       const auto x = torch::randn({4, 10, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(x))); };
     }},
    {"LSTMOfLowInput",
     [](Parts& parts) -> std::function<Tensor()> {
       auto first = parts.add(nn::Linear(16, 16));
       auto m = parts.add(nn::LSTM(16, 24));
       const auto x = torch::randn({10, 4, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(first(x)))); };
     }},
    {"LSTMBidirectionalWithProjections",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::LSTM(nn::LSTMOptions(16, 24).bidirectional(true).proj_size(8)));
       const auto x = torch::randn({10, 4, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(x))); };
     }},
    {"LSTMWithoutBias",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::LSTM(nn::LSTMOptions(16, 24).bias(false).bidirectional(true)));
       const auto x = torch::randn({10, 4, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(x))); };
     }},
    {"LSTMOfPackedSequences",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::LSTM(16, 24));
       const auto x = torch::randn({10, 4, 16});
       return [=]() mutable {
         const auto packed = nn::utils::rnn::pack_padded_sequence(x, torch::tensor({10, 8, 5, 3}));
         return mean_square(std::get<0>(m->forward_with_packed_input(packed)).data());
       };
     }},
    {"GRU",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::GRU(nn::GRUOptions(16, 24).num_layers(2)));
       const auto x = torch::randn({10, 4, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(x))); };
     }},
    {"RNN",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::RNN(16, 24));
       const auto x = torch::randn({10, 4, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(x))); };
     }},
    {"RecurrentCells",
     [](Parts& parts) -> std::function<Tensor()> {
       auto lstm = parts.add(nn::LSTMCell(16, 24));
       auto gru = parts.add(nn::GRUCell(16, 24));
       auto rnn = parts.add(nn::RNNCell(16, 24));
       const auto x = torch::randn({4, 16});
       return [=]() mutable {
         return mean_square(std::get<0>(lstm(x))) + mean_square(gru(x)) + mean_square(rnn(x));
       };
     }},
    {"MultiheadAttention",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::MultiheadAttention(nn::MultiheadAttentionOptions(32, 4)));
       const auto x = torch::randn({10, 4, 32});
       return [=]() mutable { return mean_square(std::get<0>(m(x, x, x)) - 1.0); };
     }},
    // Not with a key_padding_mask: the C++ frontend of LibTorch 2.13 fills it into FP32 scores only.
    {"MultiheadAttentionWithKeyBias",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::MultiheadAttention(
           nn::MultiheadAttentionOptions(32, 4).add_bias_kv(true).add_zero_attn(true).kdim(16).vdim(16)));
       const auto x = torch::randn({10, 4, 32}), k = torch::randn({6, 4, 16});
       return [=]() mutable { return mean_square(std::get<0>(m(x, k, k)) - 1.0); };
     }},
    {"Transformer",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m =
           parts.add(nn::Transformer(nn::TransformerOptions(32, 4, 2, 2).dim_feedforward(64).dropout(0)));
       const auto x = torch::randn({10, 4, 32}), y = torch::randn({7, 4, 32});
       return [=]() mutable { return mean_square(m(x, y) - 1.0); };
     },
     24},
    {"TransformerEncoderWithMask",
     [](Parts& parts) -> std::function<Tensor()> {
       const nn::TransformerEncoderLayer layer(
           nn::TransformerEncoderLayerOptions(32, 4).dim_feedforward(64).dropout(0).activation(torch::kGELU));
       auto m = parts.add(nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2)));
       const auto x = torch::randn({10, 4, 32});
       const auto mask = torch::full({10, 10}, -INFINITY).triu(1);
       return [=]() mutable { return mean_square(m(x, mask) - 1.0); };
     },
     24},
    {"EmbeddingBagWithSampleWeights",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::EmbeddingBag(nn::EmbeddingBagOptions(50, 16).mode(torch::kSum)));
       const auto ids = torch::randint(50, {4, 6}, torch::kLong);
       const auto weights = torch::rand({4, 6});
       return [=]() mutable { return mean_square(m->forward(ids, {}, weights)); };
     }},
    {"EmbeddingBagMean",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::EmbeddingBag(nn::EmbeddingBagOptions(50, 16).mode(torch::kMean)));
       const auto ids = torch::randint(50, {4, 6}, torch::kLong);
       return [=]() mutable { return mean_square(m->forward(ids)); };
     }},
    {"AdaptiveLogSoftmax",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(
           nn::AdaptiveLogSoftmaxWithLoss(nn::AdaptiveLogSoftmaxWithLossOptions(32, 100, {10, 50})));
       auto first = parts.add(nn::Linear(32, 32));
       const auto x = torch::randn({16, 32});
       const auto target = torch::randint(100, {16}, torch::kLong);
       return [=]() mutable { return -m(first(x), target).output.to(torch::kFloat).mean(); };
     }},
    {"AdaptiveLogSoftmaxOfFp32",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(
           nn::AdaptiveLogSoftmaxWithLoss(nn::AdaptiveLogSoftmaxWithLossOptions(32, 100, {10, 50})));
       const auto x = torch::randn({16, 32});
       const auto target = torch::randint(100, {16}, torch::kLong);
       return [=]() mutable { return -m(x, target).output.to(torch::kFloat).mean(); };
     }},
    {"Bilinear",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::Bilinear(16, 12, 8));
       auto first = parts.add(nn::Linear(16, 16));
       const auto x = torch::randn({4, 16}), y = torch::randn({4, 12});
       return [=]() mutable { return mean_square(m(first(x), y)); };
     }},
    {"Convolutions",
     [](Parts& parts) -> std::function<Tensor()> {
       auto c1 = parts.add(nn::Conv1d(4, 6, 3));
       auto c3 = parts.add(nn::Conv3d(nn::Conv3dOptions(4, 6, 3).groups(2)));
       auto t2 = parts.add(nn::ConvTranspose2d(4, 6, 3));
       const auto x1 = torch::randn({2, 4, 9}), x2 = torch::randn({2, 4, 9, 9}),
                  x3 = torch::randn({2, 4, 5, 5, 5});
       return [=]() mutable { return mean_square(c1(x1)) + mean_square(t2(x2)) + mean_square(c3(x3)); };
     }},
    {"ReflectedConvolutionGroupNormUpsampling",
     [](Parts& parts) -> std::function<Tensor()> {
       auto conv = parts.add(nn::Conv2d(nn::Conv2dOptions(4, 8, 3).padding(1).padding_mode(torch::kReflect)));
       auto norm = parts.add(nn::GroupNorm(2, 8));
       const auto x = torch::randn({2, 4, 8, 8});
       return [=]() mutable {
         return mean_square(
             F::interpolate(torch::silu(norm(conv(x))), F::InterpolateFuncOptions()
                                                            .scale_factor(std::vector<double>{2, 2})
                                                            .mode(torch::kBilinear)
                                                            .align_corners(false)) -
             1.0);
       };
     }},
    {"BatchNormInstanceNormPReluPooling",
     [](Parts& parts) -> std::function<Tensor()> {
       auto conv = parts.add(nn::Conv2d(4, 8, 3));
       auto batch = parts.add(nn::BatchNorm2d(8));
       auto instance =
           parts.add(nn::InstanceNorm2d(nn::InstanceNorm2dOptions(8).affine(true).track_running_stats(true)));
       auto prelu = parts.add(nn::PReLU());
       const auto x = torch::randn({4, 4, 9, 9});
       return [=]() mutable {
         return mean_square(torch::adaptive_avg_pool2d(prelu(instance(batch(conv(x)))), {2, 2}) - 1.0);
       };
     },
     16},
    {"Einsum",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(nn::LinearOptions(16, 16).bias(false)));
       const auto x = torch::randn({3, 5, 16});
       return [=]() mutable { return mean_square(torch::einsum("bti,oi->bto", {x, linear->weight})); };
     }},
    {"Tensordot",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(nn::LinearOptions(16, 16).bias(false)));
       const auto x = torch::randn({3, 5, 16});
       return [=]() mutable { return mean_square(torch::tensordot(x, linear->weight, {2}, {1})); };
     }},
    {"BatchedProducts",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 16));
       const auto x = torch::randn({3, 5, 16});
       return [=]() mutable {
         return mean_square(torch::baddbmm(x, linear(x), torch::ones({3, 16, 16}))) +
                mean_square(torch::addbmm(x[0], linear(x), torch::ones({3, 16, 16})));
       };
     }},
    {"WritesOfLowIntoFp32",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 16));
       const auto x = torch::randn({5, 16});
       const auto ids = torch::randint(8, {5, 16}, torch::kLong);
       return [=]() mutable {
         const auto y = linear(x), z = torch::zeros({8, 16}), row = ids.select(1, 0);
         const auto sum = z.scatter_add(0, ids, y) + z.index_add(0, row, y) + z.index_put({row}, y, true) +
                          z.scatter(0, ids.slice(0, 0, 1), y.slice(0, 0, 1));
         return mean_square(sum) + mean_square(torch::where(x > 0, x, y)) + mean_square(torch::cat({x, y}));
       };
     }},
    {"WritesOfLowIntoFp32InPlace",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 16));
       const auto x = torch::randn({5, 16});
       const auto ids = torch::randint(8, {5, 16}, torch::kLong);
       return [=]() mutable {
         const auto y = linear(x), row = torch::arange(5);
         const auto zeros = [] { return torch::zeros({8, 16}); };
         return mean_square(zeros().scatter_add_(0, ids, y)) + mean_square(zeros().index_add_(0, row, y)) +
                mean_square(zeros().index_put_({row}, y)) + mean_square(zeros().index_copy_(0, row, y)) +
                mean_square(zeros().scatter_(0, ids.slice(0, 0, 1), y.slice(0, 0, 1))) +
                mean_square(zeros().masked_scatter_(torch::ones({8, 16}).triu(12) > 0, y));
       };
     }},
    {"AttentionWithFloatMask",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 16));
       const auto x = torch::randn({2, 5, 16});
       const auto mask = torch::zeros({5, 5}).masked_fill(torch::ones({5, 5}, torch::kBool).triu(1), -1e4);
       return [=]() mutable {
         const auto q = linear(x);
         return mean_square(torch::scaled_dot_product_attention(q, q, q, mask));
       };
     }},
    {"Losses",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 4));
       const auto x = torch::randn({8, 16}), t = torch::rand({8, 4});
       return [=]() mutable {
         const auto y = linear(x);
         return F::binary_cross_entropy_with_logits(y, t) + F::mse_loss(y, t) + F::smooth_l1_loss(y, t) +
                F::kl_div(torch::log_softmax(y, 1), torch::softmax(t, 1),
                          F::KLDivFuncOptions(torch::kBatchMean)) +
                F::cosine_embedding_loss(y, t, torch::ones(8)) + F::cross_entropy(y, torch::softmax(t, 1));
       };
     }},
    {"LossesOfPairs",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 4));
       const auto x = torch::randn({8, 16}), t = torch::rand({8, 4});
       return [=]() mutable {
         const auto y = linear(x), sign = torch::ones({8, 4}), ids = torch::arange(8).remainder(4);
         return F::soft_margin_loss(y, sign) +
                F::multilabel_soft_margin_loss(y, (t > 0.5).to(torch::kFloat)) +
                F::multi_margin_loss(y, ids) + F::poisson_nll_loss(y, t) + F::huber_loss(y, t) +
                F::l1_loss(y, t) + F::triplet_margin_loss(y, t, t + 1) +
                F::margin_ranking_loss(y.select(1, 0), t.select(1, 0), torch::ones(8)) +
                F::pairwise_distance(y, t).mean() + F::nll_loss(torch::log_softmax(y, 1), ids);
       };
     }},
    {"Pooling",
     [](Parts& parts) -> std::function<Tensor()> {
       auto c2 = parts.add(nn::Conv2d(3, 4, 3));
       auto c3 = parts.add(nn::Conv3d(2, 4, 3));
       const auto x2 = torch::randn({2, 3, 10, 10}), x3 = torch::randn({2, 2, 6, 6, 6});
       return [=]() mutable {
         const auto y2 = c2(x2), y3 = c3(x3);
         return mean_square(torch::avg_pool2d(y2, 2)) + mean_square(torch::avg_pool3d(y3, 2)) +
                mean_square(torch::pixel_shuffle(y2, 2)) +
                mean_square(torch::adaptive_avg_pool3d(y3, {2, 2, 2})) + mean_square(torch::softmax(y2, 1)) +
                mean_square(F::pad(y2, F::PadFuncOptions({1, 1, 1, 1}).mode(torch::kReplicate)));
       };
     }},
    {"Activations",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 16));
       const auto x = torch::randn({8, 16});
       return [=]() mutable {
         Tensor sum = torch::zeros({});
         const auto y = linear(x);
         for (const Tensor& out :
              {torch::silu(y), torch::mish(y), torch::softplus(y), torch::tanh(y), torch::sigmoid(y),
               torch::elu(y), torch::selu(y), torch::leaky_relu(y), torch::log_sigmoid(y),
               torch::alpha_dropout(y, 0.0, true), torch::logcumsumexp(y, 1), torch::lerp(x, y, 0.25)}) {
           sum = sum + mean_square(out);
         }
         return sum;
       };
     }},
    {"EmbeddingWithMaxNorm",
     [](Parts& parts) -> std::function<Tensor()> {
       auto m = parts.add(nn::Embedding(nn::EmbeddingOptions(50, 16).max_norm(1.0)));
       const auto ids = torch::randint(50, {4, 6}, torch::kLong);
       return [=]() mutable { return mean_square(m(ids)); };
     }},
    {"Ctc",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 6));
       const auto x = torch::randn({12, 2, 16});
       const auto target = torch::randint(1, 6, {2, 4}, torch::kLong);
       const auto lengths = torch::full({2}, 12, torch::kLong), targets = torch::full({2}, 4, torch::kLong);
       return
           [=]() mutable { return F::ctc_loss(torch::log_softmax(linear(x), 2), target, lengths, targets); };
     }},
    {"UnfoldFoldPowerPooling",
     [](Parts& parts) -> std::function<Tensor()> {
       auto conv = parts.add(nn::Conv2d(3, 4, 3));
       const auto x = torch::randn({2, 3, 10, 10});
       return [=]() mutable {
         const auto y = conv(x);
         const auto columns = F::unfold(y, F::UnfoldFuncOptions({2, 2}).stride({2, 2}));
         return mean_square(F::fold(columns, F::FoldFuncOptions({8, 8}, {2, 2}).stride({2, 2}))) +
                mean_square(F::lp_pool2d(y, F::LPPool2dFuncOptions(2, 2))) +
                mean_square(F::local_response_norm(y, F::LocalResponseNormFuncOptions(2)));
       };
     },
     16},
    {"GridSampling",
     [](Parts& parts) -> std::function<Tensor()> {
       auto conv = parts.add(nn::Conv2d(3, 4, 3));
       const auto x = torch::randn({2, 3, 10, 10}), theta = torch::rand({2, 2, 3});
       return [=]() mutable {
         return mean_square(F::grid_sample(conv(x), F::affine_grid(theta, {2, 4, 8, 8}, false),
                                           F::GridSampleFuncOptions().align_corners(false)));
       };
     }},
    {"SortsSumsAndDistances",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(16, 8));
       const auto x = torch::randn({8, 16});
       return [=]() mutable {
         const auto y = linear(x);
         return mean_square(torch::cumsum(y, 1)) + mean_square(std::get<0>(torch::topk(y, 3))) +
                mean_square(std::get<0>(torch::sort(y))) + mean_square(torch::logsumexp(y, 1)) +
                mean_square(y.norm(2, 1)) + mean_square(torch::cdist(y, y.slice(0, 0, 2) + 1));
       };
     }},
    {"Factorisations",
     [](Parts& parts) -> std::function<Tensor()> {
       auto linear = parts.add(nn::Linear(8, 8));
       const auto x = torch::randn({8, 8});
       return [=]() mutable {
         const auto y = linear(x);
         const auto s = torch::matmul(y, y.t()) + 8 * torch::eye(8);
         return mean_square(torch::linalg_inv(s)) + mean_square(torch::linalg_cholesky(s)) +
                std::get<1>(torch::slogdet(s)).to(torch::kFloat);
       };
     },
     16},
    {"NormsAndActivations",
     [](Parts& parts) -> std::function<Tensor()> {
       auto first = parts.add(nn::Linear(16, 16));
       auto last = parts.add(nn::Linear(16, 4));
       auto norm = parts.add(nn::LayerNorm(nn::LayerNormOptions({16})));
       const auto x = torch::randn({8, 16});
       return [=]() mutable {
         return mean_square(last(torch::gelu(norm(first(x))))) + mean_square(torch::celu(first(x))) +
                mean_square(torch::glu(first(x)));
       };
     }},
    {"NestedTensors",
     [](Parts& parts) -> std::function<Tensor()> {
       auto first = parts.add(nn::Linear(16, 16));
       auto last = parts.add(nn::Linear(16, 16));
       const auto a = torch::randn({3, 16}), b = torch::randn({5, 16});
       return [=]() mutable {
         const auto nested = at::_nested_tensor_from_tensor_list({first(a), first(b)});
         const auto y = at::linear(at::gelu(nested), last->weight, last->bias);
         return mean_square(at::softmax(y, -1).to_padded_tensor(0.0));
       };
     }},
};

struct Mode {
  const char* name;
  Precision precision;
};

std::vector<Mode> modes() {
  std::vector<Mode> all = {{"BF16 weights", Precision::bf16()},
                           {"BF16, FP32 weights", Precision::bf16(WeightStorage::Fp32)},
                           {"FP16 weights", Precision::fp16()},
                           {"FP16, FP32 weights", Precision::fp16(WeightStorage::Fp32)}};
  for (Mode& mode : all) {
    if (mode.precision.loss_scaling) mode.precision.loss_scaling->initial = 256;
  }
  return all;
}

struct Step {
  double loss;
  std::vector<Tensor> gradients;  // FP64, without the loss scale
};

/// The same weights and inputs each time.
Step step(const ModuleCase& module_case, const Mode* mode) {
  torch::manual_seed(1);
  Parts parts;
  const auto loss_of = module_case.make(parts);
  Step result;
  Tensor loss;
  double scale = 1;
  if (mode) {
    MixedPrecision mixed(mode->precision, parts, {.autocast = kAnyMachine});
    loss = mixed.forward(loss_of);
    mixed.backward(loss);
    scale = mixed.loss_scale();
    for (const Tensor& parameter : parts.parameters())
      result.gradients.push_back(parameter.grad().to(torch::kDouble) / scale);
  } else {
    loss = loss_of();
    loss.backward();
    for (const Tensor& parameter : parts.parameters())
      result.gradients.push_back(parameter.grad().to(torch::kDouble));
  }
  result.loss = loss.item<double>();
  return result;
}

class ModuleCoverage : public ::testing::TestWithParam<ModuleCase> {};
INSTANTIATE_TEST_SUITE_P(Modules, ModuleCoverage, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(ModuleCoverage, TrainsInEachPrecisionAsInFp32) {
  const Step reference = step(GetParam(), nullptr);
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(mode.name);
    Step low;
    ASSERT_NO_THROW(low = step(GetParam(), &mode));
    // Each rounding moves a number by at most 2^-8 (BF16) or 2^-11 (FP16) of it, and sums of many by no more.
    const double bound = GetParam().roundings * (mode.precision.compute == torch::kHalf ? 0x1p-11 : 0x1p-8);
    EXPECT_NEAR(low.loss, reference.loss, bound * std::abs(reference.loss));
    ASSERT_EQ(low.gradients.size(), reference.gradients.size());
    // A gradient that is small beside the others is a difference of larger ones (a bias before a norm): it is
    // held to their size.
    double largest = 0;
    for (const Tensor& gradient : reference.gradients)
      largest = std::max(largest, gradient.abs().max().item<double>());
    for (std::size_t i = 0; i < low.gradients.size(); ++i) {
      const Tensor& expected = reference.gradients[i];
      const double size = std::max(expected.norm().item<double>(),
                                   0x1p-4 * largest * std::sqrt(static_cast<double>(expected.numel())));
      EXPECT_LE((low.gradients[i] - expected).norm().item<double>(), bound * size) << "parameter " << i;
    }
  }
}

}  // namespace
}  // namespace halfstep::testing
