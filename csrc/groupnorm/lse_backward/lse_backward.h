// Backward of logsumexp over channels of r = x + hardswish(tanh(GroupNorm(x))), the end of a fused pipeline, without a
// tensor of x's size between x and dx.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm/lse_backward/plan.h"
#include "groupnorm/params.h"

namespace kgopt {

struct NormLseBackwardParams : GroupNormPassesBwdParams {
  const void* dlse = nullptr;  // [N, S], accumulation type
  void* shares = nullptr;      // [N, S], accumulation type, scratch
  void* shifts = nullptr;      // the same
  NormLseBackwardPlan plan;    // slices and slice_length above are its
};

Status run_norm_lse_backward(const NormLseBackwardParams& p, cudaStream_t stream);

}  // namespace kgopt
