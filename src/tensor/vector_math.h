// MKL's vector functions, brought up by one thread.
#pragma once

namespace halfstep {

/// LibTorch computes exp, log and their kin of FP32 tensors by MKL's vector functions, a part of the tensor
/// on each thread. MKL sets itself up at the first call, and where two threads make it at once, one of them
/// may get results that are off by 1.5e-4: seen in one of ten processes on two cores, in LibTorch 2.13 as it
/// is. The first loss of such a run, and with it every later one, then differs from the same run's loss in
/// another process.
///
/// Makes that first call on this thread alone. Once a process; later calls cost nothing.
void settle_vector_math();

}  // namespace halfstep
