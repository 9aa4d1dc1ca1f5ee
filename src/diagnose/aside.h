// Operations that look at a run and are not part of it.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace halfstep::diagnose {

/// While it lives: not recorded, without gradients, in the types that tensors have.
struct Aside {
  const at::RecordFunctionGuard not_recorded{false};
  const at::NoGradGuard no_grad{};
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

}  // namespace halfstep::diagnose
