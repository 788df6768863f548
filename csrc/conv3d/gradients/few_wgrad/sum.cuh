// Adds up what the blocks of the weight gradient leave.
#pragma once

#include <cuda_runtime.h>

#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "conv3d/gradients/few_wgrad/params.h"
#include "conv3d/gradients/few_wgrad/plan.h"

namespace kgopt {

inline constexpr int kFewWgradSumLanes = 32;   // elements of a block's partial sums, neighbours
inline constexpr int kFewWgradSumShares = 16;  // threads that share an element's partial sums

// The order of summation depends on the plan alone.
__global__ void __launch_bounds__(kFewWgradSumLanes* kFewWgradSumShares)
    conv_few_wgrad_sum_kernel(const __grid_constant__ FewWgradParams p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  wait_for_prerequisites();
  __shared__ float shares[kFewWgradSumShares][kFewWgradSumLanes];
  const FewWgradPlan& plan = p.plan;
  const int lane = threadIdx.x % 32, share = threadIdx.x / 32;
  const int floats = few_wgrad_floats(plan);
  const int piece = blockIdx.x % (floats / 32), channel_block = blockIdx.x / (floats / 32);
  const float* from = p.partials + (int64_t(channel_block) * plan.blocks + share) * floats + piece * 32 + lane;
  float sum = 0.f;
#pragma unroll 4
  for (int block = share; block < plan.blocks; block += kFewWgradSumShares) {
    sum += *from;
    from += int64_t(kFewWgradSumShares) * floats;
  }
  shares[share][lane] = sum;
  __syncthreads();
  if (share > 0) return;
#pragma unroll
  for (int i = 1; i < kFewWgradSumShares; ++i) sum += shares[i][lane];

  const int accumulators = floats / 32 / plan.splits;
  const int i = piece % accumulators, split = piece / accumulators;
  const int g = lane / 4, t = lane % 4;
  const int c_first = channel_block * few_wgrad_channels(plan) + split * plan.dy_tiles * 8;
  const int sums_at = accumulators - plan.dy_tiles;
  if (i >= sums_at) {
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int c = c_first + (i - sums_at) * 8 + g;
    if (p.dbias && t == 0 && c < p.c_out) store_as(p.dbias, c, p.dtype, sum);
    return;
  }
  const int b_tiles = plan.dy_is_a ? plan.x_tiles : plan.dy_tiles;
  const int kw = i / 4 % kFewWgradTaps, b = i / 4 / kFewWgradTaps % b_tiles, a = i / 4 / kFewWgradTaps / b_tiles;
  const int in_a = a * 16 + g + i % 4 / 2 * 8, in_b = b * 8 + 2 * t + i % 2;
  const int row = plan.dy_is_a ? in_b : in_a, c_out = c_first + (plan.dy_is_a ? in_a : in_b);
  if (!p.dw || row >= plan.rows || c_out >= p.c_out || kw >= plan.kernel[2]) return;
  const int kh = row % plan.kernel[1], kd = row / plan.kernel[1] % plan.kernel[0];
  const int c = row / (plan.kernel[1] * plan.kernel[0]);
  const int64_t at = c_out * p.dw_stride_out + c * p.dw_stride_in + kd * p.dw_stride_k[0] + kh * p.dw_stride_k[1] +
                     kw * p.dw_stride_k[2];
  store_as(p.dw, at, p.dtype, sum);
#endif
}

}  // namespace kgopt
