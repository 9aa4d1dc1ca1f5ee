// Event files for TensorBoard: scalars and histograms. Knows no Torch.
#pragma once

#include <halfstep/config.h>
#include <halfstep/tensor_stats.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace halfstep {

/// Values, counted. Bucket i holds those from limits[i-1] up to, not including, limits[i].
struct Histogram {
  double min = 0.0;
  double max = 0.0;
  double count = 0.0;
  double sum = 0.0;
  double sum_of_squares = 0.0;
  std::vector<double> limits{};  ///< ascending
  std::vector<double> counts{};  ///< as many
  int64_t not_finite = 0;        ///< Inf and NaN: in none of the above
};

/// One bucket a power of two, as wide as the numbers' own exponents: what a format would lose at either end
/// of its range can be read from it. Runs of empty buckets are one.
[[nodiscard]] HALFSTEP_API Histogram histogram_of(std::span<const float> values);

/// Of the binary logarithms of the magnitudes: one bucket a binade, which holds those from 2^e up to 2^(e+1).
/// Zeros are in none; NaN and Inf are `not_finite`. Sums take each value in the middle of its bucket.
[[nodiscard]] HALFSTEP_API Histogram histogram_of(const TensorStats& stats);

/// One event file, named `events.out.tfevents.<unix time>.<host>` as TensorBoard looks for it. TensorBoard
/// reads files in the order of their names, so the time is later than that of every file in the folder,
/// whatever the clock says. Only ever appended to. Events are kept until 64 KiB have come together, `flush`
/// is called, or the file goes out of scope; the last cannot report an error, so flush before. What the disk
/// refuses is kept, up to 64 MB, and tried again; `flush` alone throws.
class HALFSTEP_API EventFile {
 public:
  /// `resumed_after`: TensorBoard drops what earlier files of the folder tell of later steps.
  explicit EventFile(const std::filesystem::path& folder, std::optional<int64_t> resumed_after = {});
  ~EventFile();
  EventFile(EventFile&&) noexcept;
  EventFile& operator=(EventFile&&) noexcept;

  /// The format has FP32 for scalars; a double is rounded to it. NaN and infinities are kept.
  void scalar(std::string_view tag, double value, int64_t step);
  void histogram(std::string_view tag, const Histogram& histogram, int64_t step);
  void histogram(std::string_view tag, std::span<const float> values, int64_t step) {
    histogram(tag, histogram_of(values), step);
  }

  /// Writes what was kept; a FileError where the disk refuses it.
  void flush();
  /// Of events that were refused and found no room in memory either.
  int64_t lost_bytes() const;
  const std::filesystem::path& path() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace halfstep
