// Bounds. Everything that is compared, and how far it may be off.
//
// Gradients. Halfstep rounds to the compute type (relative error at most u) each weight, each output and
// input of a product, and each gradient between layers. The oracle repeats its FP64 run with perturbations of
// that size at these places (GradientOracle::gradients), which gives the first-order effect on each gradient
// with the same statistics. A layer has more roundings inside than the oracle perturbs: a cell or an
// attention about ten, in sequence at most a few of a size; independent errors of equal size add as the
// square root of their number, so ten of them are 3.2 of one. One sample, of the first step, can fall short
// of a typical deviation by a factor of 2 for a tensor of few elements. kSensitivity = 3.2 * 2, rounded up
// to 8. It can fall shorter still, and later steps may be more sensitive: what disagrees is looked at again
// with 32 samples of its own step, of which the largest counts. A program in FP32 is then also run by
// LibTorch alone in FP32: how far that is from FP64 is the engine's own error, and ours may be off by as much
// more. To this is added the rounding of the gradient itself, and for FP16 what is below its range: steps of
// 2^-24 / loss scale in each of batch * length terms.
//
// A gradient whose bound is more than half of its norm is counted as uninformative: a wrong one could pass.
//
// Updates: see UpdateOracle. Edits: the user's value wins; what is kept has to round to it: half a unit in
// the last place of the working type.
#include "usage/compare.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <sstream>
#include <thread>

#include "usage/oracle.h"
#include "usage/subject.h"

namespace usage {
namespace {

constexpr double kSensitivity = 8;
constexpr int kSecondLook = 32;
// In FP32 sums are rounded as much as their terms, which is not perturbed. The longest have 256 terms (a
// gradient over 8 x 8 positions, four places each in a convolution): as many roundings of a size add to 16.
constexpr double kSensitivityFp32 = 8 * 16;
// The oracle perturbs what enters a layer and the gradient that leaves it; what is saved inside is compressed
// as well: about ten tensors, as above.
constexpr double kCompression = 8;
// Norms of compressed inputs: see GradientOracle::note_norm_error. Up to here the error is of first order.
constexpr double kLargestNormError = 0.125;
// FP32 sums of at most a few hundred terms, in any order.
constexpr double kFp32Sums = 0x1p-19;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  if (!a.is_floating_point()) return at::equal(a, b);
  return at::equal(a, b) || (at::equal(a.isnan(), b.isnan()) && at::equal(a.nan_to_num(), b.nan_to_num()));
}

/// A training run and its oracle, in phases, so that two can be interleaved.
class Session {
 public:
  Session(const Program& program, std::string scratch, Planted planted, Verdict& verdict)
      : program_(program),
        planted_(planted),
        scratch_(std::move(scratch)),
        verdict_(verdict),
        subject_(program),
        gradients_(program),
        names_(subject_.parameter_names()),
        updates_(program, names_.size()),
        scale_{program.loss_scale, program.growth_interval, program.compute == Compute::Fp16} {
    const Snapshot start = subject_.snapshot();
    updates_.adopt_all(start);
    check_snapshot("at the start", start);
    check_buffers_are_finite("at the start", start);
  }

  void begin_step(int step) {
    step_ = step;
    micro_batches_.clear();
    bad_parameter_ = -1;
    large_input_ = bad_input_ = false;
    buffers_before_throw_.clear();
    load_what_was_saved();
    for (const Event& event : program_.events)
      if (event.step == step) before_forward(event);
    before_ = subject_.snapshot();
    check_snapshot("before forward", before_);
    // A forward that threw belongs to this step: it may have overflowed, and a skip puts the buffers back.
    if (buffers_before_throw_.empty()) check_buffers_are_finite("before forward", before_);
    // A step without a reason to be skipped is a disagreement of its own if it is.
    const bool may_be_skipped =
        program_.compute == Compute::Fp16 ||
        std::any_of(program_.events.begin(), program_.events.end(),
                    [&](const Event& event) { return event.step == step && is_injection(event.action); });
    state_before_.clear();
    if (may_be_skipped) state_before_ = subject_.state();
    // A skipped step begins before the forward that threw: buffers go back to there.
    for (const auto& [key, tensor] : buffers_before_throw_)
      if (state_before_.contains(key)) state_before_[key] = tensor;
  }

  int micro_batches() const { return program_.micro_batches; }

  void forward(int micro_batch) {
    MicroBatch micro{.batch = batch_of(program_, step_, micro_batch), .masks = {}};
    for (const Event& event : program_.events)
      if (event.step == step_ && event.action == Action::ResumeMidStep && micro_batch == 1) resume(false);
    for (const Event& event : program_.events)
      if (event.step == step_ && event.target % program_.micro_batches == micro_batch)
        inject(event.action, micro);
    subject_.forward(micro);
    micro_batches_.push_back(micro);
  }

  void backward(int micro_batch) {
    int hooked = -1;
    for (const Event& event : program_.events)
      if (event.step == step_ && event.action == Action::NanGradHook &&
          event.target % program_.micro_batches == micro_batch) {
        hooked = bad_parameter_ = static_cast<int>(trained_near(event.target));
        bad_micro_batch_ = micro_batch;
      }
    subject_.backward(hooked);
    micro_batches_.back().masks = subject_.masks();
  }

  void finish_step() {
    for (const Event& event : program_.events)
      if (event.step == step_ && event.action == Action::InfGradWrite) {
        bad_parameter_ = static_cast<int>(trained_near(event.target));
        subject_.write_grad(static_cast<size_t>(bad_parameter_), std::numeric_limits<double>::infinity());
      }
    Expected expected = gradients_.gradients(before_, micro_batches_, sampled_ ? 0 : 1);
    sampled_ = sampled_ || expected.finite;
    if (program_.max_norm) check_renormed(subject_.snapshot(), expected);
    StepResult result = subject_.finish_step();
    Snapshot after = subject_.snapshot();
    plant(result, after);

    check_decision(expected, result);
    if (result.stepped) {
      // Inputs of 1e5 saturate gates and losses: no first order tells how roundings change such gradients,
      // nor the statistics behind an attention that jumps from one key to another.
      if (!large_input_)
        look_twice([&](int samples) {
          if (samples > 0) expected = gradients_.gradients(before_, micro_batches_, samples);
          check_gradients(expected, result);
          check_buffers(expected, after);
        });
      check_updates(result, after);
    } else {
      check_nothing_changed();
    }
    check_snapshot("after the step", after);
    check_buffers_are_finite("after the step", after);
    scale_.advance(result.finite);
    gradients_.end_step(/*skipped=*/!result.any || !result.finite);
    expect(result.next_loss_scale == scale_.scale || !result.any, "loss scale", "is ", result.next_loss_scale,
           ", expected ", scale_.scale);
    for (const Event& event : program_.events)
      if (event.step == step_ &&
          (event.action == Action::SaveLoadFile || event.action == Action::LoadModuleState))
        subject_.save_for_later(event.action, scratch_);
  }

 private:
  template <typename... Parts>
  void expect(bool holds, const char* kind, const Parts&... parts) {
    ++verdict_.checks;
    if (holds) return;
    std::ostringstream text;
    text << "step " << step_ << ": ";
    (text << ... << parts);
    verdict_.disagreements.push_back({kind, text.str()});
  }

  /// error <= bound, remembering how close it came.
  template <typename... Parts>
  void expect_within(double error, double bound, const char* kind, const Parts&... parts) {
    const bool holds = error <= bound;
    if (holds && bound > 0) {
      double& worst = verdict_.worst[kind];
      worst = std::max(worst, error / bound);
    }
    expect(holds, kind, parts..., " is off by ", error, ", bound ", bound);
  }

  /// check(more_samples): if anything disagrees, that is forgotten, and kSecondLook samples of what roundings
  /// do decide.
  template <typename Check>
  void look_twice(Check check) {
    const auto before = static_cast<std::ptrdiff_t>(verdict_.disagreements.size());
    check(0);
    if (static_cast<std::ptrdiff_t>(verdict_.disagreements.size()) == before) return;
    verdict_.disagreements.erase(verdict_.disagreements.begin() + before, verdict_.disagreements.end());
    ++verdict_.second_looks;
    check(kSecondLook);
  }

  void plant(StepResult& result, Snapshot& after) {
    if (planted_ == Planted::Skip) result.stepped = result.finite = false;
    const size_t first = trained_near(0);
    if (planted_ == Planted::Gradient && result.grads[first].defined())
      result.grads[first] = result.grads[first] * 1.3;
    if (planted_ == Planted::Update)
      after.full[first] = before_.full[first] + (after.full[first] - before_.full[first]) * 1.3;
    if (planted_ == Planted::Statistics) after.buffers = before_.buffers;
  }

  size_t trained_near(int target) const {
    const size_t count = names_.size(), start = static_cast<size_t>(target) % count;
    for (size_t i = 0; i < count; ++i)
      if (before_.trained[(start + i) % count]) return (start + i) % count;
    return start;
  }

  /// A tied weight goes by its first name.
  const char* embedding_name() const { return program_.tied ? "output" : "embedding.weight"; }

  double sensitivity() const { return program_.compute == Compute::Fp32 ? kSensitivityFp32 : kSensitivity; }
  bool compresses() const {
    return std::any_of(program_.regions.begin(), program_.regions.end(),
                       [](const Region& region) { return is_compression(region.kind); });
  }

  /// Scores of attention are sums of up to 16 products of activations, rounded in FP32: with activations
  /// above 256 by 16 * 256^2 * 2^-24 = 2^-4 and more, which exp makes as much of each weight, and no first
  /// order tells what a step further becomes of that. Such are runs that have diverged.
  bool attention_jumps(const Expected& expected) const {
    return expected.largest_activation > 256 &&
           std::any_of(program_.layers.begin(), program_.layers.end(), [](const Layer& layer) {
             return layer.kind == LayerKind::Attention || layer.kind == LayerKind::MultiheadAttention;
           });
  }

  /// Attention multiplies activations by activations: above 64, a sum of 16 products passes 65504.
  bool fp16_may_overflow(double largest_activation) const {
    return program_.compute == Compute::Fp16 && largest_activation > 64;
  }

  double low_unit() const { return program_.weights == Weights::Fp32 ? 0 : rounding_unit(program_.compute); }
  /// Half of the smallest step of FP16; BF16 reaches as low as FP32.
  double smallest() const {
    return program_.weights == Weights::Fp32 ? 0 : program_.compute == Compute::Fp16 ? 0x1p-25 : 0x1p-134;
  }

  static at::Tensor flat(const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& tensor : tensors) parts.push_back(tensor.reshape({-1}));
    return at::cat(parts).to(at::kDouble);
  }

  /// Weights are finite, and full and working value belong together: one rounds to the other.
  void check_snapshot(const char* when, const Snapshot& snapshot) {
    // All parameters at once: most of the time of a check is the calls. Kahan's compensation may be a whole
    // unit.
    const double unit = low_unit() * (program_.weights == Weights::Kahan ? 2 : 1);
    const auto belong_together = [&](const at::Tensor& full, const at::Tensor& working) {
      const at::Tensor bound = at::maximum(full.abs(), working.abs()) * unit + 2 * smallest();
      return ((full - working).abs() <= bound).all().item<bool>();  // false for a NaN, and for Inf - Inf
    };
    ++verdict_.checks;
    if (belong_together(flat(snapshot.full), flat(snapshot.working)) &&
        flat(snapshot.full).isfinite().all().item<bool>())
      verdict_.checks += static_cast<int64_t>(names_.size());
    else
      for (size_t i = 0; i < names_.size(); ++i) {
        const at::Tensor full = snapshot.full[i].to(at::kDouble),
                         working = snapshot.working[i].to(at::kDouble);
        expect(full.isfinite().all().item<bool>() && working.isfinite().all().item<bool>(),
               "non-finite weight", names_[i], " holds an Inf or a NaN ", when);
        expect(belong_together(full, working), "working copy", names_[i],
               ": the full value does not round to the working one ", when, "; largest difference ",
               (full - working).abs().max().item<double>());
      }
  }

  /// Between steps only: within one, forward may have overflowed, and the skip restores them.
  void check_buffers_are_finite(const char* when, const Snapshot& snapshot) {
    for (const at::Tensor& buffer : snapshot.buffers)
      if (buffer.is_floating_point())
        expect(buffer.isfinite().all().item<bool>(), "non-finite buffer", "a buffer holds an Inf or a NaN ",
               when);
  }

  void check_edit(const char* door, const Subject::Edited& edited) {
    expect(edited.kept, "edit", door, ": an Inf or a NaN that was written is not what full_precision gives");
    Snapshot now = subject_.snapshot();
    if (planted_ == Planted::Edit) now.full = before_.full.empty() ? now.full : before_.full;
    for (size_t e = 0; e < edited.parameters.size(); ++e) {
      const size_t i = edited.parameters[e];
      const bool full_given = edited.given[e].defined();
      const at::Tensor written = (full_given ? edited.given[e] : now.working[i]).to(at::kDouble);
      double unit = low_unit(), absolute = smallest();
      // A compensation counts as long as it may be the rounding of one that is not beyond half a unit.
      if (program_.weights == Weights::Kahan && !full_given) unit *= 1 + 2 * low_unit();
      if (full_given) switch (program_.weights) {
          case Weights::Fp32:
          case Weights::Fp32Master:
          case Weights::SplitMaster:
            unit = absolute = 0;
            break;
          case Weights::Kahan:
            unit = 4 * unit * unit;
            absolute *= 2;
            break;
          case Weights::Stochastic:
            unit *= 2;
            absolute *= 2;
            break;
          case Weights::Nearest:
            break;
        }
      const at::Tensor off = (now.full[i].to(at::kDouble) - written).abs();
      const at::Tensor bound = written.abs() * unit + absolute;
      expect((off <= bound).all().item<bool>(), "edit", door, " of ", names_[i],
             ": the full value is not what was written; largest difference ",
             off.nan_to_num(INFINITY).max().item<double>(), " where ", bound.max().item<double>(),
             " is allowed");
      updates_.adopt(i, now.full[i]);
    }
  }

  void load_what_was_saved() {
    for (const Event& event : program_.events)
      if (event.step == step_ - 1 &&
          (event.action == Action::SaveLoadFile || event.action == Action::LoadModuleState))
        check_edit(name(event.action).data(), subject_.load_saved(event.action, scratch_));
  }

  void before_forward(const Event& event) {
    switch (event.action) {
      case Action::SaveLoadFile:
      case Action::LoadModuleState:
        break;  // after this step
      case Action::Freeze: {
        const Snapshot now = subject_.snapshot();
        if (std::count(now.trained.begin(), now.trained.end(), true) > 1)
          subject_.set_trained(static_cast<size_t>(event.target) % names_.size(), false);
        break;
      }
      case Action::Unfreeze:
        subject_.set_trained(static_cast<size_t>(event.target) % names_.size(), true);
        break;
      case Action::Evaluate:
        evaluate();
        break;
      case Action::Resume:
      case Action::ResumeStateLast: {
        resume(event.action == Action::ResumeStateLast);
        break;
      }
      case Action::ThrowInForward:
      case Action::ThrowInBackward: {
        if (buffers_before_throw_.empty())
          for (const auto& [key, tensor] : subject_.state())
            if (key.find("buffer.") != std::string::npos) buffers_before_throw_[key] = tensor;
        const MicroBatch micro{.batch = batch_of(program_, step_, 0), .masks = {}};
        subject_.throw_inside(micro, event.target, event.action == Action::ThrowInBackward);
        if (program_.max_norm) updates_.adopt_all(subject_.snapshot());
        break;
      }
      default:
        if (is_edit(event.action)) check_edit(name(event.action).data(), subject_.edit(event, scratch_));
    }
  }

  void resume(bool module_state_last) {
    buffers_before_throw_.clear();  // fresh objects begin where the saved ones were
    const auto saved = subject_.state();
    subject_.resume(module_state_last);
    const auto loaded = subject_.state();
    for (const auto& [key, tensor] : saved)
      expect(loaded.contains(key) && same_bits(loaded.at(key), tensor), "resume", key,
             " differs after it was saved and loaded");
  }

  void evaluate() {
    const Batch batch = batch_of(program_, step_, 9);
    const Snapshot before = subject_.snapshot();
    const at::Tensor logits = subject_.evaluate(batch);
    look_twice([&](int samples) {
      const auto expected = gradients_.evaluate(before, batch, std::max(1, samples));
      const double norm = expected.values.norm().item<double>();
      const double bound = sensitivity() * expected.sensitivity + expected.engine_error +
                           (rounding_unit(program_.compute) + kFp32Sums) * norm;
      count_informative(bound, norm);
      if (fp16_may_overflow(expected.largest_activation) && !logits.isfinite().all().item<bool>()) return;
      expect_within((logits - expected.values).norm().item<double>(), bound, "evaluation", "the logits");
    });
    const Snapshot after = subject_.snapshot();
    if (program_.max_norm) return updates_.adopt_all(after);
    for (size_t i = 0; i < names_.size(); ++i)
      expect(same_bits(after.full[i], before.full[i]), "evaluation", names_[i], " was changed by evaluation");
    for (size_t i = 0; i < after.buffers.size(); ++i)
      expect(same_bits(after.buffers[i], before.buffers[i]), "evaluation",
             "a buffer was changed by evaluation");
  }

  void inject(Action action, MicroBatch& micro) {
    if (action == Action::InfInput) micro.batch.input.view(-1)[3] = INFINITY;
    if (action == Action::NanInput) micro.batch.input.view(-1)[3] = NAN;
    bad_input_ = bad_input_ || action == Action::InfInput || action == Action::NanInput;
    if (action == Action::LargeInput) {
      micro.batch.input = micro.batch.input * 1e5;
      large_input_ = true;
    }
    if (action == Action::HugeLoss) micro.loss_factor = 1e36;
  }

  void count_informative(double bound, double norm) {
    if (!(bound <= 0.5 * norm)) ++verdict_.uninformative;
  }

  void check_renormed(const Snapshot& now, const Expected& expected) {
    // LibTorch renormalizes rows in the working type: the norm, its quotient and the product are each within
    // a few units.
    const double unit = rounding_unit(program_.weights == Weights::Fp32 ? Compute::Fp32 : program_.compute);
    for (size_t i = 0; i < names_.size(); ++i)
      if (names_[i] == embedding_name()) {
        const at::Tensor written = now.working[i].to(at::kDouble);
        const at::Tensor off = (written - expected.weights[i]).abs();
        const at::Tensor bound = expected.weights[i].abs() * (8 * unit) + 4 * smallest();
        expect((off <= bound).all().item<bool>(), "max_norm", "the rows of the embedding are off by ",
               off.max().item<double>());
        updates_.adopt(i, now.full[i]);
      }
    check_snapshot("after max_norm", now);
  }

  void check_decision(const Expected& expected, const StepResult& result) {
    constexpr double kFp16Max = 65504, kLargestNorm = 0x1p63;
    double norm = 0;
    for (const at::Tensor& grad : expected.grads)
      if (grad.defined()) norm = std::hypot(norm, grad.norm().item<double>());
    const bool fp16 = program_.compute == Compute::Fp16;
    double largest_param_grad = 0;
    for (const at::Tensor& grad : expected.grads)
      if (grad.defined()) largest_param_grad = std::max(largest_param_grad, grad.abs().max().item<double>());
    const bool overflows =
        fp16 && program_.weights != Weights::Fp32 && largest_param_grad * result.loss_scale > 4 * kFp16Max;
    const bool must_skip = bad_parameter_ >= 0 || !expected.finite || norm > 4 * kLargestNorm || overflows;
    // A gradient inside a layer may be larger than those that the oracle sees between layers.
    // Attention takes exp of a product again in backward: of compressed large inputs it can be Inf.
    // An Inf in the input may be saturated away in FP64 and become a NaN in FP32, as in gelu and then
    // sigmoid.
    // A norm of a compressed input that hardly varies gives noise without bound (note_norm_error), and the
    // weights that such a gradient made a step ago give one beyond the largest norm, in BF16 too.
    // Of a run that has diverged (attention_jumps) FP64 tells nothing.
    const bool may_overflow = bad_input_ || fp16_may_overflow(expected.largest_activation) ||
                              (large_input_ && (fp16 || compresses())) ||
                              expected.norm_error > kLargestNormError || norm > kLargestNorm / 4 ||
                              (fp16 && expected.largest * result.loss_scale * 64 > kFp16Max) ||
                              attention_jumps(expected);
    const bool may_skip = must_skip || may_overflow;
    expect(!must_skip || !result.stepped, "decision",
           "stepped, but the gradients are not finite: loss scale ", result.loss_scale, ", norm ", norm);
    expect(may_skip || result.stepped, "decision", "skipped because of '", result.first_bad,
           "', but the gradients are finite: loss scale ", result.loss_scale, ", norm ", norm);
    expect(result.stepped == result.finite || !result.any, "decision", "the summary and the report differ");
    if (result.finite) return;
    const auto named = std::find(names_.begin(), names_.end(), result.first_bad);
    expect(named != names_.end() && result.reported_parameter == result.first_bad, "report",
           "names parameter '", result.first_bad, "' and '", result.reported_parameter, "'");
    if (named == names_.end()) return;
    if (program_.sum == Sum::None) {
      const at::Tensor& grad = result.grads[static_cast<size_t>(named - names_.begin())];
      // Its own norm too: under inputs of 1e5 the expected one may be of another size.
      const double found = grad.defined() ? grad.norm().item<double>() / result.loss_scale : 0;
      expect(
          grad.defined() && (!grad.isfinite().all().item<bool>() || std::max(norm, found) > kLargestNorm / 4),
          "report", "names '", result.first_bad, "', whose gradient is finite");
    } else if (bad_parameter_ >= 0 && expected.finite && !may_overflow) {
      expect(result.first_bad == names_[static_cast<size_t>(bad_parameter_)] &&
                 result.micro_batch == bad_micro_batch_,
             "report", "names '", result.first_bad, "' in micro-batch ", result.micro_batch, ", expected '",
             names_[static_cast<size_t>(bad_parameter_)], "' in ", bad_micro_batch_);
    }
  }

  void check_gradients(const Expected& expected, const StepResult& result) {
    const double unit = rounding_unit(program_.compute);
    for (size_t i = 0; i < names_.size(); ++i) {
      const at::Tensor& wanted = expected.grads[i];
      expect(wanted.defined() == result.grads[i].defined(), "gradient", names_[i],
             wanted.defined() ? " has no gradient" : " has a gradient and should have none");
      if (!wanted.defined() || !result.grads[i].defined()) continue;
      const double norm = wanted.norm().item<double>();
      double bound = sensitivity() * expected.sensitivity[i] + kCompression * expected.compression[i] +
                     expected.engine_error[i] + (2 * unit + kFp32Sums) * norm;
      if (program_.compute == Compute::Fp16)
        bound += 4 * std::sqrt(static_cast<double>(wanted.numel())) * program_.batch * program_.length *
                 program_.micro_batches * 0x1p-24 / result.loss_scale;
      // Kahan: 2 u sum |g| (Higham, Accuracy and Stability, 4.3), u = 2^-8, and the sum is BF16.
      if (program_.sum == Sum::Bf16Kahan) bound += 0x1p-6 * expected.magnitude[i];
      // What is saved inside a layer, such as q, k and v, is off by as much as what enters it.
      for (const Region& region : program_.regions) bound += compression_unit(region.kind) * norm;
      // Where terms cancel, as before a norm that undoes the weight, roundings are as large as what is left:
      // no wrong gradient can be told from a right one. Counted, and held to be finite.
      if (!(bound <= 0.5 * norm) || expected.norm_error > kLargestNormError || attention_jumps(expected)) {
        ++verdict_.uninformative;
        expect(result.grads[i].isfinite().all().item<bool>(), "gradient", names_[i], ": not finite");
        continue;
      }
      const double error = (result.grads[i] / result.loss_scale - wanted).norm().item<double>();
      expect_within(error, bound, "gradient", names_[i], ": gradient of norm ", norm);
    }
  }

  void check_updates(const StepResult& result, const Snapshot& after) {
    double sum = 0, count = 0;
    for (const at::Tensor& grad : result.grads)
      if (grad.defined())
        sum += grad.square().sum().item<double>(), count += static_cast<double>(grad.numel());
    const double norm = std::sqrt(sum) / result.loss_scale;
    // An accelerator sums squares in FP32, in any order: n roundings of the sum are n / 2 of its root.
    const double unit = program_.on_device ? (count / 2 + 4) * 0x1p-24 : 1e-9;
    expect_within(std::abs(result.norm - norm), unit * norm, "norm", "the joint norm");
    // As torch's clip_grad_norm_ does it.
    const double clipped = program_.on_device ? result.norm : norm;
    const double clip = program_.clip ? std::min(1.0, kClip / (clipped + 1e-6)) : 1.0;
    updates_.step(result.grads, clip / result.loss_scale);
    for (size_t i = 0; i < names_.size(); ++i) {
      const auto& state = updates_.states()[i];
      const at::Tensor off = (after.full[i].to(at::kDouble) - state.weight).abs();
      const double ratio = (off / (state.bound + 1e-300)).nan_to_num(INFINITY).max().item<double>();
      if (state.last_update.defined() && result.grads[i].defined()) {
        const double moved = state.last_update.norm().item<double>();
        if (moved > 0) count_informative(state.bound.norm().item<double>(), moved);
      }
      expect_within(ratio, 1.0, "update", names_[i],
                    ": the weight, in units of its bound; largest difference ", off.max().item<double>(),
                    ", the bound there: ");
    }
  }

  void check_buffers(const Expected& expected, const Snapshot& after) {
    for (size_t b = 0; b < after.buffers.size(); ++b) {
      if (!after.buffers[b].is_floating_point()) {
        bool matches = false;
        for (const at::Tensor& wanted : expected.buffers[b])
          matches = matches || at::equal(wanted, after.buffers[b]);
        expect(matches, "buffer", "num_batches_tracked is ", after.buffers[b].item<int64_t>(), ", expected ",
               expected.buffers[b][0].item<int64_t>());
        continue;
      }
      double best = INFINITY;
      for (const at::Tensor& wanted : expected.buffers[b])
        best = std::min(best, (after.buffers[b].to(at::kDouble) - wanted).norm().item<double>());
      const double norm = expected.buffers[b][0].norm().item<double>();
      // A second run inside a compressed region sees the compressed input, and moves a tenth of the
      // statistics. A mean near 0 is off by a part of what it is the mean of, which is of the size of 1 here.
      const double size = norm + std::sqrt(static_cast<double>(after.buffers[b].numel()));
      const double rerun_on_compressed = runs_again(expected.buffers[b]) && compresses() ? 0.1 * size : 0;
      // More runs move the statistics, and their sensitivity, up to as many times as far.
      const double runs = static_cast<double>(expected.buffers[b].size());
      expect_within(
          best,
          runs * (sensitivity() * expected.buffer_sensitivity[b] + expected.buffer_engine_error[b]) +
              (rounding_unit(program_.compute) + kFp32Sums) * norm + rerun_on_compressed,
          "buffer", "running statistics ", b);
    }
  }

  static bool runs_again(const std::vector<at::Tensor>& by_runs) { return by_runs.size() > 1; }

  void check_nothing_changed() {
    if (state_before_.empty()) return;
    // Documented: without mp.forward, buffers go back to the last advance, before what a file has brought
    // since.
    const bool loaded_unseen =
        program_.placement == Placement::PerLayer &&
        std::any_of(program_.events.begin(), program_.events.end(), [&](const Event& event) {
          return (event.action == Action::LoadFp32File && event.step == step_) ||
                 ((event.action == Action::SaveLoadFile || event.action == Action::LoadModuleState) &&
                  event.step == step_ - 1);
        });
    if (program_.on_device && !program_.max_norm) {
      const Snapshot now = subject_.snapshot();
      for (size_t i = 0; i < names_.size(); ++i)
        expect(same_bits(now.full[i], before_.full[i]), "skipped step", names_[i],
               " was changed by a step that was skipped");
    }
    for (const auto& [key, tensor] : subject_.state()) {
      if (loaded_unseen && key.find("buffer.") != std::string::npos) continue;
      if (program_.max_norm && key.ends_with('.' + std::string(embedding_name()))) continue;
      // There an edit goes into the master when it is seen, whatever becomes of the step.
      if (program_.on_device && key.starts_with("precision.master.")) continue;
      // The last of a recipe's largest magnitudes is the present step's, which a forward that threw began.
      const bool is_history = key.find("recipe.amax.") != std::string::npos;
      const auto past = [&](const at::Tensor& values) {
        return is_history ? values.narrow(0, 0, values.size(0) - 1) : values;
      };
      const auto before = state_before_.find(key);
      expect(before != state_before_.end() && same_bits(past(before->second), past(tensor)), "skipped step",
             key, " was changed by a step that was skipped");
    }
  }

  Program program_;
  Planted planted_;
  std::string scratch_;
  Verdict& verdict_;
  Subject subject_;
  GradientOracle gradients_;
  std::vector<std::string> names_;
  UpdateOracle updates_;
  ScaleRule scale_;
  int step_ = 0;
  std::vector<MicroBatch> micro_batches_;
  Snapshot before_;
  std::map<std::string, at::Tensor> state_before_, buffers_before_throw_;
  int bad_parameter_ = -1, bad_micro_batch_ = -1;
  bool large_input_ = false, bad_input_ = false;
  bool sampled_ = false;  ///< the oracle has seen what roundings do
};

void run_steps(const std::vector<Session*>& sessions, int steps) {
  for (int step = 0; step < steps; ++step) {
    int most = 0;
    for (Session* session : sessions) {
      session->begin_step(step);
      most = std::max(most, session->micro_batches());
    }
    for (int micro = 0; micro < most; ++micro) {
      for (Session* session : sessions)
        if (micro < session->micro_batches()) session->forward(micro);
      for (Session* session : sessions)
        if (micro < session->micro_batches()) session->backward(micro);
    }
    for (Session* session : sessions) session->finish_step();
  }
}

template <typename Function>
void guarded(Verdict& verdict, Function function) {
  try {
    function();
  } catch (const std::exception& error) {
    std::string text = error.what();
    verdict.disagreements.push_back({"exception", text.substr(0, text.find("\nException raised"))});
  }
}

void add(Verdict& to, const Verdict& from) {
  to.disagreements.insert(to.disagreements.end(), from.disagreements.begin(), from.disagreements.end());
  to.checks += from.checks;
  to.uninformative += from.uninformative;
  to.second_looks += from.second_looks;
  for (const auto& [kind, worst] : from.worst) to.worst[kind] = std::max(to.worst[kind], worst);
}

}  // namespace

Verdict run(const Program& program, const std::string& scratch, Planted planted) {
  Verdict verdict, second_verdict;
  std::atomic<bool> stop = false;
  std::thread other;
  if (program.company == Company::DrawingThread)
    other = std::thread([&] {
      while (!stop) {
        const at::Tensor drawn = at::rand({64});
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    });
  if (program.company == Company::SecondThread)
    other = std::thread([&] {
      guarded(second_verdict, [&] {
        Session session(*program.second, scratch + ".second", planted, second_verdict);
        run_steps({&session}, program.second->steps);
      });
    });
  guarded(verdict, [&] {
    Session session(program, scratch, planted, verdict);
    if (program.company != Company::SecondModel) return run_steps({&session}, program.steps);
    Session second(*program.second, scratch + ".second", planted, second_verdict);
    run_steps({&session, &second}, std::min(program.steps, program.second->steps));
  });
  stop = true;
  if (other.joinable()) other.join();
  add(verdict, second_verdict);
  return verdict;
}

}  // namespace usage
