#include <ATen/ops/cross_entropy_loss.h>
#include <halfstep/error.h>
#include <halfstep/models.h>

#include "models/configs.h"

namespace halfstep {

at::Tensor CausalLM::loss(const at::Tensor& ids, const at::Tensor& targets) {
  HALFSTEP_CHECK(ids.sizes() == targets.sizes(), "CausalLM: ids are ", ids.sizes(), " and targets ",
                 targets.sizes(), "; each id has one target.");
  return at::cross_entropy_loss(forward(ids).flatten(0, 1), targets.flatten());
}

void models::check_ids(const at::Tensor& ids) {
  HALFSTEP_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.size(1) > 0, "CausalLM: ids are ",
                 ids.scalar_type(), " of shape ", ids.sizes(), ", expected Long of [batch, length].");
}

}  // namespace halfstep
