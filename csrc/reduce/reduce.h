#pragma once

#include <cuda_runtime_api.h>

#include "reduce/reduce_params.h"
#include "reduce/reduce_plan.h"

namespace kgopt {

Status run_logsumexp(const ReduceParams& p, cudaStream_t stream);
// logsumexp over channels of u + hardswish(tanh(GroupNorm(u))) of u = x + shift, for a dense x [outer][channels][inner]
// of at most fp32. table: [outer, channels] of (mean, rstd, weight, bias), which the launch ahead may still be writing.
Status run_norm_residual_logsumexp(const ReduceParams& p, const void* table, const void* shift, Dtype shift_dtype,
                                   cudaStream_t stream);
Status run_mean(const ReduceParams& p, cudaStream_t stream);
Status run_logsumexp_backward(const ReduceBackwardParams& p, cudaStream_t stream);
Status run_mean_backward(const ReduceBackwardParams& p, cudaStream_t stream);
// y = softmax(x * scale) of each row.
Status run_scaled_softmax(const SoftmaxParams& p, cudaStream_t stream);
// Sets the blocks. False where the kernel does not take x: no whole vectors of 16 bytes, over 256 of them, or float64.
bool plan_channel_sums(ChannelSumsParams* p, int sm_count);
Status run_channel_sums(const ChannelSumsParams& p, cudaStream_t stream);
// y[i] = x[i] for i < count, rounded to a half type.
Status run_round(const float* x, void* y, int64_t count, Dtype dtype, cudaStream_t stream);

}  // namespace kgopt
