// `halfstep checkpoint`: what is in a run's checkpoints, whether it is whole, and its weights in a plain
// file.
#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/params.h>
#include <halfstep/printable.h>
#include <halfstep/tensor_file.h>

#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/terminal_text.h"

namespace halfstep::cli {
namespace {

using nlohmann::ordered_json;

struct CheckpointRequest {
  std::string folder;
  int64_t step = -1;  // the latest
  std::string part;   // see part_of
  bool full_precision = false;
  std::string output;
  bool json = false;
};

std::vector<int64_t> steps_in(const CheckpointRequest& request) {
  std::vector<int64_t> steps = checkpoint_steps(request.folder);
  HALFSTEP_CHECK(!steps.empty(), request.folder,
                 ": no checkpoints. Give the folder of a run, which holds folders like step-000000100.");
  return steps;
}

int64_t step_of(const CheckpointRequest& request) {
  return request.step >= 0 ? request.step : steps_in(request).back();
}

ordered_json json_of(const CheckpointSummary& summary) {
  ordered_json parts = ordered_json::object();
  for (const auto& part : summary.parts) {
    ordered_json tensors = ordered_json::object();
    for (const auto& tensor : part.tensors)
      tensors[tensor.name] = {{"type", to_string(tensor.type)},
                              {"shape", tensor.shape},
                              {"bytes", tensor.bytes},
                              {"sha256", tensor.sha256}};
    parts[part.name] = {{"bytes", part.bytes}, {"values", part.values}, {"tensors", tensors}};
  }
  return {{"step", summary.step},
          {"bytes", summary.file_bytes},
          {"parts", parts},
          {"fingerprint", summary.fingerprint}};
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t size : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

std::string shown(const std::string& text) { return printable(text, Unprintable::Escaped); }

void print_plain(const CheckpointSummary& summary) {
  std::cout << "Step " << summary.step << ", " << summary.file_bytes << " bytes\n";
  for (const auto& part : summary.parts) {
    std::cout << "\n"
              << shown(part.name) << ": " << part.tensors.size() << " tensors, " << part.bytes << " bytes\n";
    for (const auto& [name, value] : part.values)
      std::cout << "  " << shown(name) << " = " << shown(value) << "\n";
    for (const auto& tensor : part.tensors)
      std::cout << "  " << shown(tensor.name) << "  " << to_string(tensor.type) << " "
                << shape_text(tensor.shape) << "\n";
  }
  std::cout << "\nWritten with\n";
  for (const auto& [name, value] : summary.fingerprint)
    std::cout << "  " << shown(name) << ": " << shown(value) << "\n";
}

void inspect(const CheckpointRequest& request) {
  const CheckpointSummary summary = summarize_checkpoint(request.folder, step_of(request));
  if (!request.json) return print_plain(summary);
  ordered_json answer = json_of(summary);
  answer["steps"] = steps_in(request);
  print_answer(answer);
}

void list(const CheckpointRequest& request) {
  ordered_json all = ordered_json::array();
  if (!request.json) std::cout << "        step            MB  held-out loss  saved in good health  pinned\n";
  for (const int64_t step : steps_in(request)) {
    CheckpointSummary one;
    try {
      one = summarize_checkpoint(request.folder, step);
    } catch (const FileError&) {
      throw;
    } catch (const Error& error) {
      // The others are what somebody looks for then.
      all.push_back({{"step", step}, {"damaged", error.what()}});
      if (!request.json)
        std::cout << std::setw(12) << step << "  DAMAGED: " << printable(error.what(), Unprintable::Replaced)
                  << "\n";
      continue;
    }
    ordered_json row{
        {"step", step}, {"bytes", one.file_bytes}, {"healthy", one.healthy}, {"pinned", one.pinned}};
    if (one.score) row["score"] = *one.score;
    all.push_back(row);
    if (request.json) continue;
    std::cout << std::setw(12) << step << std::setw(14) << std::fixed << std::setprecision(1)
              << static_cast<double>(one.file_bytes) / 1e6 << std::setw(15);
    if (one.score)
      std::cout << std::setprecision(4) << *one.score;
    else
      std::cout << "";
    std::cout << std::setw(22) << (one.healthy ? "yes" : "NO") << std::setw(8) << (one.pinned ? "yes" : "")
              << "\n";
  }
  if (request.json) print_answer(all);
}

void remove(const CheckpointRequest& request) {
  remove_checkpoint(request.folder, request.step);
  if (request.json)
    print_answer(ordered_json{{"removed", request.step}});
  else
    std::cout << "the checkpoint of step " << request.step << " is removed\n";
}

void pin(const CheckpointRequest& request, bool pinned) {
  pin_checkpoint(request.folder, request.step, pinned);
  if (request.json)
    print_answer(ordered_json{{"step", request.step}, {"pinned", pinned}});
  else
    std::cout << "the checkpoint of step " << request.step
              << (pinned ? " is kept until it is unpinned\n" : " is no longer pinned\n");
}

bool is_there(const std::string& folder, int64_t step) {
  const std::vector<int64_t> steps = checkpoint_steps(folder);
  return std::binary_search(steps.begin(), steps.end(), step);
}

// Every checkpoint of the run, or the one that was asked for; exit code 1 by the error that ends it.
void verify(const CheckpointRequest& request) {
  const std::vector<int64_t> steps =
      request.step >= 0 ? std::vector<int64_t>{request.step} : steps_in(request);
  ordered_json answer = ordered_json::object();
  size_t damaged = 0, verified = 0;
  for (const int64_t step : steps) {
    const std::vector<std::string> faults = verify_checkpoint(request.folder, step);
    // A run that goes on removes its oldest ones while we read.
    if (!faults.empty() && request.step < 0 && !is_there(request.folder, step)) continue;
    ++verified;
    damaged += faults.empty() ? 0 : 1;
    answer[std::to_string(step)] = faults;
    if (request.json) continue;
    std::cout << "step " << step << ": " << (faults.empty() ? "whole" : "DAMAGED") << "\n";
    for (const std::string& fault : faults) std::cout << "  " << shown(fault) << "\n";
  }
  if (request.json) print_answer(answer);
  std::cout.flush();
  HALFSTEP_CHECK(damaged == 0, request.folder, ": ", damaged, " of ", verified, " checkpoints damaged.");
}

/// How a weight is kept, from what is saved of it: Precision::keep may give each another storage.
WeightStorage storage_of(const at::Tensor& working, const at::Tensor& master) {
  if (working.scalar_type() == at::kFloat) return WeightStorage::Fp32;
  if (!master.defined()) return WeightStorage::Nearest;  // as Stochastic: nothing is beside it
  if (master.scalar_type() == at::kFloat) return WeightStorage::Fp32Master;
  return master.scalar_type() == at::kShort ? WeightStorage::SplitMaster : WeightStorage::Kahan;
}

// What MixedPrecision saves: each weight's working copy, and what is kept beside it.
NamedTensors full_precision_weights(const StateDict& saved, const std::string& part) {
  constexpr std::string_view kWorking = "working.", kBuffer = "buffer.";
  HALFSTEP_CHECK(saved.contains("weights"), "part '", part,
                 "' is not what MixedPrecision saves: it has no working and master copies to combine.");
  NamedTensors tensors;
  for (const auto& [name, value] : saved) {
    if (name.starts_with(kBuffer)) tensors.emplace_back(name.substr(kBuffer.size()), saved.tensor(name));
    if (!name.starts_with(kWorking)) continue;
    Param param{.name = name.substr(kWorking.size()), .working = saved.tensor(name)};
    const std::string master = "master." + param.name;
    if (saved.contains(master)) param.master = saved.tensor(master);
    param.storage = storage_of(param.working, param.master);
    // One that was frozen had no master: its working copy is all there is.
    tensors.emplace_back(param.name, param.master.defined() && param.master.numel() != param.working.numel()
                                         ? param.working.to(at::kFloat)
                                         : full_precision(param));
  }
  return tensors;
}

/// The part to export: 'model' if none was named, or what 'halfstep train' saves instead of it.
std::string part_of(const CheckpointRequest& request, int64_t step) {
  if (!request.part.empty()) return request.part;
  const CheckpointSummary summary = summarize_checkpoint(request.folder, step);
  const auto has = [&](const char* name) {
    return std::ranges::find(summary.parts, name, &CheckpointSummary::Part::name) != summary.parts.end();
  };
  return !has("model") && has("precision") ? "precision" : "model";
}

// How many tensors were written. They are counted here, not in the file: what went into a pipe cannot be read
// again.
size_t export_tensors(const CheckpointRequest& request, int64_t step) {
  const std::string part = part_of(request, step);
  if (request.full_precision) {
    const Checkpoint checkpoint = load_checkpoint(request.folder, step);
    const NamedTensors tensors = full_precision_weights(checkpoint.part(part), part);
    write_tensors(request.output, tensors, {{"format", "pt"}});
    return tensors.size();
  }
  // First: a run that goes on may remove the checkpoint as soon as it is exported.
  const CheckpointSummary summary = summarize_checkpoint(request.folder, step);
  export_part(request.folder, step, part, request.output);
  return std::ranges::find(summary.parts, part, &CheckpointSummary::Part::name)->tensors.size();
}

void run_export(const CheckpointRequest& request) {
  keep_answer_out_of(request.output);
  const int64_t step = step_of(request);
  const size_t tensors = export_tensors(request, step);
  if (request.json)
    print_answer(ordered_json{{"step", step}, {"file", request.output}, {"tensors", tensors}});
  else
    std::cout << shown(request.output) << ": " << tensors << " tensors of step " << step << "\n";
}

/// A run's folder stands for the one in it where its checkpoints are.
std::string with_checkpoints(std::string folder) {
  const auto inside = std::filesystem::path(folder) / "checkpoints";
  std::error_code unknown;
  return std::filesystem::is_directory(inside, unknown) ? inside.string() : std::move(folder);
}

enum class Step { Optional, Required };

CLI::App* add_action(CLI::App& parent, const std::shared_ptr<CheckpointRequest>& request,
                     const std::string& name, const std::string& about, Step step = Step::Optional) {
  CLI::App* const action = parent.add_subcommand(name, about);
  action->add_option("folder", request->folder, std::string("Folder of the run, or of its checkpoints"))
      ->required()
      ->transform(with_checkpoints);
  const bool required = step == Step::Required;
  action
      ->add_option("--step", request->step, std::string(required ? "Step" : "Step; the latest if not given"))
      ->transform(decimal)
      ->required(required);
  action->add_flag("--json", request->json, std::string("As JSON"));
  return action;
}

}  // namespace

void add_checkpoint(CLI::App& program) {
  CLI::App* const checkpoint =
      program.add_subcommand("checkpoint", "The checkpoints of a run: inspect, keep, remove");
  checkpoint->require_subcommand(1);
  const auto request = std::make_shared<CheckpointRequest>();

  add_action(*checkpoint, request, "inspect", "Steps, parts, tensors, and what it was written with")
      ->callback([request] { about_files([&] { inspect(*request); }); });
  add_action(*checkpoint, request, "verify",
             "Check that every byte is as it was saved; all checkpoints if no step is given")
      ->callback([request] { about_files([&] { verify(*request); }); });
  add_action(*checkpoint, request, "ls", "The checkpoints of a run")->callback([request] {
    about_files([&] { list(*request); });
  });
  add_action(*checkpoint, request, "rm", "Remove one", Step::Required)->callback([request] {
    about_files([&] { remove(*request); });
  });
  add_action(*checkpoint, request, "pin", "Keep one until it is unpinned", Step::Required)
      ->callback([request] { about_files([&] { pin(*request, true); }); });
  add_action(*checkpoint, request, "unpin", "Undo pin; newer ones may replace it", Step::Required)
      ->callback([request] { about_files([&] { pin(*request, false); }); });
  CLI::App* const exporting =
      add_action(*checkpoint, request, "export", "Write a part's tensors into a plain safetensors file");
  exporting->add_option(
      "--part", request->part,
      std::string("Part; 'model' if not given, or 'precision' of a run of 'halfstep train'"));
  exporting->add_flag("--full-precision", request->full_precision,
                      std::string("Combine working and master copies: FP32 weights by the model's names"));
  exporting->add_option("-o,--output", request->output, std::string("File to write"))->required();
  exporting->callback([request] { about_files([&] { run_export(*request); }); });
}

}  // namespace halfstep::cli
