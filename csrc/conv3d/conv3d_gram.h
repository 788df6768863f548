// Launcher of the kernel that takes a convolution's statistics from the Gram matrix of its input (sm_90a code only).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d_gram_params.h"

namespace kgopt {

// Per-channel statistics of conv(x) + bias, see NarrowStats; nothing else is stored.
Status run_conv_gram_stats(const GramParams& p, int64_t n, cudaStream_t stream);

}  // namespace kgopt
