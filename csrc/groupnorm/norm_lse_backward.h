// Backward of logsumexp over channels of r = x + hardswish(tanh(GroupNorm(x))), the end of a fused pipeline, without a
// tensor of x's size between x and dx.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm_params.h"

namespace kgopt {

struct NormLseBackwardParams : GroupNormBackwardParams {
  const void* dlse = nullptr;  // [N, S], accumulation type
  const void* lse = nullptr;   // [N, S], accumulation type
};

// From the partial sums of any of the backward kernels: the groups' terms, dweight and dbias.
Status run_group_norm_backward_merge(const GroupNormBackwardParams& p, cudaStream_t stream);

// Sets slices and slice_length.
void plan_norm_lse_backward(NormLseBackwardParams* p, int sm_count);
Status run_norm_lse_backward(const NormLseBackwardParams& p, cudaStream_t stream);

}  // namespace kgopt
