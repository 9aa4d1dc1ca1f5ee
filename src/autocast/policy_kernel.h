// Halfstep's kernels on LibTorch's autocast keys, one for each row of the table and device.
#pragma once

namespace halfstep {

/// The kernels are put in place while the library is loaded, where nobody can catch: this tells afterwards.
/// Throws an Error that names the rows whose operation this LibTorch does not have.
void check_every_row_has_its_kernel();

}  // namespace halfstep
