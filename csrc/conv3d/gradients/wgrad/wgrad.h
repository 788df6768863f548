// Launchers of the weight gradient. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include "conv3d/gradients/wgrad/params.h"

namespace kgopt {

// One of the two tensors: strides in elements, channels dense.
struct WgradTensor {
  const void* data;
  int64_t n, c;
  int64_t size[3];
  int64_t stride_n, stride[3];
};
Status set_wgrad_tensors(WgradParams* p, const WgradTensor& still, const WgradTensor& moved);

Status run_conv_wgrad(const WgradParams& p, cudaStream_t stream);

// Adds up the partial sums.
Status run_conv_wgrad_sum(const WgradSumParams& p, cudaStream_t stream);

}  // namespace kgopt
