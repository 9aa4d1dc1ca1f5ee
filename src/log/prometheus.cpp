#include "log/prometheus.h"

#include <halfstep/formats.h>

#include <cmath>

#include "log/record_text.h"
#include "words/utf8.h"

namespace halfstep::log {
namespace {

std::string label(std::string_view name, std::string_view value) {
  std::string text = std::string(name) + "=\"";
  for (const char letter : valid_utf8(value)) {
    if (letter == '\n')
      text += "\\n";
    else if (letter == '\\' || letter == '"')
      (text += '\\') += letter;
    else
      text += letter;
  }
  return text + '"';
}

std::string number(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  std::string text;
  append_number(text, value, "");
  return text;
}

/// Samples of one name stand together, below its type.
class Exposition {
 public:
  explicit Exposition(std::string labels) : labels_(std::move(labels)) {}

  void family(std::string_view name, std::string_view type, std::string_view help) {
    name_ = "halfstep_" + std::string(name);
    text_ +=
        "# HELP " + name_ + " " + std::string(help) + "\n# TYPE " + name_ + " " + std::string(type) + "\n";
  }
  void sample(double value, const std::string& labels = "") {
    text_ += name_ + "{" + labels_ + (labels.empty() ? "" : "," + labels) + "} " + number(value) + "\n";
  }
  void gauge(std::string_view name, std::string_view help, const std::optional<double>& value,
             const std::string& labels = "") {
    if (!value) return;
    family(name, "gauge", help);
    sample(*value, labels);
  }
  std::string take() { return std::move(text_); }

 private:
  std::string labels_, name_{}, text_{};
};

}  // namespace

void PrometheusFigures::take(const StepRecord& record) {
  skipped_ += record.skipped ? 1 : 0;
  latest_ = record;
}

void PrometheusFigures::take(const ProbeRecord& record) {
  const auto note = [&](const ProductFormat& format) {
    const FormatShares shares = format.shares(record.stats);
    lost_[{record.role, record.name, std::string(traits(format.format).name)}] = {
        .underflow = shares.zero, .saturation = shares.saturated + shares.non_finite};
  };
  if (const auto format = product_format(compute_, record.role)) note(*format);
}

std::string PrometheusFigures::text(double unix_time) const {
  Exposition out(label("run", run_));
  if (latest_) {
    const StepRecord& step = *latest_;
    const auto as_number = [](int64_t count) { return static_cast<double>(count); };
    out.gauge("step", "The last step that was taken.", as_number(step.step));
    out.gauge("steps", "Steps of the whole run.", as_number(steps_));
    out.gauge("loss", "Mean loss of the last logged step.", step.loss);
    out.gauge("evaluation_loss", "Loss of the last evaluation.", evaluation_loss_);
    out.gauge("learning_rate", "Learning rate of the last logged step.", step.lr);
    out.gauge("gradient_norm", "2-norm of all gradients, un-scaled, before clipping.", step.grad_norm);
    out.gauge("loss_scale", "Loss scale of the last logged step.", step.loss_scale);
    out.gauge("items_per_second", "What the run trained on, per second.", step.items_per_second,
              label("unit", unit_));
    out.gauge("stalled_share", "Share of updates too small to move the weights.", step.stalled_share);
    out.gauge("saturated_share", "Share of quantised values held at the format's largest number.",
              step.saturated_share);
    out.gauge("vanished_share", "Share of quantised values that became zero.", step.vanished_share);
    if (step.memory)
      out.gauge("peak_bytes", "Tensor memory at its highest in the last logged step.",
                as_number(step.memory->peak_bytes));
  }
  out.family("skipped_steps_total", "counter", "Steps that were skipped since this process began.");
  out.sample(static_cast<double>(skipped_));
  out.family("findings_total", "counter", "Findings since this process began.");
  for (const Severity severity : {Severity::Note, Severity::Warning, Severity::Serious})
    out.sample(static_cast<double>(findings_[static_cast<size_t>(severity)]),
               label("severity", to_string(severity)));
  const auto shares = [&](std::string_view name, std::string_view help, double Lost::* share) {
    if (lost_.empty()) return;
    out.family(name, "gauge", help);
    for (const auto& [key, lost] : lost_) {
      const auto& [role, layer, format] = key;
      out.sample(lost.*share,
                 label("role", role) + "," + label("layer", layer) + "," + label("format", format));
    }
  };
  shares("underflow_share", "Share of values that the format makes zero, when last sampled.",
         &Lost::underflow);
  shares("saturation_share", "Share of values beyond the format's largest number, when last sampled.",
         &Lost::saturation);
  out.family("written_timestamp_seconds", "gauge", "When this was written, in seconds since 1970.");
  out.sample(unix_time);
  return out.take();
}

}  // namespace halfstep::log
