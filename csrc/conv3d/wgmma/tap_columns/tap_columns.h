// Launchers of the Hopper convolution. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

// Weights as shared-memory images in the order in which tiles read them, and the bias in fp32.
Status run_conv_hopper_pack(const HopperPackParams& p, cudaStream_t stream);

// Describes x for the tensor copies: stride_w, stride_d, stride_n in elements, rows of the height dense.
Status set_hopper_input(HopperParams* p, const void* x, int64_t n, int64_t c_in, int64_t stride_w, int64_t stride_d,
                        int64_t stride_n);

Status run_conv_hopper(const HopperParams& p, cudaStream_t stream);

}  // namespace kgopt
