// How LibTorch's threads wait for each other.
#pragma once

namespace halfstep::cli {

/// Lets them spin for a moment only and then sleep, unless the environment says how they wait. OpenMP reads
/// that when it is loaded, so the program starts anew, with the same arguments: call this before anything is
/// read, written or waited for. See docs/decisions/0067-threads-spin-briefly.md.
void spin_briefly();

}  // namespace halfstep::cli
