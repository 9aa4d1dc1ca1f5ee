// The two halves of a look at gradients: their squares, and what these mean.
#pragma once

#include <halfstep/grads.h>

#include <optional>
#include <vector>

namespace halfstep {

/// Of each parameter the sum of the squares of its gradient; nothing where it has none.
using GradSquares = std::vector<std::optional<double>>;

/// `grads`: undefined where there is none. On two threads or more the same bits as on one.
GradSquares squares_of(const std::vector<at::Tensor>& grads);

GradFindings findings_of(const std::vector<Param>& params, const GradSquares& squares, double loss_scale,
                         GradDetail detail);

}  // namespace halfstep
