#include "cli/status_line.h"

#include <algorithm>
#include <cmath>

#include "words/numbers.h"

namespace halfstep::cli {
namespace {

constexpr size_t kGap = 2;

// Fields of steady width do not jump while the line is redrawn.
std::string padded(std::string text, size_t columns) {
  if (text.size() < columns) text.append(columns - text.size(), ' ');
  return text;
}

std::string step_of(const RunPlan& plan, int64_t step) {
  const std::string total = std::to_string(plan.steps), done = std::to_string(step);
  return std::string(total.size() > done.size() ? total.size() - done.size() : 0, ' ') + done + "/" + total;
}

std::string rate_unit(const RunPlan& plan) {
  return plan.unit == "tokens" ? " tok/s" : " " + plan.unit + "/s";
}

size_t columns_of(const std::vector<StatusField>& fields) {
  size_t columns = fields.empty() ? 0 : kGap * (fields.size() - 1);
  for (const StatusField& field : fields) columns += field.columns();
  return columns;
}

std::string coloured(const StatusField& field) {
  constexpr const char *kDim = "\033[2m", *kYellow = "\033[33m", *kPlain = "\033[0m";
  if (field.alarm) return kYellow + field.before + field.value + field.after + kPlain;
  const auto dim = [&](const std::string& text) { return text.empty() ? text : kDim + text + kPlain; };
  return dim(field.before) + field.value + dim(field.after);
}

}  // namespace

std::vector<StatusField> status_fields(const RunPlan& plan, const StepRecord& record, int64_t skipped_steps,
                                       std::optional<double> seconds_left) {
  const bool skips_matter = skipped_steps > 0;
  std::vector<StatusField> fields{
      {.before = "step ", .value = step_of(plan, record.step), .rank = 0},
      {.before = "loss ",
       .value = padded(loss_text(record.loss), 6),
       .rank = 1,
       .alarm = !std::isfinite(record.loss)},
      {.before = "lr ", .value = padded(lr_text(record.lr), 7), .rank = 6},
      {.before = "grad ",
       .value = padded(short_text(record.grad_norm), 4),
       .rank = 5,
       .alarm = !std::isfinite(record.grad_norm)},
      {.value = padded(si_text(record.tokens_per_second), 4), .after = rate_unit(plan), .rank = 3},
  };
  if (record.share_of_peak)
    fields.push_back({.before = "peak ", .value = padded(percent_text(*record.share_of_peak), 3), .rank = 8});
  if (record.loss_scale)
    fields.push_back({.before = "scale ", .value = loss_scale_text(*record.loss_scale), .rank = 7});
  if (record.loss_scale || skips_matter)
    fields.push_back({.before = "skips ",
                      .value = std::to_string(skipped_steps),
                      .rank = skips_matter ? 4 : 10,
                      .alarm = skips_matter});
  if (record.stalled_share)
    fields.push_back(
        {.before = "stalled ", .value = padded(percent_text(*record.stalled_share), 3), .rank = 9});
  if (seconds_left) fields.push_back({.before = "ETA ", .value = duration_text(*seconds_left), .rank = 2});
  return fields;
}

std::string status_line(std::vector<StatusField> fields, size_t columns, bool colour) {
  while (fields.size() > 1 && columns_of(fields) > columns)
    fields.erase(std::max_element(fields.begin(), fields.end(),
                                  [](const auto& one, const auto& other) { return one.rank < other.rank; }));
  if (fields.empty()) return "";
  if (columns_of(fields) > columns) {
    const StatusField& last = fields.front();
    return (last.before + last.value + last.after).substr(0, columns);
  }
  std::string line;
  for (const StatusField& field : fields) {
    if (!line.empty()) line.append(kGap, ' ');
    line += colour ? coloured(field) : field.before + field.value + field.after;
  }
  return line;
}

}  // namespace halfstep::cli
