// A tracer sees the operations that LibTorch dispatches, and needs the graph for what is made of none.
#pragma once

#include <ATen/core/Tensor.h>

namespace halfstep::diagnose {

/// Before a backward: the tracer of this thread, if there is one, looks at what each node puts out.
void watch_backward(const at::Tensor& loss);

}  // namespace halfstep::diagnose
