// Launchers of scaled_half.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "common/status.h"
#include "conv3d/norm_conv/scaled_half_params.h"

namespace kgopt {

// In this order, with moments_table_cuda behind the first where there is a norm: ranges, then inputs and their scales,
// then weights, which need the scales.
int64_t scaled_half_partial_bytes(const ScaledHalfParams& p);
Status run_channel_ranges(const ScaledHalfParams& p, cudaStream_t stream);
Status run_scaled_inputs(const ScaledHalfParams& p, cudaStream_t stream);

// Of a contiguous x, which is rounded elsewhere: the largest finite magnitudes of its channels, and with these the
// weights. `early`: they may be made beside the kernel ahead, if that does not write `largest`.
Status run_channel_magnitudes(const ScaledHalfParams& p, uint32_t* largest, cudaStream_t stream);
Status run_scaled_weights(const ScaledHalfParams& p, bool early, cudaStream_t stream);
// For the gradient of inputs.
Status run_scaled_weights_by_input(const ScaledHalfParams& p, cudaStream_t stream);

}  // namespace kgopt
