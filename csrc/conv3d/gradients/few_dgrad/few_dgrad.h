// Launcher of the input gradient for few input channels. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/gradients/few_dgrad/params.h"

namespace kgopt {

Status run_conv_few_dgrad(const FewDgradParams& p, cudaStream_t stream);

}  // namespace kgopt
