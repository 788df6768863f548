#pragma once

#include <cuda_runtime_api.h>

#include "pointwise_params.h"

namespace kgopt {

Status run_bias_residual(const BiasResidualParams& p, cudaStream_t stream);
Status run_upsample_linear(const UpsampleLinearParams& p, cudaStream_t stream);
Status run_upsample_linear_backward(const UpsampleLinearBackwardParams& p, cudaStream_t stream);
Status run_upsample_nearest(const UpsampleNearestParams& p, cudaStream_t stream);
Status run_max_pool(const MaxPoolParams& p, cudaStream_t stream);

}  // namespace kgopt
