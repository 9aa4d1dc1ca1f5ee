#include "train/culprits.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/amax.h>
#include <c10/core/ScalarType.h>
#include <halfstep/error.h>
#include <halfstep/formats.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "words/numbers.h"

namespace halfstep::train {
namespace {

using detail::concat;
using nlohmann::json;

double largest_magnitude(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0.0 : at::amax(at::abs(tensor)).item<double>();  // hands a NaN on
}

// JSON has no NaN and no Inf.
json bits_of(double value) { return std::bit_cast<int64_t>(value); }
double number_of(const json& bits) { return std::bit_cast<double>(bits.get<int64_t>()); }

json json_of(const CulpritRecord& culprit) {
  return {{"step", culprit.step},           {"rank", culprit.rank},
          {"ranks", culprit.ranks},         {"op", culprit.op},
          {"inside", culprit.inside},       {"layer", culprit.layer},
          {"direction", culprit.direction}, {"inputs", culprit.inputs},
          {"output", culprit.output},       {"precision_is_cause", culprit.precision_is_cause},
          {"verdict", culprit.verdict},     {"propagated", culprit.propagated}};
}

CulpritRecord culprit_in(const json& told) {
  return {.step = told["step"],
          .rank = told["rank"],
          .ranks = told["ranks"],
          .op = told["op"],
          .inside = told["inside"],
          .layer = told["layer"],
          .direction = told["direction"],
          .inputs = told["inputs"],
          .output = told["output"],
          .precision_is_cause = told["precision_is_cause"],
          .verdict = told["verdict"],
          .propagated = told["propagated"]};
}

/// Names of layers are the program's, and may be no UTF-8.
std::string json_text(const json& told) { return told.dump(-1, ' ', false, json::error_handler_t::replace); }

/// A rank's own sum.
struct Part {
  int64_t rank = 0;
  double largest = 0, largest_part = 0;
  std::string shape;
};

std::string magnitude_text(double largest) {
  return std::isfinite(largest) ? concat("largest magnitude ", short_digits(largest)) : "not finite";
}

/// Finite numbers that an optimizer cannot take are not called so (GradSummary): their squares are Inf in
/// FP32.
std::string sum_text(const std::string& type, const Part& part, double largest) {
  return concat(type, " ", part.shape, ": ", magnitude_text(largest),
                std::isfinite(largest) ? ", whose square FP32 does not hold" : "");
}

CulpritRecord sum_of_batches(const FailedSum& failed, const std::vector<Part>& bad) {
  const Part& first = bad.front();
  CulpritRecord culprit{
      .rank = first.rank,
      .op = std::string(CulpritRecord::kSumOfBatches),
      .layer = failed.parameter,
      .direction = "backward",
      .inputs = {concat(counted(failed.micro_batches, "gradient"), ": ", magnitude_text(first.largest_part))},
      .output = sum_text("FP32", first, first.largest),
      .verdict = concat("The gradients of each of the ", failed.micro_batches,
                        " micro-batches are finite, their sum is too large.")};
  for (const Part& each : bad) culprit.ranks.push_back(each.rank);
  return culprit;
}

CulpritRecord sum_over_ranks(const FailedSum& failed, std::vector<Part> parts) {
  const bool is_fp16 = failed.type == at::kHalf;
  const std::string type = is_fp16 ? "FP16" : failed.type == at::kBFloat16 ? "BF16" : "FP32";
  CulpritRecord culprit{
      .op = std::string(CulpritRecord::kSumOverRanks), .layer = failed.parameter, .direction = "backward"};
  double total = 0;
  for (const Part& each : parts) {
    total += each.largest;
    // Cast before it travels: it needs no other rank to be Inf.
    if (is_fp16 && each.largest > traits(Format::FP16).max) culprit.ranks.push_back(each.rank);
  }
  culprit.rank = culprit.ranks.empty() ? 0 : culprit.ranks.front();
  culprit.output = sum_text(type, parts.front(), is_fp16 ? INFINITY : total);
  culprit.precision_is_cause = is_fp16;
  culprit.verdict =
      is_fp16 ? "Each rank's part is finite in FP32, and travels and is added in FP16, which ends at 65504: "
                "precision is the cause."
              : "Each rank's part is finite, their sum is too large.";
  constexpr size_t kMostInputs = 8;
  std::ranges::sort(parts, {}, [](const Part& each) { return std::pair(-each.largest, each.rank); });
  for (const Part& each : parts)
    if (culprit.inputs.size() < kMostInputs)
      culprit.inputs.push_back(
          concat("rank ", each.rank, ": FP32 ", each.shape, ", ", magnitude_text(each.largest)));
  return culprit;
}

std::optional<CulpritRecord> culprit_of_sum(const FailedSum& failed, const std::vector<Part>& parts) {
  if (parts.size() == 1) return sum_of_batches(failed, parts);
  // As GradSummary says it: a norm that is finite and not above 2^63, un-scaled.
  std::vector<Part> bad;
  for (const Part& each : parts)
    if (!(each.largest / failed.loss_scale <= 0x1p63)) bad.push_back(each);
  return bad.empty() ? sum_over_ranks(failed, parts) : sum_of_batches(failed, bad);
}

std::optional<CulpritRecord> decided_culprit(const std::vector<std::string>& texts,
                                             const std::optional<FailedSum>& failed_sum) {
  std::optional<CulpritRecord> first;
  std::vector<int64_t> failed;
  std::vector<Part> parts;
  bool complete = true;
  for (size_t i = 0; i < texts.size(); ++i) {
    const json told = json::parse(texts[i]);
    const auto rank = static_cast<int64_t>(i);
    complete = complete && told["complete"];
    if (told.contains("sum"))
      parts.push_back({.rank = rank,
                       .largest = number_of(told["sum"]["largest"]),
                       .largest_part = number_of(told["sum"]["largest_part"]),
                       .shape = told["sum"]["shape"]});
    if (!told.contains("culprit")) continue;
    failed.push_back(rank);
    if (first) continue;
    first = culprit_in(told["culprit"]);
    first->rank = rank;
  }
  if (first) {
    first->ranks = failed;
    return first;
  }
  if (!failed_sum || !complete || parts.size() != texts.size()) return std::nullopt;
  return culprit_of_sum(*failed_sum, parts);
}

}  // namespace

void SumAgain::add() {
  const at::NoGradGuard no_grad;
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined()) return;
  largest_part_ = std::max(largest_part_, largest_magnitude(grad));
  if (sum_.defined())
    sum_.add_(grad);
  else
    sum_ = grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
}

double SumAgain::largest() const { return sum_.defined() ? largest_magnitude(sum_) : 0.0; }

std::string SumAgain::shape() const { return concat(parameter_.sizes()); }

std::optional<CulpritRecord> agreed_culprit(const Ranks& ranks, Retrace mine,
                                            const std::optional<FailedSum>& failed_sum) {
  json told = {{"complete", mine.complete}};
  if (mine.culprit) told["culprit"] = json_of(*mine.culprit);
  if (mine.sum)
    told["sum"] = {{"largest", bits_of(mine.sum->largest())},
                   {"largest_part", bits_of(mine.sum->largest_part())},
                   {"shape", mine.sum->shape()}};
  const std::string verdict =
      ranks.decided("the culprit of a step", json_text(told), [&](const std::vector<std::string>& texts) {
        const auto culprit = decided_culprit(texts, failed_sum);
        return culprit ? json_text(json_of(*culprit)) : std::string();
      });
  return verdict.empty() ? std::nullopt : std::optional(culprit_in(json::parse(verdict)));
}

}  // namespace halfstep::train
