// Launcher of both gradients for few input channels behind a norm and a mean. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/gradients/few_march/params.h"

namespace kgopt {

// dx, dw and, where wanted, dbias; partials of plan.partial_floats.
Status run_conv_few_march(const FewMarchParams& p, cudaStream_t stream);

}  // namespace kgopt
