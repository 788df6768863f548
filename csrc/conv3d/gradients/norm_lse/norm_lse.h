// Launcher of the gradient through a norm and logsumexp, of convolutions with few input channels (sm_90a code only).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/gradients/norm_lse/params.h"

namespace kgopt {

// The sums of the norm's gradient for each slice, or, with the rows made of them, the convolution's.
Status run_conv_norm_lse_sums(const ConvNormLseParams& p, cudaStream_t stream);
Status run_conv_norm_lse_store(const ConvNormLseParams& p, cudaStream_t stream);
// After it, where it makes dx: the positions of dx that several strips reach.
Status run_norm_lse_dx_borders(const ConvNormLseParams& p, cudaStream_t stream);

}  // namespace kgopt
