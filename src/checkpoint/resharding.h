// Saved states of several ranks as one.
#pragma once

#include <halfstep/checkpoint.h>

#include <map>
#include <string>

namespace halfstep::checkpoint {

/// What a process without ranks would have saved. `layouts`: of parameters by name, as MixedPrecision saves
/// them ("layout."); what belongs to no parameter of which that is known has one dimension.
StateDict whole_state(const SavedByRanks& saved, const std::map<std::string, std::string>& layouts);

/// Whether a state is of a rank that has parts of parameters.
bool is_of_parts(const StateDict& state);

/// Whether a state is of a rank that has parts of parameters.
bool is_of_parts(const StateDict& state);

/// The layouts in a state, by the names of their parameters.
void take_layouts(const StateDict& state, std::map<std::string, std::string>& layouts);

}  // namespace halfstep::checkpoint
