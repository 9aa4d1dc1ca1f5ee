// The tasks that a configuration can name.
#pragma once

#include <halfstep/ranks.h>
#include <halfstep/run_config.h>
#include <halfstep/task.h>

#include <filesystem>
#include <memory>

namespace halfstep::train {

/// Whether ranks take whole micro-batches of a step by turns, all of which every rank draws, instead of a
/// part of each: the order of sums then does not depend on their number.
inline bool takes_whole_batches(const RunConfig& config) { return config.run.reduction == "canonical"; }

/// `tokens_folder`: where token files made of text are put. `most_text_bytes`: see TokenOptions. Each rank
/// takes its part of each batch, unless it takes whole ones.
std::unique_ptr<Task> text_task(const RunConfig& config, const std::filesystem::path& tokens_folder,
                                int64_t most_text_bytes, const Ranks& ranks);
std::unique_ptr<Task> image_task(const RunConfig& config, const Ranks& ranks);

/// That each rank gets as many rows as any other, so that the mean over ranks is that over rows; or, of whole
/// batches, one at least.
void check_batch_divides(const RunConfig& config, const Ranks& ranks);
/// From sums of each rank, of losses and right answers, to the mean over all.
Score mean_of_ranks(Score sums, const Ranks& ranks);

}  // namespace halfstep::train
