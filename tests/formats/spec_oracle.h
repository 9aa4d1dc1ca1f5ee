// The formats once more, written from the published documents and sharing no line with the library:
// IEEE 754-2019 (FP32, FP16), the OCP FP8 specification 1.0 (E4M3, E5M2), Noune et al. 2022, arXiv 2206.02915
// (FNUZ), the OCP MX specification 1.0 (E8M0, E2M1). Casts are a search over all values of the format.
#pragma once

#include <halfstep/formats.h>

#include <cstdint>
#include <string>
#include <vector>

namespace halfstep::oracle {

struct Spec {
  Format format;
  std::string name;
  int bits, exponent_bits, mantissa_bits, bias;
  double max, min_normal, min_subnormal, epsilon;
  std::vector<std::uint32_t> inf_codes;  // +Inf, -Inf
  std::uint32_t first_nan, last_nan;     // positive (or only) NaN codes; first > last: none
  bool nans_of_both_signs, signed_zero;
  int unused_low_bits = 0;
};

const std::vector<Spec>& specs();
const Spec& spec_of(Format format);

bool is_nan_code(const Spec& spec, std::uint32_t code);

/// The value of a finite code from sign, exponent and mantissa, exact in double.
double value_of_code(const Spec& spec, std::uint32_t code);

/// The two neighbours of |x| among the values of the format. Above max the upper one is the value that the
/// next code would have if it were a number.
struct Neighbours {
  double below, above;
  std::uint32_t code_below, code_above;  // equal when |x| is a value of the format
};

/// All finite values of a format that has at most 16 bits.
class Search {
 public:
  explicit Search(Format format);
  Neighbours neighbours(double magnitude) const;
  std::uint32_t cast(float x, CastMode mode, std::uint32_t random = 0) const;

 private:
  const Spec& spec_;
  std::vector<double> values_;  // ascending; index = code
};

/// Where casts go wrong: values of the format, midpoints between them, the FP32 neighbours of both, the ends
/// of every FP32 binade, zeros, infinities, NaNs, and random bits, each with both signs. Formats with 16
/// bits: every 61st code.
std::vector<float> edge_values(Format format);

}  // namespace halfstep::oracle
