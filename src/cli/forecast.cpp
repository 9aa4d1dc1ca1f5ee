// `halfstep forecast`: what a model needs on machines that are not here.
#include <halfstep/autocast.h>
#include <halfstep/machine.h>
#include <halfstep/models.h>
#include <halfstep/printable.h>
#include <halfstep/tokenizer.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iomanip>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>

#include "cli/commands.h"
#include "cli/forecast_subject.h"
#include "cli/number_checks.h"
#include "cli/terminal_text.h"
#include "forecast/choice.h"
#include "io/durable_file.h"
#include "io/input_file.h"
#include "report/svg_figure.h"
#include "words/numbers.h"

namespace halfstep::cli {
namespace {

using namespace forecast;
using nlohmann::ordered_json;
using Path = std::filesystem::path;

struct ForecastRequest {
  std::string model;
  std::string device = "h100";
  std::optional<std::string> precision, weights, moments, shard;
  std::vector<int64_t> ranks;
  std::optional<int64_t> micro_batch, batch, sequence_length, ranks_per_node;
  bool recompute = false, no_recompute = false, json = false;
  std::optional<std::string> reduction, gather;
  std::string plot;
};

/// The model, and what its run says of the rest.
struct Subject {
  ModelShape shape;
  std::string source;
  std::string precision = "bf16";
  std::optional<std::string> weights{}, moments{};
  int64_t sequence_length = 0;
  std::optional<int64_t> batch{};               ///< sequences of a step, on all ranks
  std::optional<int64_t> micro_batch_of_all{};  ///< and of one forward
  std::optional<bool> recomputes_blocks{};
  std::string reduction = "fp32", gather = "own";
};

std::string text_of(const Path& path) {
  const files::InputFile file(path);
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

/// Not longer than models of today are trained with, though some can read more.
int64_t usual_length(const ModelShape& shape) { return std::min<int64_t>(shape.context, 8192); }

Subject subject_of_folder(const Path& folder) {
  Subject subject{.shape = read_shape(text_of(folder / "config.json"), (folder / "config.json").string()),
                  .source = folder.string()};
  subject.shape.name = folder.filename().empty() ? folder.parent_path().filename() : folder.filename();
  subject.sequence_length = usual_length(subject.shape);
  return subject;
}

int64_t vocabulary_of(const RunConfig& config) {
  if (config.model.vocabulary) return *config.model.vocabulary;
  if (!config.data.tokenizer || *config.data.tokenizer == "bytes")
    return Tokenizer::bytes().vocabulary_size();
  const Path path = *config.data.tokenizer;
  return Tokenizer::from_file(std::filesystem::is_directory(path) ? path / "tokenizer.json" : path)
      .vocabulary_size();
}

Subject subject_of_run(const RunConfig& config, const std::string& name) {
  Subject subject{.shape = shape_of_run(config, name), .source = {}};
  subject.source = "the run " + name;
  subject.precision = config.precision.compute;
  subject.weights = config.precision.weights;
  subject.moments = config.precision.moments;
  subject.sequence_length = config.data.sequence_length;
  subject.micro_batch_of_all = config.data.batch_size;
  subject.batch = config.data.batch_size * config.train.accumulation;
  subject.recomputes_blocks = config.train.recompute_blocks;
  subject.reduction = config.run.reduction;
  subject.gather = config.run.gather;
  return subject;
}

Subject subject_of(const std::string& name) {
  std::string known;
  for (const KnownShape& shape : known_shapes()) {
    known += (known.empty() ? "" : ", ") + std::string(shape.name);
    if (shape.name != name) continue;
    Subject subject{.shape = read_shape(shape.config_json, name),
                    .source = "config.json of " + std::string(shape.source)};
    subject.sequence_length = usual_length(subject.shape);
    return subject;
  }
  if (std::filesystem::exists(Path(name) / "config.json"))
    return about_files([&] { return subject_of_folder(name); });
  for (const ConfigPreset& preset : config_presets())
    if (preset.name == name) {
      ConfigRequest preset_request;
      preset_request.preset = name;
      return subject_of_run(configuration(preset_request).config, name);
    }
  if (std::filesystem::exists(name)) {
    ConfigRequest file_request;
    file_request.file = name;
    const RunConfig config = configuration(file_request).config;
    return about_files([&] { return subject_of_run(config, name); });
  }
  throw ExitWith(
      kUsage,
      name + ": no model, Hugging Face folder, preset or run file has this name. Models: " + known + ".");
}

Device device_of(const ForecastRequest& request) {
  Device device = device_given(request.device);
  if (request.ranks_per_node) device.ranks_per_node = *request.ranks_per_node;
  return device;
}

Question question_of(const ForecastRequest& request, const Subject& subject, int64_t ranks) {
  const std::string reduction = request.reduction.value_or(subject.reduction);
  Question question{.ranks = ranks,
                    .sequence_length = request.sequence_length.value_or(subject.sequence_length),
                    .micro_batch = request.micro_batch,
                    .batch = request.batch,
                    .summed_bytes = reduction == "bf16" || reduction == "fp16" ? 2 : 4,
                    .packs_weights = request.gather.value_or(subject.gather) == "fp8"};
  if (request.shard)
    for (const auto& [word, sharding] : kShardings)
      if (word == *request.shard) question.sharding = sharding;
  if (!request.batch && !request.micro_batch && subject.batch) {
    if (*subject.micro_batch_of_all % ranks != 0)
      throw ExitWith(kUsage, detail::concat(subject.source, " has batches of ", *subject.micro_batch_of_all,
                                            " sequences, which ", ranks,
                                            " ranks cannot share. Give --micro-batch or --batch."));
    question.micro_batch = *subject.micro_batch_of_all / ranks;
    question.batch = subject.batch;
  }
  question.recomputes_blocks = subject.recomputes_blocks;
  if (request.recompute || request.no_recompute) question.recomputes_blocks = request.recompute;
  return question;
}

/// What was found for one number of ranks.
struct Found {
  Question question;
  std::vector<Outcome> outcomes;  ///< one for each sharding
  std::optional<Outcome> chosen;  ///< the cheapest that fits
};

struct Forecast {
  const Subject& subject;
  PrecisionPlan precision;
  Device device;
  std::vector<Found> found;  ///< by ranks
};

// JSON

ordered_json json_of(const MemoryAmounts& amounts) {
  ordered_json json;
  for (std::size_t c = 0; c < kMemoryClassCount; ++c)
    json[name_of(static_cast<MemoryClass>(c))] = amounts.by_class[c];
  json["total"] = amounts.total;
  return json;
}

ordered_json json_of(const Forecast& forecast, const Outcome& outcome) {
  const Arrangement& a = outcome.arrangement;
  return {{"shard", to_string(a.sharding)},
          {"micro_batch", a.micro_batch},
          {"accumulation", a.accumulation},
          {"recompute_blocks", a.recomputes_blocks},
          {"fits", outcome.fits},
          {"largest_micro_batch",
           largest_micro_batch(forecast.subject.shape, forecast.precision, a, forecast.device)},
          {"tokens_per_step", a.step_tokens()},
          {"bytes_per_rank", json_of(outcome.memory.class_peaks)},
          {"bytes_at_peak", json_of(outcome.memory.at_peak)},
          {"peak_moment", outcome.memory.moment},
          {"seconds_per_step", outcome.time.total()},
          {"forward_seconds", outcome.time.forward},
          {"backward_seconds", outcome.time.backward},
          {"update_seconds", outcome.time.update},
          {"exchange_seconds", outcome.time.exchanged},
          {"exposed_seconds", outcome.time.exposed},
          {"tokens_per_second_per_device", outcome.tokens_per_second_per_device},
          {"share_of_peak", outcome.share_of_peak}};
}

void print_json(const Forecast& forecast) {
  const Subject& subject = forecast.subject;
  ordered_json ranks = ordered_json::array();
  for (const Found& found : forecast.found) {
    ordered_json shardings = ordered_json::array();
    for (const Outcome& outcome : found.outcomes) shardings.push_back(json_of(forecast, outcome));
    ranks.push_back({{"ranks", found.question.ranks},
                     {"cheapest", found.chosen ? json_of(forecast, *found.chosen) : ordered_json(nullptr)},
                     {"shardings", shardings}});
  }
  print_answer(
      {{"model", subject.shape.name},
       {"source", subject.source},
       {"parameters", subject.shape.parameters()},
       {"flops_per_token", subject.shape.flops_per_token(forecast.found.front().question.sequence_length)},
       {"precision", forecast.precision.name},
       {"weights", to_string(forecast.precision.weights)},
       {"moments", to_string(forecast.precision.moments)},
       {"sequence_length", forecast.found.front().question.sequence_length},
       {"device", ordered_json::parse(to_json(forecast.device))},
       {"usable_bytes", forecast.device.usable_bytes()},
       {"forecast", ranks}});
}

// For people

std::string gigabytes(double bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(bytes < 99.95e9 ? 2 : 1) << bytes / 1e9;
  return text.str();
}

std::string arrangement_text(const Arrangement& a) {
  constexpr const char* kSharded[] = {"nothing sharded", "optimizer states sharded",
                                      "optimizer states and gradients sharded",
                                      "optimizer states, gradients and weights sharded"};
  return std::string(kSharded[static_cast<int>(a.sharding)]) + ", " + counted(a.micro_batch, "sequence") +
         " per rank" +
         (a.accumulation > 1 ? ", " + with_commas(a.accumulation) + " micro-batches per step" : "") +
         ", blocks " + (a.recomputes_blocks ? "recomputed" : "kept");
}

/// Columns of a table, the first to the left and the others to the right.
void print_rows(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  for (const auto& row : rows) {
    size_t last = row.size();
    while (last > 1 && row[last - 1].empty()) --last;
    for (size_t i = 0; i < last; ++i)
      std::cout << (i == 0 ? "" : "  ") << (i == 0 ? std::left : std::right)
                << std::setw(static_cast<int>(widths[i])) << row[i];
    std::cout << "\n";
  }
}

std::vector<std::string> row_of(const std::string& first, const Outcome& outcome) {
  const Arrangement& a = outcome.arrangement;
  std::vector<std::string> row{first, std::to_string(a.micro_batch), a.recomputes_blocks ? "yes" : "no",
                               gigabytes(outcome.memory.bytes())};
  if (!outcome.fits) {
    row.insert(row.end(), {"too large", "", "", ""});
    return row;
  }
  row.insert(row.end(),
             {fine_duration_text(outcome.time.total()), percent(outcome.time.exposed / outcome.time.total()),
              with_commas(std::llround(outcome.tokens_per_second_per_device)),
              outcome.share_of_peak > 0 ? percent_text(outcome.share_of_peak) : ""});
  return row;
}

void print_head(const Forecast& forecast) {
  const ModelShape& shape = forecast.subject.shape;
  const Device& device = forecast.device;
  std::cout << "model      " << printable(shape.name, Unprintable::Replaced) << ", "
            << with_commas(shape.parameters()) << " parameters, sequences of "
            << with_commas(forecast.found.front().question.sequence_length) << "\n"
            << "precision  " << forecast.precision.name << ", weights "
            << to_string(forecast.precision.weights) << ", moments " << to_string(forecast.precision.moments)
            << "\n"
            << "device     " << printable(device.name, Unprintable::Replaced) << ", "
            << bytes_text(device.usable_bytes()) << " of " << bytes_text(device.memory_bytes)
            << " for tensors, " << device.ranks_per_node << " a node\n";
}

void print_memory(const RankMemory& memory, double usable_bytes) {
  std::vector<std::vector<std::string>> rows{{"GB per rank", "highest", "at the peak"}};
  for (std::size_t c = 0; c < kMemoryClassCount; ++c)
    if (memory.class_peaks.by_class[c] > 0)
      rows.push_back({"  " + std::string(name_of(static_cast<MemoryClass>(c))),
                      gigabytes(static_cast<double>(memory.class_peaks.by_class[c])),
                      gigabytes(static_cast<double>(memory.at_peak.by_class[c]))});
  rows.push_back({"  all", "", gigabytes(memory.bytes())});
  print_rows(rows);
  std::cout << "of " << gigabytes(usable_bytes) << " GB; the peak is where " << memory.moment << "\n";
}

void print_time(const StepTime& time, const Outcome& outcome) {
  print_rows({{"seconds per step", digits(time.total(), 3)},
              {"  forward", digits(time.forward, 3)},
              {"  backward", digits(time.backward, 3)},
              {"  update", digits(time.update, 3)},
              {"  exchange, exposed", digits(time.exposed, 3)},
              {"  exchange, in all", digits(time.exchanged, 3)}});
  print_paragraph(
      with_commas(std::llround(outcome.tokens_per_second_per_device)) + " tokens per second and device" +
      (outcome.share_of_peak > 0 ? ", " + percent_text(outcome.share_of_peak) + " of BF16's peak" : "") +
      "; " + si_text(outcome.tokens_per_second_per_device * static_cast<double>(outcome.arrangement.ranks)) +
      " on all ranks; " + si_text(static_cast<double>(outcome.arrangement.step_tokens())) +
      " tokens per step.");
}

const std::vector<std::string> kColumns{"",     "batch",   "recomputed", "GB",
                                        "step", "exposed", "tokens/s",   "of peak"};

void print_one(const Forecast& forecast) {
  const Found& found = forecast.found.front();
  const Outcome& shown = found.chosen ? *found.chosen : found.outcomes.back();
  std::cout << "ranks      " << with_commas(found.question.ranks) << "\n";
  print_paragraph(
      (found.chosen ? std::string(found.outcomes.size() > 1 ? "The cheapest arrangement: " : "Arrangement: ")
                    : std::string("Nothing fits. Nearest: ")) +
      arrangement_text(shown.arrangement) + ".");
  std::cout << "\n";
  print_memory(shown.memory, forecast.device.usable_bytes());
  const int64_t largest =
      largest_micro_batch(forecast.subject.shape, forecast.precision, shown.arrangement, forecast.device);
  std::cout << "largest batch that fits: "
            << (largest == 0 ? "none" : counted(largest, "sequence") + " per rank") << "\n\n";
  print_time(shown.time, shown);
  if (found.outcomes.size() == 1) return;
  std::cout << "\n";
  auto columns = kColumns;
  columns.front() = "sharded";
  std::vector<std::vector<std::string>> rows{columns};
  for (const Outcome& outcome : found.outcomes)
    rows.push_back(row_of(std::string(to_string(outcome.arrangement.sharding)), outcome));
  print_rows(rows);
}

void print_many(const Forecast& forecast) {
  auto columns = kColumns;
  columns.front() = "ranks, sharded";
  std::vector<std::vector<std::string>> rows{columns};
  for (const Found& found : forecast.found) {
    const Outcome& shown = found.chosen ? *found.chosen : found.outcomes.back();
    rows.push_back(row_of(
        with_commas(found.question.ranks) + " " + std::string(to_string(shown.arrangement.sharding)), shown));
  }
  std::cout << "\n";
  print_paragraph(
      "The cheapest arrangement for each number of ranks: sequences of a rank in a forward, GB of a rank, "
      "the "
      "share of the step that exchanges take beyond what is computed, tokens per second and device.");
  std::cout << "\n";
  print_rows(rows);
}

void print_assumptions(const Forecast& forecast) {
  std::cout << "\n";
  const bool is_ahead = std::ranges::any_of(forecast.found, [&](const Found& found) {
    const bool shards = found.chosen && found.chosen->arrangement.shards(Sharding::States);
    return shards || (found.question.ranks > 1 && forecast.precision.has_recipe());
  });
  if (forecast.device.name != "cpu" && is_ahead)
    print_paragraph(
        "Halfstep itself does not yet train this way on accelerators: with several ranks each has all of the "
        "model there, in FP32, BF16 or FP16. Parts on each rank, and recipes on several, are for the CPU so "
        "far (docs/scale.md).");
  print_paragraph(
      "A model, not a measurement: products run at the rate that large ones reach on this device, exchanges "
      "do not slow down the computation that they overlap, all ranks are equally fast, and data, launches of "
      "kernels, evaluation and checkpoints cost nothing. There is no dropout. docs/forecast.md says what "
      "that "
      "leaves out, and how far published runs are from it.");
  for (const std::string& source : forecast.device.sources)
    print_paragraph(printable(forecast.device.name + ": " + source + ".", Unprintable::Replaced));
}

// The plot

void write_plot(const ForecastRequest& request, const Forecast& forecast) {
  const auto ranks_of = [](const Found& found) { return static_cast<double>(found.question.ranks); };
  const double first = ranks_of(forecast.found.front()), last = ranks_of(forecast.found.back());
  report::Axis across{.kind = report::AxisKind::Log2, .low = first / 1.1, .high = last * 1.1};
  for (const Found& found : forecast.found)
    across.ticks.push_back({.value = ranks_of(found), .label = with_commas(found.question.ranks)});
  report::FigurePanel step{.title = "seconds per step", .kind = report::AxisKind::Log10};
  report::FigurePanel rate{.title = "tokens per second and device", .from_zero = true};
  for (const auto& [word, sharding] : kShardings) {
    report::FigureLine seconds{.name = "sharded: " + std::string(word)}, tokens = seconds;
    for (const Found& found : forecast.found)
      for (const Outcome& outcome : found.outcomes) {
        if (outcome.arrangement.sharding != sharding || !outcome.fits) continue;
        seconds.points.emplace_back(ranks_of(found), outcome.time.total());
        tokens.points.emplace_back(ranks_of(found), outcome.tokens_per_second_per_device);
      }
    step.lines.push_back(std::move(seconds));
    rate.lines.push_back(std::move(tokens));
  }
  const std::string title = "ranks (" + forecast.subject.shape.name + ", " + forecast.precision.name + ", " +
                            forecast.device.name + ", each with the batch that is cheapest)";
  about_files([&] { files::replace_file(request.plot, report::svg_figure({step, rate}, across, title)); });
}

void run_forecast(const ForecastRequest& request) {
  if (request.gather == "fp8" && request.shard && *request.shard != "weights")
    throw ExitWith(kUsage, "--gather fp8 is for --shard weights: with " + *request.shard +
                               " no weights travel in a forward.");
  const Subject subject = subject_of(request.model);
  std::set<int64_t> ranks(request.ranks.begin(), request.ranks.end());
  if (ranks.empty()) ranks.insert(1);
  if (!request.plot.empty() && ranks.size() < 2)
    throw ExitWith(kUsage, "--plot draws over several numbers of ranks: --ranks 8,64,512.");
  Forecast forecast{.subject = subject, .precision = {}, .device = {}, .found = {}};
  try {
    forecast.precision = precision_plan(request.precision.value_or(subject.precision),
                                        request.weights ? request.weights : subject.weights,
                                        request.moments ? request.moments : subject.moments);
    forecast.device = device_of(request);
    for (const int64_t count : ranks) {
      Found found{.question = question_of(request, subject, count), .outcomes = {}, .chosen = {}};
      found.outcomes =
          best_of_each_sharding(subject.shape, forecast.precision, found.question, forecast.device);
      if (const Outcome* const best = cheapest(found.outcomes)) found.chosen = *best;
      forecast.found.push_back(std::move(found));
    }
  } catch (const Error& error) {
    throw ExitWith(kUsage, error.what());
  }
  if (!request.plot.empty()) write_plot(request, forecast);
  if (request.json) return print_json(forecast);
  print_head(forecast);
  forecast.found.size() == 1 ? print_one(forecast) : print_many(forecast);
  print_assumptions(forecast);
}

}  // namespace

ModelShape shape_of_run(const RunConfig& config, const std::string& name) {
  const RunConfig::Model& model = config.model;
  if (model.from) return subject_of_folder(*model.from).shape;
  if (!model.layers || !model.width || !model.heads)
    throw ExitWith(kUsage, name + ": its model is " + model.kind.value_or("not given") +
                               "; a forecast is of a language model.");
  const CausalLMSizes sizes{.vocabulary = vocabulary_of(config),
                            .context = model.context.value_or(config.data.sequence_length),
                            .layers = *model.layers,
                            .width = *model.width,
                            .heads = *model.heads,
                            .key_value_heads = model.kv_heads,
                            .feed_forward_width = model.ffn_width};
  return read_shape(config_json_of(*model.kind, sizes), name);
}

Device device_given(const std::string& name) {
  if (std::filesystem::is_regular_file(name))
    return about_files([&] { return read_device(text_of(name), name); });
  Device device = device_named(name);
  if (name == "cpu") device.products_in_fp32 = precision_support(at::kBFloat16).support != Support::Native;
  return device;
}

void add_forecast(CLI::App& program) {
  CLI::App* const command = program.add_subcommand("forecast", "A model's memory and time on other machines");
  auto request = std::make_shared<ForecastRequest>();
  command
      ->add_option("MODEL", request->model, std::string("llama-8b, a model's folder, a run file or a preset"))
      ->required();
  const auto words = [&](const char* name, auto& value, const char* about,
                         const std::vector<std::string>& all) {
    command->add_option(name, value, std::string(about))->check(CLI::IsMember(all))->type_name("WORD");
  };
  command->add_option("--ranks", request->ranks, std::string("How many; several with commas: 8,64,512 [1]"))
      ->delimiter(',')
      ->check(number_from(1, 1 << 20, "a number of ranks, 1 to 1048576"))
      ->type_name("N");
  command
      ->add_option("--device", request->device, std::string("a100, h100, h200, b200, cpu, or a file [h100]"))
      ->type_name("NAME");
  command->add_option("--precision", request->precision, std::string("bf16, fp8-current, mxfp8, ... [bf16]"))
      ->type_name("NAME");
  words("--shard", request->shard, "none, states, gradients or weights [the cheapest]",
        {"none", "states", "gradients", "weights"});
  const auto count = [&](const char* name, auto& value, const char* about) {
    command->add_option(name, value, std::string(about))
        ->check(number_from(1, 1 << 24, "a count, 1 to 16777216"))
        ->type_name("N");
  };
  count("--micro-batch", request->micro_batch, "Sequences of a rank in one forward [the cheapest]");
  count("--batch", request->batch, "Of a step, on all ranks [a micro-batch each]");
  count("--sequence-length", request->sequence_length, "Tokens [the model's context, at most 8192]");
  CLI::Option* const recompute = command->add_flag("--recompute", request->recompute,
                                                   std::string("Blocks are computed again for backward"));
  command->add_flag("--no-recompute", request->no_recompute, std::string("They are not [the cheaper]"))
      ->excludes(recompute);
  words("--weights", request->weights, "How weights are kept: precision.weights",
        {"split_master", "fp32_master", "fp32", "kahan", "stochastic"});
  words("--moments", request->moments, "How moments are kept: precision.moments", {"fp32", "bf16", "8bit"});
  words("--reduction", request->reduction, "Type of sent gradients: run.reduction", {"fp32", "bf16"});
  words("--gather", request->gather, "Type of gathered weights: run.gather", {"own", "fp8"});
  count("--node-size", request->ranks_per_node, "Devices of a node [the device's]");
  command->add_option("--plot", request->plot, std::string("Draw step time and speed over --ranks, as SVG"))
      ->type_name("FILE");
  command->add_flag("--json", request->json, std::string("The answer as JSON"));
  command->footer(
      "What is not given is chosen: of everything that fits, the arrangement with the\n"
      "most tokens per second and device. docs/forecast.md has what is modelled.");
  command->callback([request] { run_forecast(*request); });
}

}  // namespace halfstep::cli
