// Which table of kernels runs.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "kernels/kernel_table.h"

namespace halfstep {

/// The tables that this processor can run, the slowest first.
const std::vector<const KernelTable*>& available_kernels();

/// Their names, as HALFSTEP_ISA spells them: "scalar, avx2, avx512".
std::string available_isas();

/// The table of a named ISA. An unknown one, or one that this processor lacks, is an Error that lists those
/// there are.
const KernelTable& kernels_of_isa(std::string_view isa);

/// The table in use: the one that the environment variable HALFSTEP_ISA names, else the widest. Chosen at the
/// first call and constant from then on.
const KernelTable& kernels();

}  // namespace halfstep
