#include <halfstep/checkpoint.h>
#include <halfstep/error.h>
#include <halfstep/task.h>
#include <halfstep/tensor_file.h>

#include <ATen/ops/empty.h>

#include "train/tasks.h"

namespace halfstep {

Task::~Task() = default;

std::vector<std::string> Task::changes_since(const StateDict&) const { return {}; }
std::string Task::model_text() const { return "own model"; }
std::string Task::data_text() const { return "own data"; }
std::string Task::unit() const { return "samples"; }
std::optional<Task::Sample> Task::sample(const MixedPrecision&, uint64_t) { return std::nullopt; }

void Task::write_model(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  NamedTensors tensors;
  for (const auto& [name, value] : module_state(model()))
    tensors.emplace_back(name, std::get<at::Tensor>(value));
  write_tensors(folder / "model.safetensors", tensors);
}

}  // namespace halfstep

namespace halfstep::train {

void check_batch_divides(const RunConfig& config, const Ranks& ranks) {
  if (takes_whole_batches(config)) {
    HALFSTEP_CHECK(config.train.accumulation >= ranks.size(),
                   "run.reduction is canonical: each rank takes whole ",
                   "micro-batches of a step, and train.accumulation is ", config.train.accumulation, " for ",
                   ranks.size(), " ranks. Raise it, and lower data.batch_size, or start fewer ranks.");
    HALFSTEP_CHECK(
        config.run.shard != "weights" || config.train.accumulation % ranks.size() == 0,
        "run.reduction is canonical and run.shard weights: weights are gathered on all ranks at the same "
        "time, so each takes as many micro-batches as the others, and train.accumulation is ",
        config.train.accumulation, " for ", ranks.size(),
        " ranks. Make it a multiple of their number, or set run.shard to gradients.");
    return;
  }
  const int64_t rows = config.data.batch_size, parts = ranks.size(), below = rows / parts * parts;
  HALFSTEP_CHECK(rows % parts == 0, "data.batch_size is ", rows, ", of which ", parts,
                 " ranks take equal parts. Set it to ", below > 0 ? detail::concat(below, " or ") : "",
                 below + parts, ", or start another number of ranks.");
}

Score mean_of_ranks(Score sums, const Ranks& ranks) {
  const at::Tensor all = at::empty({3}, at::kDouble);
  auto* const numbers = all.mutable_data_ptr<double>();
  numbers[0] = sums.loss, numbers[1] = static_cast<double>(sums.count),
  numbers[2] = sums.accuracy.value_or(0);
  ranks.sum(all);
  Score mean{.loss = numbers[0] / numbers[1], .accuracy = {}, .count = static_cast<int64_t>(numbers[1])};
  if (sums.accuracy) mean.accuracy = numbers[2] / numbers[1];
  return mean;
}

}  // namespace halfstep::train
