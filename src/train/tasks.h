// The tasks that a configuration can name.
#pragma once

#include <halfstep/ranks.h>
#include <halfstep/run_config.h>
#include <halfstep/task.h>

#include <filesystem>
#include <memory>

namespace halfstep::train {

/// `tokens_folder`: where token files made of text are put. `most_text_bytes`: see TokenOptions. Each rank
/// takes its part of each batch.
std::unique_ptr<Task> text_task(const RunConfig& config, const std::filesystem::path& tokens_folder,
                                int64_t most_text_bytes, const Ranks& ranks);
std::unique_ptr<Task> image_task(const RunConfig& config, const Ranks& ranks);

/// That each rank gets as many rows as any other: the mean over ranks is then that over rows.
void check_batch_divides(const RunConfig& config, const Ranks& ranks);
/// From sums of each rank, of losses and right answers, to the mean over all.
Score mean_of_ranks(Score sums, const Ranks& ranks);

}  // namespace halfstep::train
