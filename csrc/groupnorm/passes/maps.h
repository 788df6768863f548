// GroupNorm times a map plus a map, where x's statistics are known.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm/params.h"

namespace kgopt {

// y = act(((x - mean) * rstd * weight + bias) * scale + shift), scale and shift at the position that x's is a part of.
struct MapsParams {
  const void* x = nullptr;
  void* y = nullptr;
  const void* table = nullptr;  // [n, c] of (mean, rstd, weight, bias)
  const void* scale = nullptr;  // [n, c, in...] of x's type and layout, as is shift
  const void* shift = nullptr;
  GroupNormDims dims;
  int64_t out[3] = {1, 1, 1}, in[3] = {1, 1, 1};  // depth, height, width of x and of the maps, which divide x's
  ActChain act;
};

Status run_group_norm_maps(const MapsParams& p, cudaStream_t stream);

}  // namespace kgopt
