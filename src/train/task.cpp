#include <halfstep/checkpoint.h>
#include <halfstep/task.h>
#include <halfstep/tensor_file.h>

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
