// One function for each rule, with its thresholds and their reasons. A false alarm is worse than silence:
// what a healthy run does now and then is below every threshold.
#include <halfstep/error.h>
#include <halfstep/findings.h>
#include <halfstep/formats.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "words/numbers.h"

namespace halfstep {
namespace {

using detail::concat;

// Causes before what follows from them: of the same severity the first is the one to mend.
constexpr std::array<std::string_view, 16> kCodes = {"nan-producer",
                                                     "overflow-attention-logits",
                                                     "activation-near-overflow",
                                                     "scale-at-floor",
                                                     "scale-falling",
                                                     "gradient-underflow",
                                                     "accumulation-rounding",
                                                     "stalled-weights",
                                                     "outlier-channels",
                                                     "stale-amax",
                                                     "fp8-saturating",
                                                     "fp8-vanishing",
                                                     "rank-differs",
                                                     "skip-spiral",
                                                     "loss-not-finite",
                                                     "loss-spike"};

constexpr size_t kKeptSteps = 200;
constexpr size_t kKeptCulprits = 32;
constexpr size_t kKeptRankLosses = 5;

/// What the rules need of a step that was logged.
struct Look {
  int64_t step = 0;
  double loss = 0.0;
  double lr = 0.0;
  bool skipped = false;
  bool searching = false;  // the loss scale has not found its level yet
  std::string parameter{};
  std::optional<double> loss_scale{}, stalled_share{}, saturated_share{}, vanished_share{};
  std::string stalled_most{}, saturated_most{}, vanished_most{};
};

/// Of the ranks in a step that was looked at, by rank.
struct RankLosses {
  int64_t step = 0;
  std::vector<double> losses;
};

struct NamedShare {
  std::string name;
  double share = 0.0;
};

/// The probes of one step.
struct Sample {
  int64_t step = 0;
  int64_t gradient_values = 0;
  bool skipped = false;                 // gradients that are not finite say nothing of small ones
  double gradients_lost = 0.0;          // values that are, or would be, zero in FP16
  std::vector<NamedShare> lost_from{};  // gradients, by name
  std::vector<NamedShare> outliers{};   // tensors most of which E4M3 cannot hold beside their largest value

  // Gradients that hold nothing but zeros, and what decides whether those are lost.
  int64_t all_zero_values = 0;
  std::vector<NamedShare> all_zero{};
  double values_not_zero = 0.0, low_values = 0.0;
};

/// What the rules see: the run so far.
struct Seen {
  RunSetup setup{};
  std::deque<Look> looks{};  // the latest kKeptSteps
  std::deque<CulpritRecord> culprits{};
  std::deque<RankLosses> rank_losses{};  // the latest kKeptRankLosses; what is not finite has a culprit
  std::optional<double> first_loss_scale{};
  std::optional<double> first_loss{};  // of those that are finite
  double highest_lr = 0.0;
  bool searching = true;
  std::optional<int64_t> summed_at{};               // the step whose probes told setup.summed_parts
  std::optional<Sample> sample{}, sample_before{};  // the latest complete ones
  std::optional<ProbeRecord> largest_activation{};
  int64_t spike_steps = 0;  // losses in a row far above those before
  int64_t spike_began = 0;
  double spike_level = 0.0;
  std::deque<double> usual_losses{};  // the latest that were none of a spike
};

using Rule = std::optional<Finding> (*)(const Seen&);

bool is_fp16(const Seen& seen) {
  return seen.setup.compute == "fp16" || (!seen.looks.empty() && seen.looks.back().loss_scale);
}

bool has_recipe(const RunSetup& setup) {
  return setup.compute.starts_with("fp8") || setup.compute == "mxfp8" || setup.compute == "nvfp4";
}

bool names_attention(std::string_view name) {
  return name.find("attn") != name.npos || name.find("attention") != name.npos;
}

/// The latest steps of which something is known, at most `most`.
std::vector<std::pair<int64_t, double>> latest(const Seen& seen, std::optional<double> Look::* value,
                                               size_t most) {
  std::vector<std::pair<int64_t, double>> found;
  for (auto look = seen.looks.rbegin(); look != seen.looks.rend() && found.size() < most; ++look)
    if ((*look).*value) found.emplace_back(look->step, *((*look).*value));
  std::ranges::reverse(found);
  return found;
}

/// The name whose steps, from `since` on, have the largest sum of shares; of several the first of the
/// alphabet.
std::string largest(const Seen& seen, std::string Look::* name, std::optional<double> Look::* share,
                    int64_t since) {
  std::map<std::string, double> sums;
  for (const Look& look : seen.looks)
    if (look.step >= since && !(look.*name).empty()) sums[look.*name] += (look.*share).value_or(0.0);
  const auto most = std::ranges::max_element(sums, {}, [](const auto& each) { return each.second; });
  return most == sums.end() ? std::string() : most->first;
}

/// " Most in h.0.up.weight."
std::string most_in(const std::string& name) { return name.empty() ? "" : concat(" Most in ", name, "."); }

double mean_of(std::span<const std::pair<int64_t, double>> values) {
  double sum = 0.0;
  for (const auto& [step, value] : values) sum += value;
  return sum / static_cast<double>(values.size());
}

std::vector<NamedShare> worst_first(std::vector<NamedShare> named) {
  std::ranges::sort(named, [](const NamedShare& a, const NamedShare& b) {
    return a.share != b.share ? a.share > b.share : a.name < b.name;
  });
  return named;
}

/// The first three.
std::string names_of(std::span<const NamedShare> named) {
  constexpr size_t kMostNames = 3;
  std::string text;
  for (size_t i = 0; i < std::min(named.size(), kMostNames); ++i)
    text += concat(i == 0 ? "" : ", ", named[i].name, " (", percent(named[i].share), ")");
  if (named.size() > kMostNames) text += concat(" and ", named.size() - kMostNames, " more");
  return text;
}

/// As a person asks for it: a result that was cast where it was made is that operation's.
std::string operation_of(const CulpritRecord& culprit) {
  const bool casts = culprit.op == "_to_copy" || culprit.op == "to" || culprit.op == "copy_";
  // Rules are for what the program calls: where a processor has instructions for the type, a product is made
  // by another operation inside.
  constexpr std::string_view kProducts[] = {"addmm", "bmm", "linear", "matmul", "mm"};
  constexpr std::string_view kPieces[] = {"addmm", "baddbmm", "bmm", "mm", "halfstep::product"};
  const bool is_piece = std::ranges::find(kProducts, culprit.inside) != std::end(kProducts) &&
                        std::ranges::find(kPieces, culprit.op) != std::end(kPieces);
  return is_piece || (casts && !culprit.inside.empty()) ? culprit.inside : culprit.op;
}

/// "in h.0.mlp", "after h.0.mlp"; with a space before it, and empty where nothing is known.
std::string place_of(const CulpritRecord& culprit) {
  if (culprit.layer.empty()) return "";
  const bool is_between = culprit.layer.starts_with("after ") || culprit.layer.starts_with("before ");
  return concat(is_between ? " " : " in ", culprit.layer);
}

/// Where the skipped steps come from: the latest culprit, or the parameter that a skipped step names.
void name_origin(const Seen& seen, Finding& finding) {
  if (!seen.culprits.empty()) {
    const CulpritRecord& culprit = seen.culprits.back();
    finding.layer = culprit.layer;
    finding.op = operation_of(culprit);
    finding.evidence +=
        concat(" The first operation that was not finite at step ", culprit.step, ": ", operation_of(culprit),
               place_of(culprit), " (", culprit.direction, "). ", culprit.verdict);
    return;
  }
  for (auto look = seen.looks.rbegin(); look != seen.looks.rend(); ++look)
    if (look->skipped && !look->parameter.empty()) {
      finding.layer = look->parameter;
      finding.evidence +=
          concat(" The first gradient that is not finite at step ", look->step, ": ", look->parameter, ".");
      return;
    }
}

// A loss scale makes gradients overflow now and then, in backward, and is lowered: that is how it finds its
// level. Everything else that is not finite ruins the step for another reason.
bool is_from_loss_scale(const Seen& seen, const CulpritRecord& culprit) {
  return is_fp16(seen) && culprit.direction == "backward";
}

/// q x k of attention: a product of two activations, in a layer of that name or in the fused operation.
bool makes_attention_logits(const CulpritRecord& culprit) {
  const auto is_product = [](std::string_view op) {
    return op.find("bmm") != op.npos || op.find("matmul") != op.npos || op.find("einsum") != op.npos;
  };
  const bool fused = culprit.op.find("scaled_dot_product") != culprit.op.npos ||
                     culprit.inside.find("scaled_dot_product") != culprit.inside.npos;
  return fused || (is_product(operation_of(culprit)) && names_attention(culprit.layer));
}

std::string evidence_of(const CulpritRecord& culprit) {
  std::string text;
  for (const std::string& input : culprit.inputs) text += input + "; ";
  text += concat("output: ", culprit.output, ". ", culprit.verdict);
  if (culprit.propagated > 0)
    text += concat(" ", counted(culprit.propagated, "later operation"), " propagated it.");
  return text;
}

std::string remedy_for(const CulpritRecord& culprit) {
  if (culprit.op == "input")
    return "Check the data of this step: a batch holds a number that is not finite. Precision does not fix "
           "it.";
  if (culprit.op == CulpritRecord::kSumOverRanks && culprit.output.starts_with("FP16"))
    return "Add ranks in FP32: run.reduction=fp32. A loss scale is lowered until the sum fits FP16.";
  if (culprit.is_sum())
    return "Lower the learning rate, or what the loss is multiplied by: the sum is beyond what FP32 can "
           "square.";
  if (culprit.op == "weight")
    return "Restart from a checkpoint before this step; the weight itself is not finite.";
  // As `output` begins: the type that the operation was run in. Where precision is the cause FP32 has a
  // number, unless the operation ran in it and overflows inside.
  if (culprit.precision_is_cause && culprit.output.starts_with("FP32"))
    return concat(
        "It ran in FP32 already, and overflows inside: lower the learning rate, clip (optimizer.clip_norm), "
        "or scale what ",
        operation_of(culprit), " is given; restart from a checkpoint before this step.");
  if (culprit.precision_is_cause)
    return concat("Keep this operation in FP32, --set precision.ops.", operation_of(culprit),
                  "=fp32, if `halfstep explain policy` has a row for it",
                  culprit.output.starts_with("BF16") ? "." : ", or train in bf16, which has FP32's range.");
  return concat(
      "Higher precision of this operation does not help: fix its input. Clamp it, or add an epsilon before ",
      operation_of(culprit), ".",
      culprit.output.starts_with("FP16")
          ? " If it is given a 0 that FP16 rounded there, a run in bf16 has none of it."
          : "");
}

std::optional<Finding> nan_producer(const Seen& seen) {
  if (seen.culprits.empty()) return {};
  const CulpritRecord& culprit = seen.culprits.back();
  const bool normal = is_from_loss_scale(seen, culprit);
  if (!normal && is_fp16(seen) && makes_attention_logits(culprit)) return {};
  const std::string rank = seen.setup.ranks > 1 ? concat(" on rank ", culprit.rank) : "";
  Finding finding{
      .code = "nan-producer",
      .severity = normal ? Severity::Note : Severity::Serious,
      .step = culprit.step,
      .what =
          culprit.is_sum()
              ? concat("The ", culprit.op, " is too large for the gradients of ", culprit.layer, " at step ",
                       with_commas(culprit.step), ", though each of its parts is finite.")
              : concat(operation_of(culprit), place_of(culprit), " (", culprit.direction,
                       ") made numbers that are not finite at step ", with_commas(culprit.step), rank, "."),
      .evidence = evidence_of(culprit),
      .remedy = normal && !culprit.is_sum()
                    ? "None, if it is rare: the loss scale was too high for this step, and was lowered."
                    : remedy_for(culprit),
      .layer = culprit.layer,
      .op = operation_of(culprit)};
  return finding;
}

// Half of FP16's largest number: one doubling more and it is Inf.
constexpr double kNearOverflow = traits(Format::FP16).max / 2;

std::optional<Finding> overflow_attention_logits(const Seen& seen) {
  if (!is_fp16(seen)) return {};
  Finding finding{
      .code = "overflow-attention-logits",
      .severity = Severity::Serious,
      .step = 0,
      .what = {},
      .evidence = {},
      .remedy =
          "Train in bf16. In fp16: scale queries by 1/sqrt(head size) before the product, or normalise "
          "queries and keys.",
      .layer = {},
      .op = {}};
  if (!seen.culprits.empty() && makes_attention_logits(seen.culprits.back()) &&
      seen.culprits.back().direction == "forward") {
    const CulpritRecord& culprit = seen.culprits.back();
    finding.step = culprit.step;
    finding.what = concat("Attention logits", place_of(culprit), " are beyond FP16's 65504 at step ",
                          with_commas(culprit.step), ".");
    finding.evidence = evidence_of(culprit);
    finding.layer = culprit.layer;
    finding.op = operation_of(culprit);
    return finding;
  }
  const auto& largest = seen.largest_activation;
  if (!largest || largest->stats.amax < kNearOverflow || !names_attention(largest->name)) return {};
  finding.severity = Severity::Warning;
  finding.step = largest->step;
  finding.what = concat("Activations of ", largest->name, " reach ", digits(largest->stats.amax), " at step ",
                        with_commas(largest->step), "; FP16 ends at 65504.");
  finding.evidence = concat("Largest magnitude of ", with_commas(largest->stats.count),
                            " values. A product of two of them, as attention takes, is larger still.");
  finding.layer = largest->name;
  return finding;
}

std::optional<Finding> activation_near_overflow(const Seen& seen) {
  const auto& largest = seen.largest_activation;
  if (!is_fp16(seen) || !largest || largest->stats.amax < kNearOverflow || names_attention(largest->name))
    return {};
  return Finding{.code = "activation-near-overflow",
                 .severity = Severity::Warning,
                 .step = largest->step,
                 .what = concat("Activations of ", largest->name, " reach ", digits(largest->stats.amax),
                                " at step ", with_commas(largest->step), "; FP16 ends at 65504."),
                 .evidence = concat("Largest magnitude of ", with_commas(largest->stats.count),
                                    " values; twice that is Inf, and no loss scale changes it."),
                 .remedy = "Train in bf16, or keep the operations around this layer in FP32 (precision.ops).",
                 .layer = largest->name,
                 .op = {}};
}

std::optional<Finding> gradient_underflow(const Seen& seen) {
  // Adam divides by the size of a gradient: what is left still moves the weights, and a few per cent of
  // zeros among small values cost nothing that could be measured. In two samples, since a batch by itself
  // may have small gradients.
  constexpr double kWarning = 0.05, kSerious = 0.3;
  if (!is_fp16(seen) || !seen.sample || !seen.sample_before) return {};
  const auto share_of = [](const Sample& sample) {
    return sample.gradient_values == 0 || sample.skipped
               ? 0.0
               : sample.gradients_lost / static_cast<double>(sample.gradient_values);
  };
  const double share = share_of(*seen.sample), before = share_of(*seen.sample_before);
  if (std::min(share, before) < kWarning) return {};
  std::string at_scale;
  if (!seen.looks.empty() && seen.looks.back().loss_scale)
    at_scale = concat(", at a loss scale of ", short_digits(*seen.looks.back().loss_scale));
  const auto worst = worst_first(seen.sample->lost_from);
  return Finding{
      .code = "gradient-underflow",
      .severity = std::min(share, before) >= kSerious ? Severity::Serious : Severity::Warning,
      .step = seen.sample_before->step,
      .what = concat(percent(share), " of the gradient values are zero in FP16 at step ",
                     with_commas(seen.sample->step), at_scale, "."),
      .evidence =
          concat("Of ", with_commas(seen.sample->gradient_values), " values; ", percent(before), " at step ",
                 with_commas(seen.sample_before->step), ". Most: ", names_of(worst), "."),
      .remedy =
          "Raise the loss scale: leave precision.loss_scale at its defaults, which find it, or raise "
          "precision.loss_scale.initial. bf16 needs none.",
      .layer = worst.empty() ? std::string() : worst.front().name,
      .op = {}};
}

std::optional<Finding> accumulation_rounding(const Seen& seen) {
  // The sum of k equal parts is k times a part, and its last digit 2^(1-p) of that: from k = 2^p on a part is
  // less than half a digit, and is lost whole. At a quarter of that the roundings are an eighth of a part.
  const RunSetup& setup = seen.setup;
  if (setup.sum_type == "fp32" || (seen.looks.empty() && !seen.summed_at)) return {};
  const Format format = setup.sum_type == "bf16" ? Format::BF16 : Format::FP16;
  const int64_t most_parts = int64_t{1} << (traits(format).mantissa_bits + 1);
  if (setup.summed_parts < most_parts / 4) return {};
  return Finding{
      .code = "accumulation-rounding",
      .severity = setup.summed_parts >= most_parts ? Severity::Serious : Severity::Warning,
      .step = seen.summed_at ? *seen.summed_at : seen.looks.front().step,
      .what =
          concat("The gradients of ", with_commas(setup.summed_parts), " parts of a step are added in ",
                 traits(format).name, ", which holds ", traits(format).mantissa_bits + 1, " binary digits."),
      .evidence = concat("From ", most_parts, " equal parts on, each further one is rounded away; here ",
                         with_commas(setup.summed_parts), " are added."),
      .remedy =
          "Add them in FP32: Accumulation::Fp32 and mp.backward(loss) in a loop of your own, "
          "run.reduction=fp32 with ranks.",
      .layer = {},
      .op = {}};
}

std::optional<Finding> stalled_weights(const Seen& seen) {
  // Masters and Kahan's compensation lose nothing of a rate that trains; pure BF16 loses most of it. Twenty
  // steps, so that the last ones of a schedule that ends at zero say nothing.
  constexpr double kWarning = 0.25, kSerious = 0.6;
  constexpr size_t kSteps = 20, kLeast = 10;
  // A cosine that ends at zero is below a hundredth of its rate for the last 6% of a run: nothing moves
  // there, and nothing needs to.
  constexpr double kLeastOfRate = 0.01;
  if (!seen.looks.empty() && seen.looks.back().lr < kLeastOfRate * seen.highest_lr) return {};
  const auto shares = latest(seen, &Look::stalled_share, kSteps);
  if (shares.size() < kLeast) return {};
  const double share = mean_of(shares);
  if (share < kWarning) return {};
  const std::string layer = largest(seen, &Look::stalled_most, &Look::stalled_share, shares.front().first);
  return Finding{.code = "stalled-weights",
                 .severity = share >= kSerious ? Severity::Serious : Severity::Warning,
                 .step = shares.front().first,
                 .what = concat(percent(share), " of the updates are too small to move a weight."),
                 .evidence = concat("Mean of the last ", shares.size(), " logged steps, up to step ",
                                    with_commas(shares.back().first), "; ", percent(shares.back().second),
                                    " in the last.", most_in(layer)),
                 .remedy =
                     "Keep a master: leave precision.weights at its default (WeightStorage::SplitMaster or "
                     "Fp32Master). If there is one already, the learning rate is too small for the weights.",
                 .layer = layer,
                 .op = {}};
}

bool has_one_scale_per_tensor(const RunSetup& setup) {
  return setup.compute == "fp8-delayed" || setup.compute == "fp8-current";
}

std::optional<Finding> outlier_channels(const Seen& seen) {
  if (!has_one_scale_per_tensor(seen.setup) || !seen.sample || !seen.sample_before) return {};
  std::vector<NamedShare> both;
  for (const NamedShare& now : seen.sample->outliers)
    if (std::ranges::find(seen.sample_before->outliers, now.name, &NamedShare::name) !=
        seen.sample_before->outliers.end())
      both.push_back(now);
  if (both.empty()) return {};
  both = worst_first(std::move(both));
  return Finding{
      .code = "outlier-channels",
      .severity = Severity::Warning,
      .step = seen.sample_before->step,
      .what = concat("A few large values take the range of E4M3 from the rest of ", both.front().name, ": ",
                     percent(both.front().share), " of its values are zero or subnormal next to them."),
      .evidence = concat("One scale for the tensor, in two samples up to step ",
                         with_commas(seen.sample->step), ": ", names_of(both), "."),
      .remedy = concat("Take a recipe with a scale for each block, --precision mxfp8 or fp8-block, or keep "
                       "the layer high: precision.keep_high=[\"",
                       both.front().name, "*\"]."),
      .layer = both.front().name,
      .op = {}};
}

// Of what a recipe holds at the format's largest number. Its own amax makes the scale of every recipe but
// fp8-delayed, which meets a larger value now and then: one in a million in a healthy run.
constexpr double kSaturatedWarning = 0.001, kSaturatedSerious = 0.01;

std::optional<Finding> stale_amax(const Seen& seen) {
  // Twenty times what it was: noise does not do that, a distribution that has moved does.
  constexpr double kJump = 20.0;
  constexpr size_t kNow = 3, kBefore = 20, kLeastBefore = 10;
  if (seen.setup.compute != "fp8-delayed") return {};
  const auto shares = latest(seen, &Look::saturated_share, kNow + kBefore);
  if (shares.size() < kNow + kLeastBefore) return {};
  const std::span all(shares);
  const double now = mean_of(all.last(kNow)), before = mean_of(all.first(all.size() - kNow));
  if (!(now >= kSaturatedWarning && now >= kJump * before)) return {};  // a NaN, too
  const auto began =
      std::ranges::find_if(all.last(kNow), [](const auto& each) { return each.second >= kSaturatedWarning; });
  const std::string layer = largest(seen, &Look::saturated_most, &Look::saturated_share, began->first);
  return Finding{.code = "stale-amax",
                 .severity = now >= kSaturatedSerious ? Severity::Serious : Severity::Warning,
                 .step = began->first,
                 .what = concat("Values have grown beyond the scales of earlier steps: ", percent(now),
                                " of the FP8 values are held at the format's largest number, ",
                                percent(before), " before."),
                 .evidence = concat("Steps ", with_commas(all[all.size() - kNow].first), " to ",
                                    with_commas(all.back().first), " against the ", all.size() - kNow,
                                    " logged steps before them.", most_in(layer)),
                 .remedy =
                     "Take fp8-current or mxfp8, whose scales are those of the values themselves; with "
                     "fp8-delayed, a margin (DelayedScaling::margin = 1).",
                 .layer = layer,
                 .op = {}};
}

std::optional<Finding> fp8_saturating(const Seen& seen) {
  constexpr size_t kSteps = 20;
  // NVFP4 rounds a block's scale to E4M3, and holds some of each block's largest values by design.
  if (!has_recipe(seen.setup) || seen.setup.compute == "nvfp4") return {};
  const auto shares = latest(seen, &Look::saturated_share, kSteps);
  if (shares.size() < kSteps) return {};
  const double share = mean_of(shares);
  if (share < kSaturatedWarning) return {};
  const std::string layer =
      largest(seen, &Look::saturated_most, &Look::saturated_share, shares.front().first);
  return Finding{
      .code = "fp8-saturating",
      .severity = share >= kSaturatedSerious ? Severity::Serious : Severity::Warning,
      .step = shares.front().first,
      .what = concat(percent(share), " of the FP8 values are held at the format's largest number."),
      .evidence = concat("Mean of ", shares.size(), " logged steps, up to step ",
                         with_commas(shares.back().first), ".", most_in(layer)),
      .remedy =
          "Take fp8-current or mxfp8, whose scales are those of the values themselves, or a margin "
          "(DelayedScaling::margin = 1).",
      .layer = layer,
      .op = {}};
}

std::optional<Finding> fp8_vanishing(const Seen& seen) {
  constexpr double kWarning = 0.05;
  constexpr size_t kSteps = 20;
  if (!has_recipe(seen.setup) || seen.setup.compute == "nvfp4") return {};
  const auto shares = latest(seen, &Look::vanished_share, kSteps);
  if (shares.size() < kSteps) return {};
  const double share = mean_of(shares);
  if (share < kWarning) return {};
  const std::string layer = largest(seen, &Look::vanished_most, &Look::vanished_share, shares.front().first);
  return Finding{
      .code = "fp8-vanishing",
      .severity = Severity::Warning,
      .step = shares.front().first,
      .what = concat(percent(share), " of the FP8 values that are not zero become zero."),
      .evidence = concat("Mean of ", shares.size(), " logged steps, up to step ",
                         with_commas(shares.back().first), ".", most_in(layer)),
      .remedy =
          "Take a recipe with a scale for each block, --precision mxfp8, or keep the layers high that "
          "have outliers (precision.keep_high).",
      .layer = layer,
      .op = {}};
}

/// The remedy of a rank that differs, whichever way.
constexpr std::string_view kLookAtRank =
    "Check that rank's part of the data, then its hardware: run the same part on another machine.";

std::optional<Finding> rank_fails_alone(const Seen& seen) {
  // Steps in which one rank alone failed, the same one in all. Bad batches that fall on ranks by chance do so
  // n times in a row once in ranks^(n-1) runs: less than one in a hundred, and five of them at least.
  constexpr size_t kLeast = 5;
  constexpr double kLeastOdds = 100.0;
  std::vector<const CulpritRecord*> alone;
  for (const CulpritRecord& culprit : seen.culprits) {
    // Those that a loss scale makes are not counted; of old logs nobody knows which ranks failed.
    if (is_from_loss_scale(seen, culprit) || culprit.is_sum()) continue;
    if (culprit.ranks.size() != 1 || (!alone.empty() && alone.front()->ranks != culprit.ranks)) return {};
    alone.push_back(&culprit);
  }
  if (alone.size() < kLeast ||
      std::pow(static_cast<double>(seen.setup.ranks), static_cast<double>(alone.size() - 1)) < kLeastOdds)
    return {};
  return Finding{
      .code = "rank-differs",
      .severity = Severity::Warning,
      .step = alone.front()->step,
      .what = concat("Only rank ", alone.front()->ranks.front(), " of ", seen.setup.ranks,
                     " makes numbers that are not finite."),
      .evidence = concat(alone.size(), " times from step ", with_commas(alone.front()->step), " to step ",
                         with_commas(alone.back()->step), ", and no other rank in the same steps."),
      .remedy = std::string(kLookAtRank),
      .layer = {},
      .op = {}};
}

double median_of(std::vector<double> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::ranges::nth_element(values, middle);
  return *middle;
}

/// The rank whose loss is far from all others', if there is one alone; of two ranks the one with the larger.
std::optional<size_t> rank_far_off(const std::vector<double>& losses, double first_loss) {
  // Ranks have different batches. Half of the median is more than those make, and a hundredth of the first
  // loss more than what is left of a loss that has been learned to 0. Nobody knows which of two is right, nor
  // how far they lie apart by themselves: a factor that no batch explains.
  constexpr double kDeviations = 8.0, kDeviationsPerMedian = 1.4826, kRelative = 0.5, kOfFirst = 0.01,
                   kFactorOfTwo = 100.0;
  const double least = kOfFirst * std::abs(first_loss);
  if (losses.size() == 2) {
    const size_t larger = std::abs(losses[1]) > std::abs(losses[0]) ? 1 : 0;
    const double large = std::abs(losses[larger]), small = std::abs(losses[1 - larger]);
    return large >= kFactorOfTwo * small && large > least ? std::optional(larger) : std::nullopt;
  }
  const double level = median_of(losses);
  std::vector<double> distances;
  for (const double loss : losses) distances.push_back(std::abs(loss - level));
  const double bound = std::max(
      {kDeviations * kDeviationsPerMedian * median_of(distances), kRelative * std::abs(level), least});
  const auto far = std::ranges::max_element(distances);
  const auto number = std::ranges::count_if(distances, [&](double each) { return each > bound; });
  return number == 1 ? std::optional(static_cast<size_t>(far - distances.begin())) : std::nullopt;
}

std::optional<Finding> rank_has_another_loss(const Seen& seen) {
  if (seen.rank_losses.size() < kKeptRankLosses) return {};
  std::optional<size_t> rank;
  for (const auto& [step, losses] : seen.rank_losses) {
    const auto far = rank_far_off(losses, seen.first_loss.value_or(0.0));
    if (!far || (rank && *rank != *far)) return {};
    rank = far;
  }
  const auto& [step, losses] = seen.rank_losses.back();
  const bool of_two = losses.size() == 2;
  std::vector<double> others = losses;
  others.erase(others.begin() + static_cast<std::ptrdiff_t>(*rank));
  return Finding{
      .code = "rank-differs",
      .severity = Severity::Warning,
      .step = seen.rank_losses.front().step,
      .what = of_two ? concat("The two ranks' losses are far apart: ", digits(losses[0]), " on rank 0 and ",
                              digits(losses[1]), " on rank 1, at step ", with_commas(step), ".")
                     : concat("Rank ", *rank, "'s loss is far from that of the other ", others.size(),
                              " ranks: ", digits(losses[*rank]), " against ", digits(median_of(others)),
                              ", their median, at step ", with_commas(step), "."),
      .evidence = concat("The same holds in each of the last ", seen.rank_losses.size(), " sampled steps, ",
                         with_commas(seen.rank_losses.front().step), " to ", with_commas(step), "."),
      .remedy = of_two ? concat("Run one rank's part of the data on the other's machine, to learn which of "
                                "the two, data or hardware, makes the difference.")
                       : std::string(kLookAtRank),
      .layer = {},
      .op = {}};
}

std::optional<Finding> rank_differs(const Seen& seen) {
  if (seen.setup.ranks < 2) return {};
  if (auto alone = rank_fails_alone(seen)) return alone;
  return rank_has_another_loss(seen);
}

std::optional<Finding> scale_at_floor(const Seen& seen) {
  // A fixed scale may be the floor. Gradients that overflow there, twice in a row, are the fault.
  const auto& looks = seen.looks;
  if (looks.size() < 2 || !looks.back().loss_scale) return {};
  const auto is_stuck = [&](const Look& look) {
    return look.skipped && look.loss_scale && *look.loss_scale <= seen.setup.loss_scale_floor;
  };
  if (!is_stuck(looks.back()) || !is_stuck(looks[looks.size() - 2])) return {};
  Finding finding{.code = "scale-at-floor",
                  .severity = Severity::Serious,
                  .step = looks[looks.size() - 2].step,
                  .what = concat("Gradients overflow although the loss scale is at its floor, ",
                                 short_digits(seen.setup.loss_scale_floor), "."),
                  .evidence = concat("Steps ", with_commas(looks[looks.size() - 2].step), " and ",
                                     with_commas(looks.back().step), " were skipped there."),
                  .remedy =
                      "No loss scale fixes this: activations or gradients overflow by themselves. Lower the "
                      "learning rate or train in bf16, and restart from a healthy checkpoint.",
                  .layer = {},
                  .op = {}};
  name_origin(seen, finding);
  return finding;
}

std::optional<Finding> scale_falling(const Seen& seen) {
  // A larger gradient now and then costs one or two halvings. At the start the default, 2^16, may be some way
  // above the level of a model; 2^12 times too high is a start that costs more steps than it should.
  constexpr double kDoublings = 5.0, kManyDoublings = 10.0, kDoublingsOfSearch = 12.0;
  constexpr size_t kSteps = 100;
  if (seen.looks.empty() || !seen.looks.back().loss_scale) return {};
  const double now = *seen.looks.back().loss_scale;
  const auto scales = latest(seen, &Look::loss_scale, kSteps);
  double highest = 0.0;
  int64_t from_step = seen.looks.back().step, skips = 0;
  const bool in_search = seen.looks.back().searching;
  for (const Look& look : seen.looks) {
    if (look.step < scales.front().first || !look.loss_scale || look.searching != in_search) continue;
    skips += look.skipped;
    if (*look.loss_scale >= highest) highest = *look.loss_scale, from_step = look.step, skips = look.skipped;
  }
  if (in_search && seen.first_loss_scale) highest = *seen.first_loss_scale;
  const double fall = std::log2(highest / now);
  if (!(fall >= (in_search ? kDoublingsOfSearch : kDoublings))) return {};
  const bool too_high_at_first = in_search && now >= 1.0;
  Finding finding{
      .code = "scale-falling",
      .severity =
          !too_high_at_first && (now < 1.0 || fall >= kManyDoublings) ? Severity::Serious : Severity::Warning,
      .step = from_step,
      .what = too_high_at_first
                  ? concat("The loss scale began at ", short_digits(highest),
                           ", far above what the gradients allow: ", short_digits(now), " at step ",
                           with_commas(seen.looks.back().step), " and still too high.")
                  : concat("The loss scale fell from ", short_digits(highest), " to ", short_digits(now),
                           " between steps ", with_commas(from_step), " and ",
                           with_commas(seen.looks.back().step), "."),
      .evidence = concat(counted(skips, "step"), skips == 1 ? " was skipped." : " were skipped."),
      .remedy = too_high_at_first
                    ? "Leave precision.loss_scale.initial at its default, 65536."
                    : "Gradients grow faster than the scale can follow: lower the learning rate, clip, or "
                      "train in bf16. If one layer overflows, keep it in FP32.",
      .layer = {},
      .op = {}};
  name_origin(seen, finding);
  return finding;
}

std::optional<Finding> skip_spiral(const Seen& seen) {
  // A loss scale that grows every 2,000 steps skips one of them. Without one a single skipped step is a bad
  // batch, worth a line.
  constexpr double kWarning = 0.2, kSerious = 0.5;
  constexpr size_t kSteps = 32, kLeast = 16;
  size_t counted_steps = 0, skips = 0;
  int64_t first_skip = 0;
  for (auto look = seen.looks.rbegin(); look != seen.looks.rend() && counted_steps < kSteps; ++look) {
    if (look->searching) break;
    ++counted_steps;
    skips += look->skipped;
    if (look->skipped) first_skip = look->step;
  }
  const double share = static_cast<double>(skips) / static_cast<double>(std::max(counted_steps, size_t{1}));
  const bool enough = counted_steps >= kLeast && share >= kWarning;
  if (skips == 0 || (!enough && is_fp16(seen))) return {};
  Finding finding{
      .code = "skip-spiral",
      .severity = !enough             ? Severity::Note
                  : share >= kSerious ? Severity::Serious
                                      : Severity::Warning,
      .step = first_skip,
      .what = concat(skips, " of the last ", counted(static_cast<int64_t>(counted_steps), "logged step"),
                     skips == 1 ? " was" : " were", " skipped, up to step ",
                     with_commas(seen.looks.back().step), "."),
      .evidence = "Their gradients were not finite.",
      .remedy =
          is_fp16(seen)
              ? "If the scale goes up and down: leave precision.loss_scale.growth_interval at its "
                "default, 2000. If every step is skipped: gradients overflow whatever the scale; lower the "
                "learning rate, or train in bf16."
              : "Without a loss scale no skipped step is normal: check the batch and the named layer, and "
                "lower the learning rate.",
      .layer = {},
      .op = {}};
  name_origin(seen, finding);
  return finding;
}

std::optional<Finding> loss_not_finite(const Seen& seen) {
  constexpr int64_t kSeriousInARow = 3;  // one may be a batch; these are the weights
  int64_t row = 0, first_step = 0;
  for (auto look = seen.looks.rbegin(); look != seen.looks.rend() && !std::isfinite(look->loss); ++look) {
    ++row;
    first_step = look->step;
  }
  if (row == 0) return {};
  Finding finding{
      .code = "loss-not-finite",
      .severity = row >= kSeriousInARow ? Severity::Serious : Severity::Warning,
      .step = first_step,
      .what = concat("The loss is ", digits(seen.looks.back().loss), " at step ",
                     with_commas(seen.looks.back().step),
                     row > 1 ? concat(", and has not been finite for ", row, " logged steps.") : "."),
      .evidence = seen.looks.back().skipped ? "The step was skipped; the weights are as they were."
                                            : "The step was taken: the weights may contain Inf or NaN.",
      .remedy =
          "Resume from a healthy checkpoint with a lower learning rate: --from-step N --set "
          "optimizer.lr=RATE.",
      .layer = {},
      .op = {}};
  name_origin(seen, finding);
  return finding;
}

// A spike is far above all noise of the losses before it, and lasts: one hard batch is none.
constexpr size_t kUsualLosses = 50, kLeastUsualLosses = 20;
constexpr int64_t kSpikeSteps = 3, kSeriousSpikeSteps = 32;

std::optional<Finding> loss_spike(const Seen& seen) {
  if (seen.spike_steps < kSpikeSteps) return {};
  return Finding{
      .code = "loss-spike",
      .severity = seen.spike_steps >= kSeriousSpikeSteps ? Severity::Serious : Severity::Warning,
      .step = seen.spike_began,
      .what = concat("The loss rose from ", digits(seen.spike_level), " to ", digits(seen.looks.back().loss),
                     " at step ", with_commas(seen.spike_began), " and stays up."),
      .evidence = concat(counted(seen.spike_steps, "logged step"), " in a row, against the median of the ",
                         seen.usual_losses.size(), " before them."),
      .remedy =
          "Lower the learning rate, warm up longer or clip (optimizer.clip_norm); compare with a run "
          "in fp32 to learn whether precision plays a part.",
      .layer = {},
      .op = {}};
}

constexpr std::array<Rule, kCodes.size()> kRules = {nan_producer,
                                                    overflow_attention_logits,
                                                    activation_near_overflow,
                                                    scale_at_floor,
                                                    scale_falling,
                                                    gradient_underflow,
                                                    accumulation_rounding,
                                                    stalled_weights,
                                                    outlier_channels,
                                                    stale_amax,
                                                    fp8_saturating,
                                                    fp8_vanishing,
                                                    rank_differs,
                                                    skip_spiral,
                                                    loss_not_finite,
                                                    loss_spike};

/// Whether a loss is far above the usual ones: by eight deviations, by a fifth of them, and by what is
/// something of the run's first loss. What has been learned to 0 has no noise and no fifth.
bool is_far_above(double loss, const std::deque<double>& usual, double first_loss) {
  constexpr double kDeviations = 8.0, kRelative = 0.2, kOfFirst = 0.001;
  constexpr double kDeviationsPerMedian = 1.4826;  // of normal noise, from the median of distances
  // Most are not, and need no median to say so.
  const double least = *std::ranges::min_element(usual);
  if (least > 0 && loss <= (1 + kRelative) * least) return false;
  const double level = median_of({usual.begin(), usual.end()});
  std::vector<double> distances;
  for (const double each : usual) distances.push_back(std::abs(each - level));
  const double deviation = kDeviationsPerMedian * median_of(std::move(distances));
  return loss > level + std::max({kDeviations * deviation, kRelative * std::abs(level),
                                  kOfFirst * std::abs(first_loss)});
}

void see_loss(Seen& seen, int64_t step, double loss) {
  if (!std::isfinite(loss)) return;  // another finding
  if (!seen.first_loss) seen.first_loss = loss;
  if (seen.usual_losses.size() >= kLeastUsualLosses &&
      is_far_above(loss, seen.usual_losses, *seen.first_loss)) {
    if (seen.spike_steps++ == 0) {
      seen.spike_began = step;
      seen.spike_level = median_of({seen.usual_losses.begin(), seen.usual_losses.end()});
    }
    return;
  }
  seen.spike_steps = 0;
  seen.usual_losses.push_back(loss);
  if (seen.usual_losses.size() > kUsualLosses) seen.usual_losses.pop_front();
}

/// How many of a gradient's zeros may be values that FP16 cannot hold. Where zeros are lost values, those
/// that it just holds are many, too: binade by binade a gradient becomes rarer on both sides of its middle,
/// and no slower further out (normal, Laplace and lognormal values do). So five binades below FP16's hold at
/// most as many, relative to its lowest five, as those relative to the five above them. The rest of the zeros
/// are zeros: of tokens that were not in the batch, of units that a ReLU turned off.
double most_lost_zeros(const TensorStats& stats) {
  // From the binade below the smallest number, 2^-24, whose values round up to it.
  constexpr int kLowest = -25, kBinades = 5;
  double lowest = 0.0, next = 0.0;
  for (int e = kLowest; e < kLowest + kBinades; ++e) {
    lowest += static_cast<double>(stats.in_binade(e));
    next += static_cast<double>(stats.in_binade(e + kBinades));
  }
  const auto zeros = static_cast<double>(stats.zeros);
  if (lowest == 0.0) return 0.0;
  if (lowest >= next) return zeros;
  const double ratio = lowest / next;
  return std::min(zeros, lowest * ratio / (1.0 - ratio));
}

/// Of a gradient that carries the loss scale: values that are zero in FP16, or would be.
void see_gradient(Sample& sample, const ProbeRecord& record) {
  const TensorStats& stats = record.stats;
  const FormatShares fp16 = stats.in(Format::FP16);
  const auto count = static_cast<double>(stats.count);
  const auto not_zero = static_cast<double>(stats.count - stats.zeros - stats.nans - stats.infinities);
  const double low = (fp16.zero + fp16.subnormal) * count;
  sample.skipped = sample.skipped || stats.nans + stats.infinities > 0;
  sample.gradient_values += stats.count;
  sample.values_not_zero += not_zero;
  sample.low_values += low;
  if (not_zero == 0.0) {
    sample.all_zero_values += stats.zeros;
    sample.all_zero.push_back({record.name, static_cast<double>(stats.zeros) / count});
    return;
  }
  const double lost = fp16.zero * count + (low >= 0.5 * not_zero ? most_lost_zeros(stats) : 0.0);
  sample.gradients_lost += lost;
  if (lost > 0.0) sample.lost_from.push_back({record.name, lost / count});
}

/// Most of the tensor lies below E4M3's normal numbers when its largest value is the format's: then a few
/// values are 2^14 times as large as the rest. Normal noise has one in ten thousand there.
void see_outliers(Sample& sample, const ProbeRecord& record) {
  constexpr double kMost = 0.5;
  constexpr int64_t kLeastValues = 1024;
  const TensorStats& stats = record.stats;
  // Nothing casts logits on their way into a softmax to FP8.
  if (stats.count - stats.zeros < kLeastValues || record.name.ends_with(ProbeRecord::kLogitsAfter)) return;
  const FormatShares scaled = stats.in_scaled(Format::E4M3);
  const double not_zero = static_cast<double>(stats.count - stats.zeros) / static_cast<double>(stats.count);
  const double share = (scaled.zero + scaled.subnormal) / not_zero;
  if (share >= kMost) sample.outliers.push_back({record.name, share});
}

void finish(Sample& sample) {
  if (sample.low_values < 0.5 * sample.values_not_zero) return;
  sample.gradients_lost += static_cast<double>(sample.all_zero_values);
  sample.lost_from.insert(sample.lost_from.end(), sample.all_zero.begin(), sample.all_zero.end());
}

void see_rank_losses(Seen& seen, const StepRecord& record) {
  const auto is_finite = [](double loss) { return std::isfinite(loss); };
  if (record.rank_losses.size() < 2 || !std::ranges::all_of(record.rank_losses, is_finite)) return;
  seen.rank_losses.push_back({.step = record.step, .losses = record.rank_losses});
  if (seen.rank_losses.size() > kKeptRankLosses) seen.rank_losses.pop_front();
}

size_t rank_of(std::string_view code) {
  return static_cast<size_t>(std::ranges::find(kCodes, code) - kCodes.begin());
}

}  // namespace

RunSetup run_setup(const RunConfig& config, int64_t ranks) {
  RunSetup setup{.compute = config.precision.compute, .ranks = ranks};
  if (config.precision.loss_scale.floor) setup.loss_scale_floor = *config.precision.loss_scale.floor;
  // Micro-batches are added in FP32, whatever the precision; ranks as run.reduction says.
  if (config.run.reduction == "bf16" || config.run.reduction == "fp16") {
    setup.sum_type = config.run.reduction;
    setup.summed_parts = ranks;
  }
  return setup;
}

std::span<const std::string_view> finding_codes() { return kCodes; }

struct FindingWatch::State {
  Seen seen{};
  std::optional<Sample> open{};  // of a step whose probes are still coming
  std::map<std::string, Finding, std::less<>> told{};

  void tell(Finding finding, std::vector<Finding>& fresh) {
    const auto known = told.find(finding.code);
    if (known != told.end() && known->second.severity >= finding.severity) return;
    if (known != told.end() && known->second.step < finding.step && known->second.code != "nan-producer")
      finding.step = known->second.step;  // it began there
    told.insert_or_assign(finding.code, finding);
    fresh.push_back(std::move(finding));
  }

  std::vector<Finding> judge() {
    std::vector<Finding> fresh;
    for (const Rule rule : kRules)
      if (auto found = rule(seen)) tell(*std::move(found), fresh);
    return fresh;
  }

  /// The probes of a step are complete when a record of the step itself, or of a later one, has come.
  void close_sample(int64_t step) {
    if (!open || open->step > step) return;
    finish(*open);
    seen.sample_before = std::exchange(seen.sample, std::exchange(open, std::nullopt));
  }
};

FindingWatch::FindingWatch(RunSetup setup) : state_(std::make_unique<State>()) {
  state_->seen.setup = std::move(setup);
}
FindingWatch::~FindingWatch() = default;
FindingWatch::FindingWatch(FindingWatch&&) noexcept = default;
FindingWatch& FindingWatch::operator=(FindingWatch&&) noexcept = default;

std::vector<Finding> FindingWatch::take(const StepRecord& record) {
  Seen& seen = state_->seen;
  state_->close_sample(record.step);
  if (std::isfinite(record.lr)) seen.highest_lr = std::max(seen.highest_lr, record.lr);
  if (record.loss_scale && !seen.first_loss_scale) seen.first_loss_scale = record.loss_scale;
  // The scale looks for its level until the first step is taken. Below 1 it looks for something else.
  seen.searching = seen.searching && record.skipped && record.loss_scale && *record.loss_scale >= 1.0;
  seen.looks.push_back({.step = record.step,
                        .loss = record.loss,
                        .lr = record.lr,
                        .skipped = record.skipped,
                        .searching = seen.searching,
                        .parameter = record.parameter,
                        .loss_scale = record.loss_scale,
                        .stalled_share = record.stalled_share,
                        .saturated_share = record.saturated_share,
                        .vanished_share = record.vanished_share,
                        .stalled_most = record.stalled_most,
                        .saturated_most = record.saturated_most,
                        .vanished_most = record.vanished_most});
  if (seen.looks.size() > kKeptSteps) seen.looks.pop_front();
  see_loss(seen, record.step, record.loss);
  see_rank_losses(seen, record);
  return state_->judge();
}

std::vector<Finding> FindingWatch::take(const ProbeRecord& record) {
  Seen& seen = state_->seen;
  if (state_->open && state_->open->step < record.step) state_->close_sample(record.step);
  if (!state_->open) state_->open.emplace(Sample{.step = record.step});
  if (record.role == "gradient") see_gradient(*state_->open, record);
  if (record.summed_parts > 1 && (!seen.summed_at || record.summed_parts > seen.setup.summed_parts)) {
    seen.setup.summed_parts = record.summed_parts;
    seen.setup.sum_type = record.sum_type;
    seen.summed_at = record.step;
  }
  if (record.role == "activation" &&
      (!seen.largest_activation || record.stats.amax > seen.largest_activation->stats.amax))
    seen.largest_activation = record;
  if (record.role == "activation" || record.role == "weight") see_outliers(*state_->open, record);
  return state_->judge();
}

std::vector<Finding> FindingWatch::take(const CulpritRecord& record) {
  Seen& seen = state_->seen;
  seen.culprits.push_back(record);
  if (seen.culprits.size() > kKeptCulprits) seen.culprits.pop_front();
  return state_->judge();
}

std::vector<Finding> FindingWatch::take(const FindingRecord& record) {
  std::vector<Finding> fresh;
  state_->tell(record.finding, fresh);
  return fresh;
}

std::vector<Finding> FindingWatch::findings() const {
  std::vector<Finding> all;
  for (const auto& [code, finding] : state_->told) all.push_back(finding);
  std::ranges::sort(all, [](const Finding& a, const Finding& b) {
    return a.severity != b.severity ? a.severity > b.severity : rank_of(a.code) < rank_of(b.code);
  });
  return all;
}

}  // namespace halfstep
