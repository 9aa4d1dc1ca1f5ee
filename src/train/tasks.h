// The tasks that a configuration can name.
#pragma once

#include <halfstep/run_config.h>
#include <halfstep/task.h>

#include <filesystem>
#include <memory>

namespace halfstep::train {

/// `tokens_folder`: where token files made of text are put. `most_text_bytes`: see TokenOptions.
std::unique_ptr<Task> text_task(const RunConfig& config, const std::filesystem::path& tokens_folder,
                                int64_t most_text_bytes);
std::unique_ptr<Task> image_task(const RunConfig& config);

}  // namespace halfstep::train
