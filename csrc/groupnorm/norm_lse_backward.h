// Backward of logsumexp over channels of r = x + hardswish(tanh(GroupNorm(x))), the end of a fused pipeline, without a
// tensor of x's size between x and dx.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm_params.h"

namespace kgopt {

struct NormLseBackwardParams : GroupNormBackwardParams {
  const void* dlse = nullptr;  // [N, S], accumulation type
  const void* lse = nullptr;   // [N, S], accumulation type
  void* shares = nullptr;      // [N, S], accumulation type, scratch
  // channels_last: how a sample's positions are cut in the pass that fills it
  int64_t share_slices = 1, share_slice_length = 0;
};

// From the partial sums of any of the backward kernels: the groups' terms, dweight and dbias.
Status run_group_norm_backward_merge(const GroupNormBackwardParams& p, cudaStream_t stream);

// Sets slices, slice_length and those of the shares.
void plan_norm_lse_backward(NormLseBackwardParams* p, int sm_count);
Status run_norm_lse_backward(const NormLseBackwardParams& p, cudaStream_t stream);

}  // namespace kgopt
