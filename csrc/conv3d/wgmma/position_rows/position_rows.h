// Launchers of the convolution with positions as rows. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "conv3d/wgmma/position_rows/params.h"

namespace kgopt {

// Weights as shared-memory images in the order in which tiles read them, and the bias in fp32.
Status run_conv_position_rows_pack(const PositionRowsPackParams& p, cudaStream_t stream);

// For fp32 accuracy: the copy of x in two parts, before the packing.
Status run_conv_position_rows_split(const PositionRowsSplitParams& p, cudaStream_t stream);

// Describes x, or its copy, for the tensor copies; strides of width, height, depth and batch in elements.
Status set_position_rows_input(PositionRowsParams* p, const void* x, int64_t n, int64_t c_in,
                               const int64_t (&strides)[4]);

Status run_conv_position_rows(const PositionRowsParams& p, cudaStream_t stream);

}  // namespace kgopt
