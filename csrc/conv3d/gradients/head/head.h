// Launchers of the gradients of a 1 x 1 convolution to a few channels. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/gradients/head/params.h"

namespace kgopt {

Status run_conv_head_dgrad(const HeadParams& p, cudaStream_t stream);
Status run_conv_head_wgrad(const HeadParams& p, cudaStream_t stream);

}  // namespace kgopt
