#include "sweep.h"

#include <time.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <thread>

#include "base/cpu_features.h"
#include "f16c.h"
#include "formats/reference_cast.h"
#include "kernels/cast.h"
#include "kernels/cast_constants.h"

namespace halfstep::sweep {
namespace {

constexpr std::uint32_t kChunk = 1 << 15;  // codes of one chunk stay in the cache of a core
constexpr std::size_t kMismatchesToShow = 10;

double thread_seconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

std::uint32_t code_at(const void* codes, Format format, std::size_t i) {
  std::uint32_t code = 0;
  std::memcpy(&code, static_cast<const char*>(codes) + i * code_bytes(format), code_bytes(format));
  return code;
}

constexpr std::size_t kChunkBytes = 2 * std::size_t{kChunk};  // of the widest swept codes
using ChunkOfCodes = std::vector<std::uint8_t>;
using CodesOfModes = std::array<ChunkOfCodes, kModeCount>;

/// Format and modes are constants here, so that the compiler shares what the modes have in common, and the
/// reference can stay as it is written.
template <Format format>
void reference_codes(Range range, CodesOfModes& codes) {
  using C = Code<format>;
  C* out[kModeCount];
  for (int m = 0; m < kModeCount; ++m) out[m] = reinterpret_cast<C*>(codes[m].data());
  for (std::uint32_t i = 0; i < range.count; ++i) {
    const std::uint32_t input = range.first + i * range.stride;
    out[0][i] = static_cast<C>(reference_cast<format>(input, kModes[0].mode));
    out[1][i] = static_cast<C>(reference_cast<format>(input, kModes[1].mode));
    out[2][i] = static_cast<C>(reference_cast<format>(input, kModes[2].mode));
  }
}

template <int... f>
constexpr auto reference_table(std::integer_sequence<int, f...>) {
  return std::array{reference_codes<kSweptFormats[f]>...};
}
constexpr auto kReference = reference_table(std::make_integer_sequence<int, kSweptCount>{});

/// ml_dtypes rounds to nearest alone. Toward zero is the same code, or the one before where that is beyond
/// the input; what overflowed stops at max.
class StepBack {
 public:
  explicit StepBack(Format format) : format_(format), values_(std::size_t{1} << (traits(format).bits - 1)) {
    for (std::uint32_t code = 0; code < values_.size(); ++code)
      values_[code] = std::bit_cast<std::uint32_t>(decode_float(code, format));  // ordered as the numbers are
  }

  void operator()(Range range, void* codes) const {
    code_bytes(format_) == 1 ? step_back(range, static_cast<std::uint8_t*>(codes))
                             : step_back(range, static_cast<std::uint16_t*>(codes));
  }

 private:
  template <typename C>
  void step_back(Range range, C* codes) const {
    const FormatTraits& t = traits(format_);
    const std::uint32_t sign_bit = 1u << (t.bits - 1);
    for (std::uint32_t i = 0; i < range.count; ++i) {
      const std::uint32_t input = range.first + i * range.stride, magnitude = input & ~kFp32Sign;
      if (magnitude >= kFp32Inf) continue;
      std::uint32_t code = codes[i] & (sign_bit - 1);
      const bool overflowed = values_[code] >= kFp32Inf || (!t.has_signed_zero && codes[i] == t.nan_code);
      if (overflowed)
        code = t.max_code;
      else if (values_[code] > magnitude)
        code -= 1;
      const bool keeps_sign = (input & kFp32Sign) && (code != 0 || t.has_signed_zero);
      codes[i] = static_cast<C>(code | (keeps_sign ? sign_bit : 0));
    }
  }

  Format format_;
  std::vector<std::uint32_t> values_;  // FP32 bits of the positive codes
};

/// One thread's part: its buffers, its Python, its tally.
class Sweeper {
 public:
  explicit Sweeper(const std::string& python)
      : oracle_(python), tally_(available_kernels().size()), values_(kChunk), got_(kChunkBytes) {
    for (auto& codes : expected_) codes.resize(kChunkBytes);
    for (const Format format : kSweptFormats) step_back_.emplace_back(format);
    tally_.oracle_versions = oracle_.versions();
  }

  void take(Range range) {
    oracle_.request(range);
    for (std::uint32_t i = 0; i < range.count; ++i)
      values_[i] = std::bit_cast<float>(range.first + i * range.stride);
    for (int f = 0; f < kSweptCount; ++f) {
      compute_reference(f, range);
      for (std::size_t t = 0; t < available_kernels().size(); ++t) check_kernels(t, f, range);
      check_ml_dtypes(f, range);
      if (kSweptFormats[f] == Format::FP16 && cpu_features().avx2) check_processor(f, range);
    }
    tally_.inputs += range.count;
  }

  const Tally& tally() const { return tally_; }

 private:
  void compute_reference(int f, Range range) {
    const double begin = thread_seconds();
    kReference[f](range, expected_);
    tally_.reference.seconds += thread_seconds() - begin;
    tally_.reference.casts += std::uint64_t{kModeCount} * range.count;
  }

  void check_kernels(std::size_t t, int f, Range range) {
    const KernelTable& table = *available_kernels()[t];
    const Format format = kSweptFormats[f];
    for (int m = 0; m < kModeCount; ++m) {
      const double begin = thread_seconds();
      cast(std::span(values_).first(range.count), format, kModes[m].mode, got_.data(), table);
      tally_.kernels[t].seconds += thread_seconds() - begin;
      tally_.kernels[t].casts += range.count;
      for_each_difference(f, m, range, [&](std::uint32_t input, std::uint32_t got, std::uint32_t expected) {
        ++tally_.kernel_mismatches[t][f][m];
        tally_.note({describe(table.isa, f, m), input, got, expected});
      });
    }
  }

  void check_ml_dtypes(int f, Range range) {
    const std::size_t bytes = range.count * code_bytes(kSweptFormats[f]);
    oracle_.read(got_.data(), bytes);
    compare_with_oracle(Oracle::MlDtypes, f, kNotSaturating, range);
    if (is_asked(Oracle::MlDtypes, kSweptFormats[f], kTowardZero)) {
      const ChunkOfCodes nearest = got_;
      step_back_[f](range, got_.data());
      compare_with_oracle(Oracle::MlDtypes, f, kTowardZero, range);
      got_ = nearest;
    }
    std::uint8_t clamping_matters = 0;
    oracle_.read(&clamping_matters, 1);
    if (clamping_matters) oracle_.read(got_.data(), bytes);
    compare_with_oracle(Oracle::MlDtypes, f, kSaturating, range);
  }

  void check_processor(int f, Range range) {
    for (int m : {kNotSaturating, kTowardZero}) {
      f16c_codes(values_.data(), range.count, m == kTowardZero,
                 reinterpret_cast<std::uint16_t*>(got_.data()));
      compare_with_oracle(Oracle::Processor, f, m, range);
    }
  }

  void compare_with_oracle(Oracle oracle, int f, int m, Range range) {
    const Format format = kSweptFormats[f];
    const auto listed = [&](std::uint32_t input) {
      return std::any_of(std::begin(kDisagreements), std::end(kDisagreements), [&](const Disagreement& d) {
        return d.oracle == oracle && d.format == format && d.contains(input);
      });
    };
    OracleCounts& counts = tally_.oracles[static_cast<int>(oracle)][f][m];
    for_each_difference(f, m, range, [&](std::uint32_t input, std::uint32_t theirs, std::uint32_t ours) {
      if (listed(input)) {
        ++counts.listed;
      } else {
        ++counts.unlisted;
        tally_.note({describe(kOracleNames[static_cast<int>(oracle)], f, m), input, theirs, ours});
      }
    });
  }

  template <typename Visit>
  void for_each_difference(int f, int m, Range range, Visit visit) {
    const Format format = kSweptFormats[f];
    if (std::memcmp(got_.data(), expected_[m].data(), range.count * code_bytes(format)) == 0) return;
    for (std::uint32_t i = 0; i < range.count; ++i) {
      const std::uint32_t got = code_at(got_.data(), format, i),
                          expected = code_at(expected_[m].data(), format, i);
      if (got != expected) visit(range.first + i * range.stride, got, expected);
    }
  }

  static std::string describe(const char* who, int f, int m) {
    return std::string(who) + ", " + traits(kSweptFormats[f]).name + ", " + kModes[m].name;
  }

  MlDtypesOracle oracle_;
  Tally tally_;
  std::vector<float> values_;
  ChunkOfCodes got_;
  CodesOfModes expected_;
  std::vector<StepBack> step_back_;  // one a format
};

void add_progression(std::vector<Range>& ranges, std::uint64_t first, std::uint32_t stride) {
  const std::uint64_t count = ((std::uint64_t{1} << 32) - first + stride - 1) / stride;
  for (std::uint64_t done = 0; done < count; done += kChunk)
    ranges.push_back({static_cast<std::uint32_t>(first + done * stride), stride,
                      static_cast<std::uint32_t>(std::min<std::uint64_t>(kChunk, count - done))});
}

}  // namespace

void Tally::note(Mismatch mismatch) {
  if (first_mismatches.size() < kMismatchesToShow) first_mismatches.push_back(std::move(mismatch));
}

void Tally::add(const Tally& other) {
  inputs += other.inputs;
  for (int f = 0; f < kSweptCount; ++f)
    for (int m = 0; m < kModeCount; ++m) {
      for (int o = 0; o < kOracleCount; ++o) {
        oracles[o][f][m].listed += other.oracles[o][f][m].listed;
        oracles[o][f][m].unlisted += other.oracles[o][f][m].unlisted;
      }
      for (std::size_t t = 0; t < kernel_mismatches.size(); ++t)
        kernel_mismatches[t][f][m] += other.kernel_mismatches[t][f][m];
    }
  reference.seconds += other.reference.seconds;
  reference.casts += other.reference.casts;
  for (std::size_t t = 0; t < kernels.size(); ++t) {
    kernels[t].seconds += other.kernels[t].seconds;
    kernels[t].casts += other.kernels[t].casts;
  }
  for (const Mismatch& mismatch : other.first_mismatches) note(mismatch);
  oracle_versions = other.oracle_versions;
}

std::vector<Range> ranges_to_sweep(bool full) {
  std::vector<Range> ranges;
  if (full) {
    add_progression(ranges, 0, 1);
    return ranges;
  }
  // No swept format has more than 10 bits of mantissa, so its values, and the midpoints between them, end in
  // 12 zeros in FP32, subnormals included. These three hit every one of them and its FP32 neighbours on both
  // sides; zeros, infinities and the first and last NaN are among them.
  for (std::uint32_t first : {0u, 1u, 0xfffu}) add_progression(ranges, first, 0x1000);
  add_progression(ranges, 0, 251);
  return ranges;
}

Tally sweep(const std::vector<Range>& ranges, int threads, const std::string& python,
            void (*progress)(double)) {
  Tally total(available_kernels().size());
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;  // guards total and failure
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      Sweeper sweeper(python);
      for (std::size_t i = next++; i < ranges.size(); i = next++) {
        sweeper.take(ranges[i]);
        if (i % 64 == 0) progress(static_cast<double>(i) / static_cast<double>(ranges.size()));
      }
      const std::lock_guard lock(mutex);
      total.add(sweeper.tally());
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) pool.emplace_back(work);
  for (std::thread& thread : pool) thread.join();
  if (failure) std::rethrow_exception(failure);
  return total;
}

}  // namespace halfstep::sweep
