// The policy itself. One row an operation: name, rule, reason, then what stock LibTorch 2.13 does on CPU and
// CUDA.
//
// The two stock columns are facts about LibTorch, checked by tests/precision/stock_lists_test.cpp in a
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
    "Products inside follow their own rows, and input and state keep their types; on CPU the weights are "
    "cast once for the sequence, not once per step.";
constexpr std::string_view kPrelu =
    "One multiplication per element, as exact as its input; low in both stock lists.";
constexpr std::string_view kNormalisation =
    "Mean and variance are sums over a row, and the variance subtracts nearly equal numbers.";
constexpr std::string_view kLowNorm =
    "Sums in FP32 or FP64 and one rounding, to the type of the rows. Halfstep's own operation.";
constexpr std::string_view kBatchNorm =
    "Batch statistics are long sums and feed running averages; in neither stock list, so a Halfstep row.";
constexpr std::string_view kSoftmax =
    "Probabilities span many orders: FP16 loses those below 6e-8, and the log of a rounded one is far off.";
constexpr std::string_view kLogcumsumexp = "A running logsumexp: kept with it, though in neither stock list.";
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
    "Steep as exp and log are: kept with them, though in neither stock list.";
constexpr std::string_view kActivation =
    "As exact as its input. In neither stock list: a row so that backward may compute it again.";
constexpr std::string_view kSwiglu =
    "As exact as its inputs: computed in FP32 and rounded once. Halfstep's own operation.";
constexpr std::string_view kRotary =
    "Turned in FP32, by FP32 angles, and rounded to the type of the heads. Halfstep's own operation.";
constexpr std::string_view kReduction =
    "Many terms into one: a low result runs out of digits (BF16 counts to 256) or of range (FP16 ends at "
    "65504).";
constexpr std::string_view kNansum = "A sum that skips NaN: kept with sum, though in neither stock list.";
constexpr std::string_view kMean = "A sum with a division: kept with sum, though in neither stock list.";
constexpr std::string_view kVariance =
    "A long sum of squares of small differences: kept with the norms, though in neither stock list.";
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
    "Writes one tensor into another: as index_copy, though in neither stock list.";
constexpr std::string_view kWriteInPlace =
    "Writes into its first tensor, which throws when types differ: what is written takes that one's type, as "
    "copy_ does.";
constexpr std::string_view kLookUp =
    "Sums rows of a table: weights of samples take the table's type, because to cast a table is to copy it.";
constexpr std::string_view kPromoteToo =
    "Mixes two tensors, and throws when their types differ: the widest decides, though in neither stock "
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
    {"addbmm", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"addmm", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"_addmm_activation", OpRule::Low, kProduct, StockRule::Low, StockRule::NotListed},
    {"addmv", OpRule::Low, kProduct, StockRule::NotListed, StockRule::Low},
    {"addr", OpRule::Promote, kOuter, StockRule::NotListed, StockRule::Low},
    {"baddbmm", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"bmm", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"chain_matmul", OpRule::Low, kProduct, StockRule::NotListed, StockRule::Low},
    {"einsum", OpRule::AsIs, kContraction, StockRule::NotListed, StockRule::Low},
    {"linalg_multi_dot", OpRule::Low, kProduct, StockRule::NotListed, StockRule::Low},
    {"linalg_vecdot", OpRule::Promote, kDot, StockRule::Low, StockRule::Low},
    {"linear", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"matmul", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"mm", OpRule::Low, kProduct, StockRule::Low, StockRule::Low},
    {"mv", OpRule::Low, kProduct, StockRule::NotListed, StockRule::Low},
    {"tensordot", OpRule::AsIs, kContraction, StockRule::NotListed, StockRule::Promote},
    // Convolutions
    {"conv1d", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"conv1d.padding", OpRule::Low, kConvolution, StockRule::Low, StockRule::NotListed},
    {"conv2d", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"conv2d.padding", OpRule::Low, kConvolution, StockRule::Low, StockRule::NotListed},
    {"conv3d", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"conv3d.padding", OpRule::Low, kConvolution, StockRule::Low, StockRule::NotListed},
    {"conv_tbc", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"conv_transpose1d", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"conv_transpose2d.input", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"conv_transpose3d.input", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"_convolution", OpRule::Low, kConvolution, StockRule::NotListed, StockRule::Low},
    {"convolution", OpRule::Low, kConvolution, StockRule::NotListed, StockRule::Low},
    {"_convolution.deprecated", OpRule::Low, kConvolution, StockRule::Low, StockRule::Low},
    {"cudnn_convolution", OpRule::Low, kConvolution, StockRule::NotListed, StockRule::Low},
    {"cudnn_convolution_transpose", OpRule::Low, kConvolution, StockRule::NotListed, StockRule::Low},
    // Attention
    {"_native_multi_head_attention", OpRule::Low, kAttention, StockRule::Low, StockRule::NotListed},
    {"scaled_dot_product_attention", OpRule::Low, kAttention, StockRule::Low, StockRule::Low},
    {"_scaled_dot_product_flash_attention", OpRule::Low, kAttention, StockRule::NotListed, StockRule::Low},
    // Recurrent cells and layers
    {"gru.data", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"gru.input", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"gru_cell", OpRule::AsIs, kCell, StockRule::NotListed, StockRule::Low},
    {"lstm.data", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"lstm.input", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"lstm_cell", OpRule::AsIs, kCell, StockRule::NotListed, StockRule::Low},
    {"mkldnn_rnn_layer", OpRule::Low, kLstmKernel, StockRule::Low, StockRule::NotListed},
    {"rnn_relu.data", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"rnn_relu.input", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"rnn_relu_cell", OpRule::AsIs, kCell, StockRule::NotListed, StockRule::Low},
    {"rnn_tanh.data", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"rnn_tanh.input", OpRule::AsIs, kRecurrentLayer, StockRule::NotListed, StockRule::NotListed},
    {"rnn_tanh_cell", OpRule::AsIs, kCell, StockRule::NotListed, StockRule::Low},
    {"_thnn_fused_gru_cell", OpRule::Promote, kFusedCell, StockRule::NotListed, StockRule::Low},
    {"_thnn_fused_lstm_cell", OpRule::Promote, kFusedCell, StockRule::NotListed, StockRule::Low},
    // Activations
    {"prelu", OpRule::Low, kPrelu, StockRule::Low, StockRule::Low},
    {"gelu", OpRule::AsIs, kActivation, StockRule::NotListed, StockRule::NotListed},
    {"sigmoid", OpRule::AsIs, kSigmoid, StockRule::NotListed, StockRule::NotListed},
    {"silu", OpRule::AsIs, kActivation, StockRule::NotListed, StockRule::NotListed},
    {"halfstep::swiglu", OpRule::AsIs, kSwiglu, StockRule::NotListed, StockRule::NotListed},
    // Positions
    {"halfstep::rotary", OpRule::AsIs, kRotary, StockRule::NotListed, StockRule::NotListed},
    // Normalisation
    {"batch_norm", OpRule::Fp32, kBatchNorm, StockRule::NotListed, StockRule::NotListed},
    {"group_norm", OpRule::Fp32, kNormalisation, StockRule::NotListed, StockRule::Fp32},
    {"instance_norm", OpRule::Fp32, kBatchNorm, StockRule::NotListed, StockRule::NotListed},
    {"layer_norm", OpRule::Fp32, kNormalisation, StockRule::NotListed, StockRule::Fp32},
    {"native_layer_norm", OpRule::Fp32, kNormalisation, StockRule::NotListed, StockRule::Fp32},
    {"rms_norm", OpRule::Fp32, kNormalisation, StockRule::NotListed, StockRule::Fp32},
    {"halfstep::layer_norm", OpRule::AsIs, kLowNorm, StockRule::NotListed, StockRule::NotListed},
    {"halfstep::rms_norm", OpRule::AsIs, kLowNorm, StockRule::NotListed, StockRule::NotListed},
    // Softmax and its relatives
    {"log_softmax.int", OpRule::Fp32, kSoftmax, StockRule::NotListed, StockRule::Fp32},
    {"logcumsumexp", OpRule::Fp32, kLogcumsumexp, StockRule::NotListed, StockRule::NotListed},
    {"logsumexp", OpRule::Fp32, kSoftmax, StockRule::NotListed, StockRule::Fp32},
    {"softmax.int", OpRule::Fp32, kSoftmax, StockRule::NotListed, StockRule::Fp32},
    // Losses
    {"binary_cross_entropy", OpRule::Fp32, kBce, StockRule::Fp32, StockRule::Refused},
    {"binary_cross_entropy_with_logits", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"cosine_embedding_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"cross_entropy_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::NotListed},
    {"ctc_loss.IntList", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::NotListed},
    {"ctc_loss.Tensor", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::NotListed},
    {"hinge_embedding_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"huber_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"kl_div", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"l1_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"margin_ranking_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"mse_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"multi_margin_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"multilabel_margin_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"multilabel_margin_loss_forward", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::NotListed},
    {"nll_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"nll_loss2d", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"poisson_nll_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"smooth_l1_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"soft_margin_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    {"triplet_margin_loss", OpRule::Fp32, kLoss, StockRule::Fp32, StockRule::Fp32},
    // Pointwise functions that magnify rounding
    {"acos", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"asin", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"cosh", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"erfinv", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"exp", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"exp2", OpRule::Fp32, kSteepToo, StockRule::NotListed, StockRule::NotListed},
    {"expm1", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"log", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"log10", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"log1p", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"log2", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"log_sigmoid", OpRule::Fp32, kSteepToo, StockRule::NotListed, StockRule::NotListed},
    {"logaddexp", OpRule::Fp32, kSteepToo, StockRule::NotListed, StockRule::NotListed},
    {"logaddexp2", OpRule::Fp32, kSteepToo, StockRule::NotListed, StockRule::NotListed},
    {"pow.Scalar", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"pow.Tensor_Scalar", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"pow.Tensor_Tensor", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"reciprocal", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"rsqrt", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"sinh", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"softplus", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    {"tan", OpRule::Fp32, kSteep, StockRule::NotListed, StockRule::Fp32},
    // Sums and products over many elements
    {"cumprod", OpRule::Fp32, kReduction, StockRule::NotListed, StockRule::Fp32},
    {"cumsum", OpRule::Fp32, kReduction, StockRule::NotListed, StockRule::Fp32},
    {"mean", OpRule::Fp32, kMean, StockRule::NotListed, StockRule::NotListed},
    {"mean.dim", OpRule::Fp32, kMean, StockRule::NotListed, StockRule::NotListed},
    {"nansum", OpRule::Fp32, kNansum, StockRule::NotListed, StockRule::NotListed},
    {"prod", OpRule::Fp32, kReduction, StockRule::Fp32, StockRule::Fp32},
    {"prod.dim_int", OpRule::Fp32, kReduction, StockRule::Fp32, StockRule::Fp32},
    {"std.correction", OpRule::Fp32, kVariance, StockRule::NotListed, StockRule::NotListed},
    {"std_mean.correction", OpRule::Fp32, kVariance, StockRule::NotListed, StockRule::NotListed},
    {"sum", OpRule::Fp32, kReduction, StockRule::NotListed, StockRule::Fp32},
    {"sum.dim_IntList", OpRule::Fp32, kReduction, StockRule::NotListed, StockRule::Fp32},
    {"trace", OpRule::Fp32, kReduction, StockRule::Fp32, StockRule::NotListed},
    {"var.correction", OpRule::Fp32, kVariance, StockRule::NotListed, StockRule::NotListed},
    {"var_mean.correction", OpRule::Fp32, kVariance, StockRule::NotListed, StockRule::NotListed},
    // Norms and distances
    {"cdist", OpRule::Fp32, kNorm, StockRule::Fp32, StockRule::Fp32},
    {"cosine_similarity", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"dist", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"frobenius_norm.dim", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"linalg_matrix_norm", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"linalg_matrix_norm.str_ord", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"linalg_vector_norm", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"norm.Scalar", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"norm.ScalarOpt_dim", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"nuclear_norm", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"nuclear_norm.dim", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"pdist", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    {"renorm", OpRule::Fp32, kNorm, StockRule::NotListed, StockRule::Fp32},
    // Order statistics
    {"nanquantile", OpRule::Fp32, kQuantile, StockRule::Fp32, StockRule::NotListed},
    {"nanquantile.scalar", OpRule::Fp32, kQuantile, StockRule::Fp32, StockRule::NotListed},
    {"quantile", OpRule::Fp32, kQuantile, StockRule::Fp32, StockRule::NotListed},
    {"quantile.scalar", OpRule::Fp32, kQuantile, StockRule::Fp32, StockRule::NotListed},
    // Resampling
    {"grid_sampler", OpRule::Fp32, kGrid, StockRule::Fp32, StockRule::Promote},
    {"grid_sampler_2d", OpRule::Fp32, kGrid, StockRule::Fp32, StockRule::NotListed},
    {"_grid_sampler_2d_cpu_fallback", OpRule::Fp32, kGrid, StockRule::Fp32, StockRule::NotListed},
    {"grid_sampler_3d", OpRule::Fp32, kGrid, StockRule::Fp32, StockRule::NotListed},
    {"upsample_bicubic2d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"_upsample_bicubic2d_aa", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"upsample_bilinear2d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"_upsample_bilinear2d_aa", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"upsample_linear1d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"upsample_nearest1d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"upsample_nearest2d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"upsample_nearest3d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"_upsample_nearest_exact1d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"_upsample_nearest_exact2d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"_upsample_nearest_exact3d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    {"upsample_trilinear3d", OpRule::Fp32, kResampling, StockRule::NotListed, StockRule::Fp32},
    // Average pooling in 3-D
    {"adaptive_avg_pool3d", OpRule::Fp32, kAveragePool, StockRule::Fp32, StockRule::NotListed},
    {"avg_pool3d", OpRule::Fp32, kAveragePool, StockRule::Fp32, StockRule::NotListed},
    // Pooling by random windows
    {"fractional_max_pool2d", OpRule::Fp32, kRandomWindows, StockRule::Fp32, StockRule::NotListed},
    {"fractional_max_pool3d", OpRule::Fp32, kRandomWindows, StockRule::Fp32, StockRule::NotListed},
    // Moving values without arithmetic
    {"adaptive_max_pool3d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"max_pool3d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"max_unpool2d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"max_unpool3d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"reflection_pad1d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"reflection_pad2d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"replication_pad1d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"replication_pad2d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    {"replication_pad3d", OpRule::AsIs, kMoves, StockRule::Fp32, StockRule::NotListed},
    // Several tensors that must share one type
    {"addcdiv", OpRule::Promote, kPromote, StockRule::NotListed, StockRule::Promote},
    {"addcmul", OpRule::Promote, kPromote, StockRule::NotListed, StockRule::Promote},
    {"atan2", OpRule::Promote, kPromote, StockRule::NotListed, StockRule::Promote},
    {"bilinear", OpRule::Promote, kDot, StockRule::NotListed, StockRule::Promote},
    {"cat", OpRule::Promote, kJoin, StockRule::Promote, StockRule::NotListed},
    {"cross", OpRule::Promote, kPromote, StockRule::NotListed, StockRule::Promote},
    {"dot", OpRule::Promote, kDot, StockRule::NotListed, StockRule::Promote},
    {"index_add", OpRule::Promote, kWriteToo, StockRule::NotListed, StockRule::NotListed},
    {"index_copy", OpRule::Promote, kWrite, StockRule::Promote, StockRule::NotListed},
    {"index_put", OpRule::Promote, kWrite, StockRule::NotListed, StockRule::Promote},
    {"index_reduce", OpRule::Promote, kWriteToo, StockRule::NotListed, StockRule::NotListed},
    {"lerp.Scalar", OpRule::Promote, kPromoteToo, StockRule::NotListed, StockRule::NotListed},
    {"lerp.Tensor", OpRule::Promote, kPromoteToo, StockRule::NotListed, StockRule::NotListed},
    {"masked_scatter", OpRule::Promote, kWriteToo, StockRule::NotListed, StockRule::NotListed},
    {"scatter.reduce", OpRule::Promote, kWriteToo, StockRule::NotListed, StockRule::NotListed},
    {"scatter.src", OpRule::Promote, kWriteToo, StockRule::NotListed, StockRule::NotListed},
    {"scatter_add", OpRule::Promote, kWrite, StockRule::NotListed, StockRule::Promote},
    {"scatter_reduce.two", OpRule::Promote, kWriteToo, StockRule::NotListed, StockRule::NotListed},
    {"stack", OpRule::Promote, kJoin, StockRule::Promote, StockRule::NotListed},
    {"vdot", OpRule::Promote, kDot, StockRule::NotListed, StockRule::Promote},
    // Tensors that must have the type of the first
    {"embedding_bag", OpRule::First, kLookUp, StockRule::NotListed, StockRule::NotListed},
    {"embedding_bag.padding_idx", OpRule::First, kLookUp, StockRule::NotListed, StockRule::NotListed},
    {"index_add_", OpRule::First, kWriteInPlace, StockRule::NotListed, StockRule::NotListed},
    {"index_copy_", OpRule::First, kWriteInPlace, StockRule::NotListed, StockRule::NotListed},
    {"index_put_", OpRule::First, kWriteInPlace, StockRule::NotListed, StockRule::NotListed},
    {"masked_scatter_", OpRule::First, kWriteInPlace, StockRule::NotListed, StockRule::NotListed},
    {"scatter_.src", OpRule::First, kWriteInPlace, StockRule::NotListed, StockRule::NotListed},
    {"scatter_add_", OpRule::First, kWriteInPlace, StockRule::NotListed, StockRule::NotListed},
    // Fourier transforms and complex numbers
    {"fft_fft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_fft2", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_fftn", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_hfft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_ifft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_ifft2", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_ifftn", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_ihfft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_irfft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_irfft2", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_irfftn", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_rfft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_rfft2", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"fft_rfftn", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"polar", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"stft", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"stft.center", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    {"view_as_complex", OpRule::Fp32, kComplex, StockRule::Fp32, StockRule::NotListed},
    // Linear algebra
    {"cholesky", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"cholesky_inverse", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"cholesky_solve", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"geqrf", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"inverse", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_cholesky", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_cholesky_ex", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_cond", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_cond.p_str", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_eig", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_eigh", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_eigvals", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_eigvalsh", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_householder_product", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_inv", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_inv_ex", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_lstsq", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_matrix_rank", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_matrix_rank.atol_rtol_float", OpRule::Fp32, kFactorisation, StockRule::Fp32,
     StockRule::NotListed},
    {"linalg_matrix_rank.atol_rtol_tensor", OpRule::Fp32, kFactorisation, StockRule::Fp32,
     StockRule::NotListed},
    {"linalg_matrix_rank.tol_tensor", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_qr", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_solve", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_svd", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_svdvals", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_tensorinv", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"linalg_tensorsolve", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"lu_solve", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"_lu_with_info", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"orgqr", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"ormqr", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"pinverse", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"qr", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"svd", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    {"triangular_solve", OpRule::Fp32, kFactorisation, StockRule::Fp32, StockRule::NotListed},
    // Quantisation
    {"fake_quantize_per_tensor_affine", OpRule::Fp32, kFakeQuantise, StockRule::Fp32, StockRule::NotListed},
};

}  // namespace

std::span<const OpRow> op_table() { return kTable; }

}  // namespace halfstep
