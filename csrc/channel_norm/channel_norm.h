#pragma once

#include <cuda_runtime_api.h>

#include "channel_norm/plan.h"

namespace kgopt {

// Fills p.table.
Status run_channel_norm_table(const ChannelNormParams& p, cudaStream_t stream);
Status run_channel_norm(ChannelNormParams p, const ChannelNormPlan& plan, cudaStream_t stream);
// dx and the partial sums.
Status run_channel_norm_backward(ChannelNormParams p, const ChannelNormPlan& plan, cudaStream_t stream);
Status run_channel_norm_gradient(const ChannelNormGradientParams& p, cudaStream_t stream);

}  // namespace kgopt
