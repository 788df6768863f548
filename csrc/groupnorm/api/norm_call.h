// What a GroupNorm call on CUDA tells choose_group_norm (groupnorm/choice.h).
#pragma once

#include "groupnorm/api/group_norm_api.h"
#include "groupnorm/plan_input.h"

namespace kgopt {

// tensors: those of x's sizes, dense, the first of them x; in a backward (`backward`) dy and dx are among them.
NormPlanInput norm_plan_input(const char* op, const Tensor& x, std::initializer_list<const void*> tensors,
                              const GroupNormDims& d, bool backward, const ActChain& pre_act, const ActChain& act,
                              NormExtras extras = NormExtras::kNone);

// A tensor so large that its start has left L2 when its end is written.
bool exceeds_l2(const char* op, const Tensor& x, const GroupNormDims& d);

}  // namespace kgopt
