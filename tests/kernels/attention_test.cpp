// Attention over raw arrays, in every table, against the definition in FP64.
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "base/cpu_features.h"
#include "formats/philox.h"

namespace halfstep {

/// src/kernels/attention_amx.cpp, compiled for tiles that tests/kernels/emulated/kernels/amx_tiles.h
/// imitates.
extern const AttentionLoops kEmulatedAmxAttention;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr Format kRowFormats[] = {Format::BF16, Format::FP16};

/// The largest relative error of a value rounded to the format; half its smallest step.
double unit_of(Format format) { return traits(format).epsilon / 2; }
double least_of(Format format) { return traits(format).min_subnormal / 2; }

/// By the scalar table, asked once for every code.
float value_of(Format format, std::uint16_t code) {
  const auto all = [](Format f) {
    std::vector<std::uint16_t> codes(0x10000);
    std::iota(codes.begin(), codes.end(), std::uint16_t{0});
    std::vector<float> values(codes.size());
    kScalarKernels.format[static_cast<int>(f)].decode(codes.data(), values.data(), codes.size());
    return values;
  };
  static const std::vector<float> bf16 = all(Format::BF16), fp16 = all(Format::FP16);
  return (format == Format::BF16 ? bf16 : fp16)[code];
}

struct Sizes {
  std::size_t batch, heads, key_heads, queries, keys, head_size;
};

/// Rows as a layer has them, [batch, rows, heads, head size], with three codes between the rows.
class Rows {
 public:
  Rows(Format format, std::size_t batch, std::size_t heads, std::size_t rows, std::size_t size)
      : format_(format), batch_(batch), heads_(heads), rows_(rows), size_(size), row_(heads * size + 3) {
    codes_.assign(batch * rows * row_, kGuard);
  }

  void draw(std::mt19937& generator) {
    std::normal_distribution<float> normal;
    each([&](std::size_t b, std::size_t h, std::size_t r, std::size_t i) {
      set(b, h, r, i, normal(generator));
    });
  }
  void fill(float value) {
    each([&](std::size_t b, std::size_t h, std::size_t r, std::size_t i) { set(b, h, r, i, value); });
  }
  void set(std::size_t b, std::size_t h, std::size_t r, std::size_t i, float value) {
    const std::uint32_t inf = traits(format_).inf_code;
    kScalarKernels.format[static_cast<int>(format_)].nearest_even(&value, &codes_[place(b, h, r, i)], 1,
                                                                  {.overflow = inf, .inf = inf});
  }
  double operator()(std::size_t b, std::size_t h, std::size_t r, std::size_t i) const {
    return value_of(format_, codes_[place(b, h, r, i)]);
  }

  HeadRows view() const { return {codes_.data(), stride(rows_ * row_), stride(size_), stride(row_)}; }
  WritableHeadRows view() { return {codes_.data(), stride(rows_ * row_), stride(size_), stride(row_)}; }

  /// Calls body with every place.
  template <typename Body>
  void each(Body body) const {
    for (std::size_t b = 0; b < batch_; ++b)
      for (std::size_t h = 0; h < heads_; ++h)
        for (std::size_t r = 0; r < rows_; ++r)
          for (std::size_t i = 0; i < size_; ++i) body(b, h, r, i);
  }

  bool guards_hold() const {
    for (std::size_t row = 0; row < batch_ * rows_; ++row)
      for (std::size_t i = heads_ * size_; i < row_; ++i)
        if (codes_[row * row_ + i] != kGuard) return false;
    return true;
  }
  bool operator==(const Rows& other) const { return codes_ == other.codes_; }

 private:
  static constexpr std::uint16_t kGuard = 0x7bad;
  static std::ptrdiff_t stride(std::size_t elements) { return static_cast<std::ptrdiff_t>(elements); }
  std::size_t place(std::size_t b, std::size_t h, std::size_t r, std::size_t i) const {
    return (b * rows_ + r) * row_ + h * size_ + i;
  }

  Format format_;
  std::size_t batch_, heads_, rows_, size_, row_;
  std::vector<std::uint16_t> codes_;
};

struct Case {
  Sizes sizes;
  AttentionCall call;
  Rows query, key, value, output, output_grad, query_grad, key_grad, value_grad;
  std::vector<float> tops, log_sums, parts, float_mask;
  std::unique_ptr<bool[]> bool_mask;

  Case(Format format, Sizes s, bool causal, MaskType mask = MaskType::None, double dropout = 0)
      : sizes(s),
        call{.format = format,
             .batch = s.batch,
             .heads = s.heads,
             .key_heads = s.key_heads,
             .queries = s.queries,
             .keys = s.keys,
             .head_size = s.head_size,
             .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.head_size))),
             .causal = causal,
             .mask = {},
             .dropout = {},
             .query = {},
             .key = {},
             .value = {},
             .output = {},
             .output_grad = {},
             .query_grad = {},
             .key_grad = {},
             .value_grad = {}},
        query(format, s.batch, s.heads, s.queries, s.head_size),
        key(format, s.batch, s.key_heads, s.keys, s.head_size),
        value(key),
        output(query),
        output_grad(query),
        query_grad(query),
        key_grad(key),
        value_grad(key),
        tops(s.batch * s.heads * s.queries, std::nanf("")),
        log_sums(tops) {
    std::mt19937 generator(7);
    for (Rows* rows : {&query, &key, &value, &output_grad}) rows->draw(generator);
    // One mask for all heads: [batch, 1, queries, keys].
    const auto stride = [](std::size_t elements) { return static_cast<std::ptrdiff_t>(elements); };
    std::normal_distribution<float> normal;
    if (mask != MaskType::None) {
      const std::size_t count = s.batch * s.queries * s.keys;
      bool_mask = std::make_unique<bool[]>(count);
      for (std::size_t i = 0; i < count; ++i) {
        float_mask.push_back(normal(generator));
        bool_mask[i] = float_mask[i] > -0.3F;
      }
      call.mask = {
          .type = mask,
          .values = mask == MaskType::Bool ? static_cast<const void*>(bool_mask.get()) : float_mask.data(),
          .batch = stride(s.queries * s.keys),
          .head = 0,
          .query = stride(s.keys),
          .key = 1};
    }
    if (dropout > 0)
      call.dropout = {.threshold = static_cast<std::uint32_t>(dropout * 0x1p32),
                      .factor = static_cast<float>(1 / (1 - dropout)),
                      .key = {.seed = 12345678912345}};
    connect();
  }
  Case(const Case&) = delete;

  void connect() {
    call.query = std::as_const(query).view();
    call.key = std::as_const(key).view();
    call.value = std::as_const(value).view();
    call.output = output.view();
    call.tops = tops.data();
    call.log_sums = log_sums.data();
    call.output_grad = std::as_const(output_grad).view();
    call.query_grad = query_grad.view();
    call.key_grad = key_grad.view();
    call.value_grad = value_grad.view();
    if (attention_parts(call) > 1) {
      parts.assign(attention_parts(call) * log_sums.size() * padded_head_size(call), std::nanf(""));
      call.query_grad_parts = parts.data();
    }
  }

  /// `queries` at a time; scratch memory begins as NaNs.
  void run(const KernelTable& table, std::size_t queries) {
    const std::size_t bytes =
        std::max(attention_forward_bytes(call, table), attention_backward_bytes(call, table)) + 64;
    std::vector<char> memory(bytes, '\xff');
    void* scratch = memory.data();
    std::size_t room = bytes;
    std::align(64, bytes - 64, scratch, room);
    for (std::size_t b = 0; b < sizes.batch; ++b)
      for (std::size_t h = 0; h < sizes.heads; ++h)
        for (std::size_t first = 0; first < sizes.queries; first += queries)
          attention_forward(call, b, h, first, std::min(queries, sizes.queries - first), scratch, table);
    std::fill(memory.begin(), memory.end(), '\xff');
    for (std::size_t unit = attention_units(call); unit-- > 0;)
      attention_backward(call, unit, scratch, table);
    if (attention_parts(call) == 1) return;
    for (std::size_t b = 0; b < sizes.batch; ++b)
      for (std::size_t h = 0; h < sizes.heads; ++h) sum_query_grads(call, b, h, table);
  }

  double masked(double logit, std::size_t b, std::size_t q, std::size_t k) const {
    if (call.causal && k > q) return -kInf;
    const std::size_t place = (b * sizes.queries + q) * sizes.keys + k;
    if (call.mask.type == MaskType::Bool) return bool_mask[place] ? logit : -kInf;
    return call.mask.type == MaskType::FP32 ? logit + double{float_mask[place]} : logit;
  }
  double factor(std::size_t b, std::size_t h, std::size_t q, std::size_t k) const {
    if (call.dropout.threshold == 0) return 1;
    const std::uint64_t element = ((b * sizes.heads + h) * sizes.queries + q) * sizes.keys + k;
    return random_bits(call.dropout.key, element) < call.dropout.threshold ? 0 : double{call.dropout.factor};
  }
};

using Numbers = std::vector<double>;

/// What is exact, and how far from it a result may be.
struct Bounded {
  Numbers exact, bound;
  explicit Bounded(std::size_t count) : exact(count), bound(count) {}
  void add(std::size_t i, double value, double error) {
    exact[i] += value;
    bound[i] += error;
  }
  /// The result is multiplied, and rounded once.
  void finish(double factor, Format format) {
    for (std::size_t i = 0; i < exact.size(); ++i) {
      exact[i] *= factor;
      bound[i] = (bound[i] * factor) * 1.01 + 1.01 * unit_of(format) * std::abs(exact[i]) + least_of(format);
    }
  }
};

/// One head of queries, in FP64; gradients of keys are added up over the heads that share them.
///
/// Bounds: u = 2^-24 is FP32's rounding. A sum of n products is off by at most n * u of the products'
/// magnitudes. A logit of magnitude m is off by d = (head size + 4) * u * magnitudes, and exp of it minus the
/// logarithm of the sum, both at most L, by 2 * d + (4 * L + 16) * u of itself; so is the sum, whose own
/// additions are off by keys * u. `p_unit` is what probabilities and gradients of logits are rounded by on
/// their way into products: 0, or BF16's unit where tiles multiply BF16.
struct Exact {
  Exact(const Case& c, double p_unit)
      : output(c.log_sums.size() * c.sizes.head_size),
        query_grad(output.exact.size()),
        key_grad(c.sizes.batch * c.sizes.key_heads * c.sizes.keys * c.sizes.head_size),
        value_grad(key_grad.exact.size()) {
    for (std::size_t b = 0; b < c.sizes.batch; ++b)
      for (std::size_t h = 0; h < c.sizes.heads; ++h)
        for (std::size_t q = 0; q < c.sizes.queries; ++q) add_query(c, p_unit, b, h, q);
    output.finish(1, c.call.format);
    query_grad.finish(c.call.scale, c.call.format);
    key_grad.finish(c.call.scale, c.call.format);
    value_grad.finish(1, c.call.format);
  }
  Bounded output, query_grad, key_grad, value_grad;

 private:
  void add_query(const Case& c, double p_unit, std::size_t b, std::size_t h, std::size_t q) {
    constexpr double u = 0x1p-24;
    const auto& s = c.sizes;
    const std::size_t kh = h / (s.heads / s.key_heads), size = s.head_size;
    Numbers logit(s.keys), p(s.keys), of_p(s.keys);
    double top = -kInf, most = 0, magnitudes = 0;
    for (std::size_t k = 0; k < s.keys; ++k) {
      double sum = 0, absolute = 0;
      for (std::size_t i = 0; i < size; ++i) {
        const double product = c.query(b, h, q, i) * c.key(b, kh, k, i);
        sum += product;
        absolute += std::abs(product);
      }
      logit[k] = c.masked(sum * c.call.scale, b, q, k);
      if (logit[k] == -kInf) continue;
      top = std::max(top, logit[k]);
      most = std::max(most, std::abs(logit[k]) + 4);  // a mask's value is below 4
      magnitudes = std::max(magnitudes, absolute * c.call.scale);
    }
    if (top == -kInf) return;  // sees nothing: all are 0
    double sum = 0;
    for (std::size_t k = 0; k < s.keys; ++k) sum += p[k] = std::exp(logit[k] - top);
    for (double& each : p) each /= sum;
    const double keys = static_cast<double>(s.keys), d = (static_cast<double>(size) + 4) * u * magnitudes;
    const double of_itself = 4 * d + (8 * (most + std::log(keys) + 1) + 32 + keys) * u;

    const std::size_t row = ((b * s.heads + h) * s.queries + q) * size;
    Numbers out(size), out_error(size);
    for (std::size_t k = 0; k < s.keys; ++k)
      for (std::size_t i = 0; i < size; ++i) {
        const double part = p[k] * c.factor(b, h, q, k) * c.value(b, kh, k, i);
        out[i] += part;
        out_error[i] += std::abs(part) * (of_itself + keys * u + p_unit);
      }
    // What backward subtracts from each gradient of a probability comes from the rounded output.
    double along = 0, along_error = 0;
    for (std::size_t i = 0; i < size; ++i) {
      output.add(row + i, out[i], out_error[i]);
      const double grad = c.output_grad(b, h, q, i);
      along += grad * out[i];
      along_error +=
          std::abs(grad) * (out_error[i] + 1.01 * unit_of(c.call.format) * std::abs(out[i]) +
                            least_of(c.call.format) + static_cast<double>(size) * u * std::abs(out[i]));
    }
    const double rows = static_cast<double>(s.queries * (s.heads / s.key_heads));
    for (std::size_t k = 0; k < s.keys; ++k) {
      double absolute = 0;
      for (std::size_t i = 0; i < size; ++i) {
        const double product = c.output_grad(b, h, q, i) * c.value(b, kh, k, i);
        of_p[k] += product;
        absolute += std::abs(product);
      }
      const double factor = c.factor(b, h, q, k), used = p[k] * factor;
      const double of_logit = p[k] * (of_p[k] * factor - along);
      const double of_logit_error =
          p[k] * (static_cast<double>(size) * u * absolute * factor + along_error +
                  (std::abs(of_p[k]) * factor + std::abs(along)) * (of_itself + 4 * u)) +
          p_unit * std::abs(of_logit);
      const std::size_t place = ((b * s.key_heads + kh) * s.keys + k) * size;
      for (std::size_t i = 0; i < size; ++i) {
        const double grad = c.output_grad(b, h, q, i), of_query = c.query(b, h, q, i),
                     of_key = c.key(b, kh, k, i);
        value_grad.add(place + i, used * grad, std::abs(used * grad) * (of_itself + rows * u + p_unit));
        key_grad.add(place + i, of_logit * of_query,
                     std::abs(of_query) * (of_logit_error + rows * u * std::abs(of_logit)));
        query_grad.add(row + i, of_logit * of_key,
                       std::abs(of_key) * (of_logit_error + keys * u * std::abs(of_logit)));
      }
    }
  }
};

/// The first place where a result is further from the exact one than it may be.
void expect_within(const Rows& found, const Bounded& expected, const std::string& what) {
  std::size_t n = 0, wrong = 0;
  found.each([&](std::size_t b, std::size_t h, std::size_t r, std::size_t i) {
    const double value = found(b, h, r, i), off = std::abs(value - expected.exact[n]);
    if (!(off <= expected.bound[n]) && wrong++ == 0) {
      ADD_FAILURE() << what << " of row " << r << ", element " << i << ": " << value << ", exact "
                    << expected.exact[n] << ", bound " << expected.bound[n];
    }
    ++n;
  });
  EXPECT_TRUE(found.guards_hold()) << what;
}

/// All that run here; AMX's too, imitated, where there is AVX-512.
std::vector<const KernelTable*> tables() {
  std::vector<const KernelTable*> found = available_kernels();
  static const KernelTable emulated = [] {
    KernelTable table = kAvx512Kernels;
    table.isa = "amx";
    table.attention = &kEmulatedAmxAttention;
    return table;
  }();
  if (cpu_features().avx512) found.push_back(&emulated);
  return found;
}

double p_unit(const KernelTable& table, Format format) {
  return std::string(table.isa) == "amx" && format == Format::BF16 ? 1.01 * unit_of(format) : 0;
}

void expect_exact(Case& c, const std::string& what) {
  std::map<double, Exact> by_unit;
  for (const KernelTable* table : tables()) {
    SCOPED_TRACE(std::string(table->isa) + ", " + std::string(traits(c.call.format).name) + ", " + what);
    c.run(*table, 128);
    const double unit = p_unit(*table, c.call.format);
    const Exact& exact = by_unit.try_emplace(unit, c, unit).first->second;
    expect_within(c.output, exact.output, "output");
    expect_within(c.query_grad, exact.query_grad, "query gradient");
    expect_within(c.key_grad, exact.key_grad, "key gradient");
    expect_within(c.value_grad, exact.value_grad, "value gradient");
  }
}

TEST(Attention, IsItsDefinitionForEverySize) {
  for (const Format format : kRowFormats)
    for (const bool causal : {false, true})
      for (const auto& [queries, keys] :
           {std::pair<std::size_t, std::size_t>{1, 1}, {33, 33}, {77, 77}, {140, 140}, {70, 150}, {150, 70}})
        for (const std::size_t size : {1, 20, 32, 48}) {
          Case c(format, {1, 2, 1, queries, keys, size}, causal);
          expect_exact(c, std::to_string(queries) + " x " + std::to_string(keys) + " of " +
                              std::to_string(size) + (causal ? ", causal" : ""));
        }
}

TEST(Attention, IsItsDefinitionForLargeHeads) {
  for (const Format format : kRowFormats)
    for (const std::size_t size : {128, 200, 256}) {
      Case c(format, {1, 1, 1, 70, 70, size}, true);
      expect_exact(c, "head size " + std::to_string(size));
    }
}

TEST(Attention, SharesHeadsOfKeysAndDividesFewHeadsIntoParts) {
  for (const Format format : kRowFormats) {
    Case grouped(format, {2, 6, 2, 40, 40, 16}, true), long_one(format, {1, 2, 1, 600, 600, 8}, true);
    EXPECT_EQ(attention_parts(grouped.call), 1u);
    EXPECT_GT(attention_parts(long_one.call), 1u);
    expect_exact(grouped, "2 heads of keys for 6");
    expect_exact(long_one, "a long one");
  }
}

TEST(Attention, AddsMasks) {
  for (const Format format : kRowFormats)
    for (const MaskType mask : {MaskType::Bool, MaskType::FP32}) {
      Case c(format, {2, 2, 2, 70, 150, 24}, false, mask);
      expect_exact(c, mask == MaskType::Bool ? "a mask of Bools" : "a mask of numbers");
    }
}

TEST(Attention, DropsByTheRandomWordOfEachProbability) {
  for (const Format format : kRowFormats) {
    Case c(format, {2, 2, 1, 70, 150, 24}, false, MaskType::None, 0.3);
    expect_exact(c, "dropout");
    std::vector<float> factors(c.sizes.keys);
    attention_dropout_factors(c.call, (1 * 2 + 1) * 70 + 5, factors.data());
    for (std::size_t k = 0; k < c.sizes.keys; ++k) EXPECT_EQ(factors[k], c.factor(1, 1, 5, k));
  }
}

TEST(Attention, HasTheSameBitsHoweverQueriesAreSharedOut) {
  for (const KernelTable* table : tables())
    for (const bool causal : {false, true}) {
      const Sizes sizes{1, 2, 1, 300, 300, 40};
      Case whole(Format::BF16, sizes, causal), apart(Format::BF16, sizes, causal);
      whole.run(*table, 300);
      apart.run(*table, kAttentionQueries);
      EXPECT_TRUE(whole.output == apart.output) << table->isa;
      EXPECT_EQ(whole.tops, apart.tops) << table->isa;
      EXPECT_EQ(whole.log_sums, apart.log_sums) << table->isa;
      EXPECT_TRUE(whole.query_grad == apart.query_grad && whole.key_grad == apart.key_grad) << table->isa;
    }
}

// As LibTorch's _safe_softmax has it: 0, not the NaN of 0 / 0.
TEST(Attention, AQueryThatSeesNoKeyHasAnOutputOfZeroAndGivesNoGradient) {
  for (const KernelTable* table : tables())
    for (const MaskType type : {MaskType::Bool, MaskType::FP32}) {
      Case c(Format::BF16, {1, 1, 1, 20, 30, 16}, false, type);
      constexpr std::size_t kBlind = 7;
      for (std::size_t k = 0; k < 30; ++k) {
        c.bool_mask[kBlind * 30 + k] = false;
        c.float_mask[kBlind * 30 + k] = -std::numeric_limits<float>::infinity();
      }
      c.run(*table, 20);
      for (std::size_t i = 0; i < 16; ++i) {
        EXPECT_EQ(c.output(0, 0, kBlind, i), 0) << table->isa;
        EXPECT_EQ(c.query_grad(0, 0, kBlind, i), 0) << table->isa;
        EXPECT_TRUE(std::isfinite(c.key_grad(0, 0, 3, i))) << table->isa;
      }
      EXPECT_EQ(c.log_sums[kBlind], kInf);
    }
}

// The logarithm of a sum is lost beside a logit of 1e8 in FP32, and with it that two equal keys share a
// query.
TEST(Attention, ProbabilitiesOfLargeLogitsAddUpToOne) {
  for (const KernelTable* table : tables())
    for (const float logit : {1e4F, 1e6F, 1e8F, 1e12F}) {
      Case c(Format::BF16, {1, 1, 1, 20, 30, 16}, false);
      c.call.scale = logit;
      // Queries and keys are unit vectors: two keys fit each of the first queries.
      for (Rows* rows : {&c.query, &c.key}) rows->fill(0);
      for (std::size_t i = 0; i < 20; ++i) c.query.set(0, 0, i, i % 15, 1);
      for (std::size_t i = 0; i < 30; ++i) c.key.set(0, 0, i, i % 15, 1);
      c.output_grad.fill(1);
      c.run(*table, 20);
      for (std::size_t key = 0; key < 30; ++key)
        for (std::size_t i = 0; i < 16; ++i)
          // Queries 0 to 4 and 15 to 19 are the same five.
          EXPECT_EQ(c.value_grad(0, 0, key, i), key % 15 < 5 ? 1.0F : 0.5F) << table->isa << ", " << logit;
    }
}

// Models fill masks with the least number of a type; where that is all of a row, every key counts the same.
TEST(Attention, AFiniteMaskStaysFinite) {
  for (const KernelTable* table : tables())
    for (const float least : {-1e8F, -3.3895314e38F, 3.3e38F}) {
      Case c(Format::BF16, {1, 1, 1, 20, 32, 16}, false, MaskType::FP32);
      constexpr std::size_t kMasked = 7;
      for (std::size_t k = 0; k < 32; ++k) c.float_mask[kMasked * 32 + k] = least;
      c.query.fill(0);
      c.value.fill(2);
      c.output_grad.fill(0);
      for (std::size_t i = 0; i < 16; ++i) c.output_grad.set(0, 0, kMasked, i, 1);
      c.run(*table, 20);
      for (std::size_t i = 0; i < 16; ++i) {
        EXPECT_EQ(c.output(0, 0, kMasked, i), 2) << table->isa << ", " << least;
        EXPECT_EQ(c.value_grad(0, 0, 3, i), 1.0F / 32) << table->isa << ", " << least;
      }
    }
}

TEST(Attention, WhatIsNotFiniteReachesWhoeverSeesIt) {
  for (const KernelTable* table : tables())
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      constexpr std::size_t kBad = 40;
      const Sizes sizes{1, 1, 1, 90, 90, 16};
      const auto is_finite = [&](const Rows& rows, std::size_t r) {
        for (std::size_t i = 0; i < 16; ++i)
          if (!std::isfinite(rows(0, 0, r, i))) return false;
        return true;
      };
      Case of_query(Format::BF16, sizes, true);
      of_query.query.set(0, 0, kBad, 2, bad);
      of_query.run(*table, 90);
      EXPECT_FALSE(is_finite(of_query.output, kBad)) << table->isa << " " << bad;
      EXPECT_FALSE(is_finite(of_query.query_grad, kBad)) << table->isa << " " << bad;
      EXPECT_FALSE(is_finite(of_query.key_grad, 3)) << table->isa << " " << bad;
      EXPECT_FALSE(is_finite(of_query.value_grad, 3)) << table->isa << " " << bad;
      EXPECT_TRUE(is_finite(of_query.output, kBad - 1) && is_finite(of_query.output, kBad + 1)) << table->isa;

      Case of_value(Format::BF16, sizes, true);
      of_value.value.set(0, 0, kBad, 2, bad);
      of_value.run(*table, 90);
      for (std::size_t r = kBad; r < 90; ++r) EXPECT_FALSE(is_finite(of_value.output, r)) << table->isa;
      EXPECT_TRUE(is_finite(of_value.output, kBad / 32)) << table->isa;

      Case of_grad(Format::BF16, sizes, true);
      of_grad.output_grad.set(0, 0, kBad, 2, bad);
      of_grad.run(*table, 90);
      EXPECT_FALSE(is_finite(of_grad.query_grad, kBad)) << table->isa;
      EXPECT_FALSE(is_finite(of_grad.key_grad, kBad)) << table->isa;
      EXPECT_FALSE(is_finite(of_grad.value_grad, kBad)) << table->isa;
    }
}

}  // namespace
}  // namespace halfstep
