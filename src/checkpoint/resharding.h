// Saved states of several ranks as one.
#pragma once

#include <halfstep/checkpoint.h>

#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace halfstep::checkpoint {

/// What a process without ranks would have saved. `layouts`: of parameters by name, as MixedPrecision saves
/// them ("layout."); what belongs to no parameter of which that is known has one dimension.
StateDict whole_state(const SavedByRanks& saved, const std::map<std::string, std::string>& layouts);

/// load_checkpoint, for one of `size` ranks: where as many have saved it, what is no part of a parameter is
/// what this rank has saved.
Checkpoint load_for_rank(const std::filesystem::path& folder, int64_t step,
                         const std::map<std::string, StateDict>& live, int rank, int size);

/// Whether a state is of a rank that has parts of parameters.
bool is_of_parts(const StateDict& state);

/// The parameter of which a saved text of that name is the layout; nothing of any other.
std::optional<std::string> param_of_layout(std::string_view name);

}  // namespace halfstep::checkpoint
