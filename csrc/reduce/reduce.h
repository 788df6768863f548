#pragma once

#include <cuda_runtime_api.h>

#include "reduce_params.h"

namespace kgopt {

// Sets slices and slice_length so that few long reductions fill the GPU too.
void plan_reduce(ReduceParams* p, int sm_count);
Status run_logsumexp(const ReduceParams& p, cudaStream_t stream);
Status run_mean(const ReduceParams& p, cudaStream_t stream);
Status run_logsumexp_backward(const LogsumexpBackwardParams& p, cudaStream_t stream);
Status run_mean_backward(const MeanBackwardParams& p, cudaStream_t stream);
// y[i] = x[i] for i < count, rounded to a half type.
Status run_round(const float* x, void* y, int64_t count, Dtype dtype, cudaStream_t stream);

}  // namespace kgopt
