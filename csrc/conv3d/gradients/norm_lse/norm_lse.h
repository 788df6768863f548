// Launcher of the gradient through a norm and logsumexp, of convolutions with few input channels (sm_90a code only).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/gradients/norm_lse/params.h"

namespace kgopt {

// The sums of the norm's gradient for each slice, and each position's share.
Status run_conv_norm_lse_sums(const ConvNormLseParams& p, cudaStream_t stream);
// With the rows made of them: the gradient of the convolution's output; or dx and what dweight is added up from.
Status run_conv_norm_lse_store(const ConvNormLseParams& p, cudaStream_t stream);
Status run_conv_norm_lse_gradients(const ConvNormLseParams& p, cudaStream_t stream);
// After those: the positions of dx that several strips reach, and dweight with dbias.
Status run_norm_lse_dx_borders(const ConvNormLseParams& p, cudaStream_t stream);
Status run_norm_lse_dweight(const ConvNormLseParams& p, cudaStream_t stream);

}  // namespace kgopt
