// Launchers of the convolution with taps as columns. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

// Weights as shared-memory images in the order in which tiles read them, and the bias in fp32.
Status run_conv_tap_columns_pack(const TapColumnsPackParams& p, cudaStream_t stream);

// Describes x for the tensor copies: stride_w, stride_d, stride_n in elements, rows of the height dense.
Status set_tap_columns_input(TapColumnsParams* p, const void* x, int64_t n, int64_t c_in, int64_t stride_w,
                             int64_t stride_d, int64_t stride_n);

Status run_conv_tap_columns(const TapColumnsParams& p, cudaStream_t stream);

}  // namespace kgopt
