// The policy itself. One row an operation: name, rule, reason, then what stock LibTorch 2.13 does on CPU and
// CUDA.
//
// The two engine columns are facts about LibTorch, checked by tests/precision/engine_lists_test.cpp in a
// process where Halfstep's kernels are not loaded. The rule and the reason are ours.
#include <halfstep/op_policy.h>

namespace halfstep {
namespace {

constexpr std::string_view kProduct =
    "Sums of products, where the time goes: kernels take low inputs and accumulate in FP32.";
constexpr std::string_view kContraction =
    "Its matrix products have rows of their own; an outer product alone, as of positions and frequencies, "
    "would turn 257 into 256 in BF16.";
constexpr std::string_view kOuter =
    "An outer product sums nothing: low inputs would lose digits (257 is 256 in BF16) for no gain.";
constexpr std::string_view kConvolution =
    "Sums of products over a window: kernels take low inputs and accumulate in FP32.";
constexpr std::string_view kAttention =
    "Its two matrix products are low; the fused kernels compute the softmax between them in FP32.";
constexpr std::string_view kCell =
    "Its gate products are low by their own row; its state is a running sum, and a BF16 sum of ones stops at "
    "256.";
constexpr std::string_view kFusedCell =
    "Given gates and state by a cell: the widest decides, so the state keeps its digits.";
constexpr std::string_view kLstmKernel =
    "oneDNN's LSTM over a whole sequence: gates are sums of low products in FP32, h is rounded at each step, "
    "and c, a running sum, is kept in FP32. FP16 has no kernel for training: there all of it is FP32.";
constexpr std::string_view kRecurrentLayer =
    "Products inside follow their own rows, and input and state stay as they come; on CPU the weights are "
    "cast once for the sequence, not once a step.";
constexpr std::string_view kPrelu =
    "One multiplication an element, as exact as its input; low in both engine lists.";
constexpr std::string_view kNormalisation =
    "Mean and variance are sums over a row, and the variance subtracts nearly equal numbers.";
constexpr std::string_view kBatchNorm =
    "Batch statistics are long sums and feed running averages; in neither engine list, so a Halfstep row.";
constexpr std::string_view kSoftmax =
    "Probabilities span many orders: FP16 loses those below 6e-8, and the log of a rounded one is far off.";
constexpr std::string_view kLogcumsumexp =
    "A running logsumexp: kept with it, though in neither engine list.";
constexpr std::string_view kLoss =
    "The number that training follows, usually a mean over the batch: a rounded loss hides progress.";
constexpr std::string_view kBce =
    "A loss of probabilities, FP32 when it is given FP32. BF16 and FP16 probabilities are refused: one above "
    "0.998 is 1 in BF16 and teaches nothing. Use with_logits, or an FP32 sigmoid.";
constexpr std::string_view kSigmoid =
    "As exact as its input, but a BF16 result above 0.998 is 1: a row so that a model that ends in one can "
    "have it in FP32.";
constexpr std::string_view kSteep =
    "Magnifies a rounding of its input, or leaves FP16's range, where its slope or its value is large.";
constexpr std::string_view kSteepToo =
    "Steep as exp and log are: kept with them, though in neither engine list.";
constexpr std::string_view kActivation =
    "As exact as its input. In neither engine list: a row so that backward may compute it again.";
constexpr std::string_view kReduction =
    "Many terms into one: a low result runs out of digits (BF16 counts to 256) or of range (FP16 ends at "
    "65504).";
constexpr std::string_view kNansum = "A sum that skips NaN: kept with sum, though in neither engine list.";
constexpr std::string_view kMean = "A sum with a division: kept with sum, though in neither engine list.";
constexpr std::string_view kVariance =
    "A long sum of squares of small differences: kept with the norms, though in neither engine list.";
constexpr std::string_view kNorm =
    "A sum of powers, which leaves FP16's range long before the norm does: 256 squared is already Inf.";
constexpr std::string_view kQuantile =
    "Interpolates between neighbours in order; LibTorch computes it in FP32 only.";
constexpr std::string_view kResampling =
    "Weighted sums of neighbours, and scattered sums in backward; several kernels exist in FP32 only.";
constexpr std::string_view kGrid =
    "Coordinates are positions: at the edge of a 512-pixel image neighbouring BF16 ones are a pixel apart.";
constexpr std::string_view kAveragePool = "A sum over a window; avg_pool3d has no low-precision CPU kernel.";
constexpr std::string_view kRandomWindows =
    "Its random samples place the windows and would be rounded with the data.";
constexpr std::string_view kMoves =
    "Copies or selects elements and computes nothing: what comes in goes out.";
constexpr std::string_view kPromote =
    "Combines tensors element by element, so they must agree; none is narrowed.";
constexpr std::string_view kDot = "One long sum of products: the widest operand decides, none is narrowed.";
constexpr std::string_view kJoin = "Joins tensors of one type: the widest decides, none is narrowed.";
constexpr std::string_view kWrite =
    "Writes one tensor into another, which throws when types differ: the widest decides, none is narrowed.";
constexpr std::string_view kWriteToo =
    "Writes one tensor into another: as index_copy, though in neither engine list.";
constexpr std::string_view kWriteInPlace =
    "Writes into its first tensor, which throws when types differ: what is written takes that one's type, as "
    "copy_ does.";
constexpr std::string_view kLookUp =
    "Sums rows of a table: weights of samples take the table's type, because to cast a table is to copy it.";
constexpr std::string_view kPromoteToo =
    "Mixes two tensors, and throws when their types differ: the widest decides, though in neither engine "
    "list.";
constexpr std::string_view kComplex =
    "Yields complex numbers, whose low-precision kernels are missing on CPU.";
constexpr std::string_view kFactorisation =
    "Solves and factorisations multiply rounding by the condition number; LAPACK has no low-precision "
    "version.";
constexpr std::string_view kFakeQuantise =
    "Imitates an integer grid: the input must not sit on a coarser one first.";

constexpr OpRow kTable[] = {
    // Matrix products
    {"addbmm", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"addmm", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"_addmm_activation", OpRule::Low, kProduct, EngineRule::Low, EngineRule::NotListed},
    {"addmv", OpRule::Low, kProduct, EngineRule::NotListed, EngineRule::Low},
    {"addr", OpRule::Promote, kOuter, EngineRule::NotListed, EngineRule::Low},
    {"baddbmm", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"bmm", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"chain_matmul", OpRule::Low, kProduct, EngineRule::NotListed, EngineRule::Low},
    {"einsum", OpRule::AsIs, kContraction, EngineRule::NotListed, EngineRule::Low},
    {"linalg_multi_dot", OpRule::Low, kProduct, EngineRule::NotListed, EngineRule::Low},
    {"linalg_vecdot", OpRule::Promote, kDot, EngineRule::Low, EngineRule::Low},
    {"linear", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"matmul", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"mm", OpRule::Low, kProduct, EngineRule::Low, EngineRule::Low},
    {"mv", OpRule::Low, kProduct, EngineRule::NotListed, EngineRule::Low},
    {"tensordot", OpRule::AsIs, kContraction, EngineRule::NotListed, EngineRule::Promote},
    // Convolutions
    {"conv1d", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"conv1d.padding", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::NotListed},
    {"conv2d", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"conv2d.padding", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::NotListed},
    {"conv3d", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"conv3d.padding", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::NotListed},
    {"conv_tbc", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"conv_transpose1d", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"conv_transpose2d.input", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"conv_transpose3d.input", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"_convolution", OpRule::Low, kConvolution, EngineRule::NotListed, EngineRule::Low},
    {"convolution", OpRule::Low, kConvolution, EngineRule::NotListed, EngineRule::Low},
    {"_convolution.deprecated", OpRule::Low, kConvolution, EngineRule::Low, EngineRule::Low},
    {"cudnn_convolution", OpRule::Low, kConvolution, EngineRule::NotListed, EngineRule::Low},
    {"cudnn_convolution_transpose", OpRule::Low, kConvolution, EngineRule::NotListed, EngineRule::Low},
    // Attention
    {"_native_multi_head_attention", OpRule::Low, kAttention, EngineRule::Low, EngineRule::NotListed},
    {"scaled_dot_product_attention", OpRule::Low, kAttention, EngineRule::Low, EngineRule::Low},
    {"_scaled_dot_product_flash_attention", OpRule::Low, kAttention, EngineRule::NotListed, EngineRule::Low},
    // Recurrent cells and layers
    {"gru.data", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"gru.input", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"gru_cell", OpRule::AsIs, kCell, EngineRule::NotListed, EngineRule::Low},
    {"lstm.data", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"lstm.input", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"lstm_cell", OpRule::AsIs, kCell, EngineRule::NotListed, EngineRule::Low},
    {"mkldnn_rnn_layer", OpRule::Low, kLstmKernel, EngineRule::Low, EngineRule::NotListed},
    {"rnn_relu.data", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"rnn_relu.input", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"rnn_relu_cell", OpRule::AsIs, kCell, EngineRule::NotListed, EngineRule::Low},
    {"rnn_tanh.data", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"rnn_tanh.input", OpRule::AsIs, kRecurrentLayer, EngineRule::NotListed, EngineRule::NotListed},
    {"rnn_tanh_cell", OpRule::AsIs, kCell, EngineRule::NotListed, EngineRule::Low},
    {"_thnn_fused_gru_cell", OpRule::Promote, kFusedCell, EngineRule::NotListed, EngineRule::Low},
    {"_thnn_fused_lstm_cell", OpRule::Promote, kFusedCell, EngineRule::NotListed, EngineRule::Low},
    // Activations
    {"prelu", OpRule::Low, kPrelu, EngineRule::Low, EngineRule::Low},
    {"gelu", OpRule::AsIs, kActivation, EngineRule::NotListed, EngineRule::NotListed},
    {"sigmoid", OpRule::AsIs, kSigmoid, EngineRule::NotListed, EngineRule::NotListed},
    {"silu", OpRule::AsIs, kActivation, EngineRule::NotListed, EngineRule::NotListed},
    // Normalisation
    {"batch_norm", OpRule::Fp32, kBatchNorm, EngineRule::NotListed, EngineRule::NotListed},
    {"group_norm", OpRule::Fp32, kNormalisation, EngineRule::NotListed, EngineRule::Fp32},
    {"instance_norm", OpRule::Fp32, kBatchNorm, EngineRule::NotListed, EngineRule::NotListed},
    {"layer_norm", OpRule::Fp32, kNormalisation, EngineRule::NotListed, EngineRule::Fp32},
    {"native_layer_norm", OpRule::Fp32, kNormalisation, EngineRule::NotListed, EngineRule::Fp32},
    {"rms_norm", OpRule::Fp32, kNormalisation, EngineRule::NotListed, EngineRule::Fp32},
    // Softmax and its relatives
    {"log_softmax.int", OpRule::Fp32, kSoftmax, EngineRule::NotListed, EngineRule::Fp32},
    {"logcumsumexp", OpRule::Fp32, kLogcumsumexp, EngineRule::NotListed, EngineRule::NotListed},
    {"logsumexp", OpRule::Fp32, kSoftmax, EngineRule::NotListed, EngineRule::Fp32},
    {"softmax.int", OpRule::Fp32, kSoftmax, EngineRule::NotListed, EngineRule::Fp32},
    // Losses
    {"binary_cross_entropy", OpRule::Fp32, kBce, EngineRule::Fp32, EngineRule::Refused},
    {"binary_cross_entropy_with_logits", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"cosine_embedding_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"cross_entropy_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::NotListed},
    {"ctc_loss.IntList", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::NotListed},
    {"ctc_loss.Tensor", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::NotListed},
    {"hinge_embedding_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"huber_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"kl_div", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"l1_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"margin_ranking_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"mse_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"multi_margin_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"multilabel_margin_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"multilabel_margin_loss_forward", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::NotListed},
    {"nll_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"nll_loss2d", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"poisson_nll_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"smooth_l1_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"soft_margin_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    {"triplet_margin_loss", OpRule::Fp32, kLoss, EngineRule::Fp32, EngineRule::Fp32},
    // Pointwise functions that magnify rounding
    {"acos", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"asin", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"cosh", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"erfinv", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"exp", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"exp2", OpRule::Fp32, kSteepToo, EngineRule::NotListed, EngineRule::NotListed},
    {"expm1", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"log", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"log10", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"log1p", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"log2", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"log_sigmoid", OpRule::Fp32, kSteepToo, EngineRule::NotListed, EngineRule::NotListed},
    {"logaddexp", OpRule::Fp32, kSteepToo, EngineRule::NotListed, EngineRule::NotListed},
    {"logaddexp2", OpRule::Fp32, kSteepToo, EngineRule::NotListed, EngineRule::NotListed},
    {"pow.Scalar", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"pow.Tensor_Scalar", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"pow.Tensor_Tensor", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"reciprocal", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"rsqrt", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"sinh", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"softplus", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    {"tan", OpRule::Fp32, kSteep, EngineRule::NotListed, EngineRule::Fp32},
    // Sums and products over many elements
    {"cumprod", OpRule::Fp32, kReduction, EngineRule::NotListed, EngineRule::Fp32},
    {"cumsum", OpRule::Fp32, kReduction, EngineRule::NotListed, EngineRule::Fp32},
    {"mean", OpRule::Fp32, kMean, EngineRule::NotListed, EngineRule::NotListed},
    {"mean.dim", OpRule::Fp32, kMean, EngineRule::NotListed, EngineRule::NotListed},
    {"nansum", OpRule::Fp32, kNansum, EngineRule::NotListed, EngineRule::NotListed},
    {"prod", OpRule::Fp32, kReduction, EngineRule::Fp32, EngineRule::Fp32},
    {"prod.dim_int", OpRule::Fp32, kReduction, EngineRule::Fp32, EngineRule::Fp32},
    {"std.correction", OpRule::Fp32, kVariance, EngineRule::NotListed, EngineRule::NotListed},
    {"std_mean.correction", OpRule::Fp32, kVariance, EngineRule::NotListed, EngineRule::NotListed},
    {"sum", OpRule::Fp32, kReduction, EngineRule::NotListed, EngineRule::Fp32},
    {"sum.dim_IntList", OpRule::Fp32, kReduction, EngineRule::NotListed, EngineRule::Fp32},
    {"trace", OpRule::Fp32, kReduction, EngineRule::Fp32, EngineRule::NotListed},
    {"var.correction", OpRule::Fp32, kVariance, EngineRule::NotListed, EngineRule::NotListed},
    {"var_mean.correction", OpRule::Fp32, kVariance, EngineRule::NotListed, EngineRule::NotListed},
    // Norms and distances
    {"cdist", OpRule::Fp32, kNorm, EngineRule::Fp32, EngineRule::Fp32},
    {"cosine_similarity", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"dist", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"frobenius_norm.dim", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"linalg_matrix_norm", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"linalg_matrix_norm.str_ord", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"linalg_vector_norm", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"norm.Scalar", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"norm.ScalarOpt_dim", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"nuclear_norm", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"nuclear_norm.dim", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"pdist", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    {"renorm", OpRule::Fp32, kNorm, EngineRule::NotListed, EngineRule::Fp32},
    // Order statistics
    {"nanquantile", OpRule::Fp32, kQuantile, EngineRule::Fp32, EngineRule::NotListed},
    {"nanquantile.scalar", OpRule::Fp32, kQuantile, EngineRule::Fp32, EngineRule::NotListed},
    {"quantile", OpRule::Fp32, kQuantile, EngineRule::Fp32, EngineRule::NotListed},
    {"quantile.scalar", OpRule::Fp32, kQuantile, EngineRule::Fp32, EngineRule::NotListed},
    // Resampling
    {"grid_sampler", OpRule::Fp32, kGrid, EngineRule::Fp32, EngineRule::Promote},
    {"grid_sampler_2d", OpRule::Fp32, kGrid, EngineRule::Fp32, EngineRule::NotListed},
    {"_grid_sampler_2d_cpu_fallback", OpRule::Fp32, kGrid, EngineRule::Fp32, EngineRule::NotListed},
    {"grid_sampler_3d", OpRule::Fp32, kGrid, EngineRule::Fp32, EngineRule::NotListed},
    {"upsample_bicubic2d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"_upsample_bicubic2d_aa", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"upsample_bilinear2d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"_upsample_bilinear2d_aa", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"upsample_linear1d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"upsample_nearest1d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"upsample_nearest2d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"upsample_nearest3d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"_upsample_nearest_exact1d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"_upsample_nearest_exact2d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"_upsample_nearest_exact3d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    {"upsample_trilinear3d", OpRule::Fp32, kResampling, EngineRule::NotListed, EngineRule::Fp32},
    // Average pooling in 3-D
    {"adaptive_avg_pool3d", OpRule::Fp32, kAveragePool, EngineRule::Fp32, EngineRule::NotListed},
    {"avg_pool3d", OpRule::Fp32, kAveragePool, EngineRule::Fp32, EngineRule::NotListed},
    // Pooling by random windows
    {"fractional_max_pool2d", OpRule::Fp32, kRandomWindows, EngineRule::Fp32, EngineRule::NotListed},
    {"fractional_max_pool3d", OpRule::Fp32, kRandomWindows, EngineRule::Fp32, EngineRule::NotListed},
    // Moving values without arithmetic
    {"adaptive_max_pool3d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"max_pool3d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"max_unpool2d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"max_unpool3d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"reflection_pad1d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"reflection_pad2d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"replication_pad1d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"replication_pad2d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    {"replication_pad3d", OpRule::AsIs, kMoves, EngineRule::Fp32, EngineRule::NotListed},
    // Several tensors that must share one type
    {"addcdiv", OpRule::Promote, kPromote, EngineRule::NotListed, EngineRule::Promote},
    {"addcmul", OpRule::Promote, kPromote, EngineRule::NotListed, EngineRule::Promote},
    {"atan2", OpRule::Promote, kPromote, EngineRule::NotListed, EngineRule::Promote},
    {"bilinear", OpRule::Promote, kDot, EngineRule::NotListed, EngineRule::Promote},
    {"cat", OpRule::Promote, kJoin, EngineRule::Promote, EngineRule::NotListed},
    {"cross", OpRule::Promote, kPromote, EngineRule::NotListed, EngineRule::Promote},
    {"dot", OpRule::Promote, kDot, EngineRule::NotListed, EngineRule::Promote},
    {"index_add", OpRule::Promote, kWriteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"index_copy", OpRule::Promote, kWrite, EngineRule::Promote, EngineRule::NotListed},
    {"index_put", OpRule::Promote, kWrite, EngineRule::NotListed, EngineRule::Promote},
    {"index_reduce", OpRule::Promote, kWriteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"lerp.Scalar", OpRule::Promote, kPromoteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"lerp.Tensor", OpRule::Promote, kPromoteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"masked_scatter", OpRule::Promote, kWriteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"scatter.reduce", OpRule::Promote, kWriteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"scatter.src", OpRule::Promote, kWriteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"scatter_add", OpRule::Promote, kWrite, EngineRule::NotListed, EngineRule::Promote},
    {"scatter_reduce.two", OpRule::Promote, kWriteToo, EngineRule::NotListed, EngineRule::NotListed},
    {"stack", OpRule::Promote, kJoin, EngineRule::Promote, EngineRule::NotListed},
    {"vdot", OpRule::Promote, kDot, EngineRule::NotListed, EngineRule::Promote},
    // Tensors that must have the type of the first
    {"embedding_bag", OpRule::First, kLookUp, EngineRule::NotListed, EngineRule::NotListed},
    {"embedding_bag.padding_idx", OpRule::First, kLookUp, EngineRule::NotListed, EngineRule::NotListed},
    {"index_add_", OpRule::First, kWriteInPlace, EngineRule::NotListed, EngineRule::NotListed},
    {"index_copy_", OpRule::First, kWriteInPlace, EngineRule::NotListed, EngineRule::NotListed},
    {"index_put_", OpRule::First, kWriteInPlace, EngineRule::NotListed, EngineRule::NotListed},
    {"masked_scatter_", OpRule::First, kWriteInPlace, EngineRule::NotListed, EngineRule::NotListed},
    {"scatter_.src", OpRule::First, kWriteInPlace, EngineRule::NotListed, EngineRule::NotListed},
    {"scatter_add_", OpRule::First, kWriteInPlace, EngineRule::NotListed, EngineRule::NotListed},
    // Fourier transforms and complex numbers
    {"fft_fft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_fft2", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_fftn", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_hfft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_ifft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_ifft2", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_ifftn", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_ihfft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_irfft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_irfft2", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_irfftn", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_rfft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_rfft2", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"fft_rfftn", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"polar", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"stft", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"stft.center", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    {"view_as_complex", OpRule::Fp32, kComplex, EngineRule::Fp32, EngineRule::NotListed},
    // Linear algebra
    {"cholesky", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"cholesky_inverse", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"cholesky_solve", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"geqrf", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"inverse", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_cholesky", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_cholesky_ex", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_cond", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_cond.p_str", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_eig", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_eigh", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_eigvals", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_eigvalsh", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_householder_product", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_inv", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_inv_ex", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_lstsq", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_matrix_rank", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_matrix_rank.atol_rtol_float", OpRule::Fp32, kFactorisation, EngineRule::Fp32,
     EngineRule::NotListed},
    {"linalg_matrix_rank.atol_rtol_tensor", OpRule::Fp32, kFactorisation, EngineRule::Fp32,
     EngineRule::NotListed},
    {"linalg_matrix_rank.tol_tensor", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_qr", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_solve", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_svd", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_svdvals", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_tensorinv", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"linalg_tensorsolve", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"lu_solve", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"_lu_with_info", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"orgqr", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"ormqr", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"pinverse", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"qr", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"svd", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    {"triangular_solve", OpRule::Fp32, kFactorisation, EngineRule::Fp32, EngineRule::NotListed},
    // Quantisation
    {"fake_quantize_per_tensor_affine", OpRule::Fp32, kFakeQuantise, EngineRule::Fp32, EngineRule::NotListed},
};

}  // namespace

std::span<const OpRow> op_table() { return kTable; }

}  // namespace halfstep
