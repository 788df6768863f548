#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/norm_conv/plan.h"
#include "pointwise/pointwise_params.h"

namespace kgopt {

Status run_bias_residual(const BiasResidualParams& p, cudaStream_t stream);
Status run_norm_conv1x1(const NormConv1x1Params& p, cudaStream_t stream);
// Why the kernel cannot run it; null when it can.
const char* norm_conv_few_refusal(const NormConvFewParams& p);
int64_t norm_conv_few_packed_bytes(const NormConvFewParams& p);
Status run_norm_conv_few(const NormConvFewParams& p, cudaStream_t stream);
Status run_upsample_linear(const UpsampleLinearParams& p, cudaStream_t stream);
Status run_upsample_linear_backward(const UpsampleLinearBackwardParams& p, cudaStream_t stream);
Status run_upsample_nearest(const UpsampleNearestParams& p, cudaStream_t stream);
Status run_pad_replicate(const PadReplicateParams& p, cudaStream_t stream);
Status run_max_pool(const MaxPoolParams& p, cudaStream_t stream);
Status run_upsample_conv_weight(const UpsampleConvWeightParams& p, cudaStream_t stream);

}  // namespace kgopt
