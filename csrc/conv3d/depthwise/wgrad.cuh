// The gradient of the weight: sums over positions. A block has some channels, one tap of the depth or a few, and a
// share of the tiles of all planes and samples; a thread has some columns of a row of `still` and keeps the sums of all
// taps. With a few taps of the depth it marches along that and keeps what they need of `still`. Blocks leave partial
// sums, which conv_depthwise_sum_kernel adds in a fixed order.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/depthwise/tile.cuh"

namespace kgopt {

template <int kLanes, int kStride, int kK, int kTaps>
struct DepthwiseWgrad {
  static constexpr int kColumns = depthwise_wgrad_columns(kK, kStride, kTaps), kWindow = (kColumns - 1) * kStride + kK;
  static constexpr int kBatch = kTaps > 1 && kK == 5 ? 2 : 4;  // pieces on their way, as many as registers allow

  static __device__ __forceinline__ void run(const DepthwiseWgradParams& p, float* shared) {
    const DepthwiseWgradPlan& plan = p.plan;
    const int size = p.dtype == Dtype::kFloat32 ? 4 : 2;
    const int planes = plan.moved.planes, channels = kLanes > 1 ? kLanes : planes;
    // Taps of the depth run together: they read the same planes.
    const int of_depth = blockIdx.x % plan.depth, channel = int(blockIdx.x / plan.depth) * channels;
    const int kd = kTaps > 1 ? depthwise_wgrad_first_tap(of_depth, kStride, kTaps) : of_depth;
    const DepthwiseThread t = depthwise_thread<kLanes>(threadIdx.x, plan.rows, planes, plan.groups);
    float* const still = shared + plan.smem_still;
    const int moved_row = plan.moved.pitch * kLanes;
    const float* const own_moved = shared + t.plane * plan.moved.plane + t.row * moved_row +
                                   (plan.moved.slack + t.group * kColumns * kStride) * kLanes + t.lane;
    const float* const own_still = still + t.plane * plan.still.plane + t.row * plan.still.pitch * kLanes +
                                   (plan.still.slack + t.group * kColumns) * kLanes + t.lane;
    DepthwisePlace of_still, of_moved;
    of_still.channels = of_moved.channels = min(p.channels - channel, channels);
    of_still.stride_c = p.still_stride_c;
    of_moved.stride_c = p.moved_stride_c;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      of_still.stride[i] = p.still_stride[i], of_still.size[i] = p.size[i];
      of_moved.stride[i] = p.moved_stride[i], of_moved.size[i] = p.moved_size[i];
    }
    float sums[kTaps][kK][kK], y[kTaps][kColumns];
#pragma unroll
    for (int g = 0; g < kTaps; ++g) {
#pragma unroll
      for (int i = 0; i < kK * kK; ++i) sums[g][i / kK][i % kK] = 0.f;
    }

    const int64_t begin = plan.items * blockIdx.y / plan.splits, end = plan.items * (blockIdx.y + 1) / plan.splits;
    for (int item = static_cast<int>(begin); item < static_cast<int>(end); ++item) {
      unsigned rest = item;
      const auto take = [&](int count) {
        const unsigned next = rest / count, index = rest - next * count;
        rest = next;
        return static_cast<int>(index);
      };
      const int tile_w = take(plan.tiles[1]), tile_h = take(plan.tiles[0]), segment = take(plan.segments);
      const int64_t n = rest;
      of_still.row = tile_h * plan.rows;
      of_still.column = tile_w * plan.groups * kColumns;
      of_moved.row = of_still.row * kStride - p.padding[1];
      of_moved.column = of_still.column * kStride - p.padding[2];
      of_still.from = static_cast<const char*>(p.still) + (n * p.still_stride_n + channel * p.still_stride_c) * size;
      of_moved.from = static_cast<const char*>(p.moved) + (n * p.moved_stride_n + channel * p.moved_stride_c) * size;
      const DepthwiseCopy<kLanes, kStride, 1> moved_copy(plan.moved, of_moved, p.dtype, p.moved_log2);
      const DepthwiseCopy<kLanes, 1, 1> still_copy(plan.still, of_still, p.dtype, p.still_log2);
      // Of the planes of `still` that meet the newest one of `moved`, the newest first.
#pragma unroll
      for (int i = 0; i < kTaps * kColumns; ++i) y[i / kColumns][i % kColumns] = 0.f;
      const int first = segment * plan.segment, behind = min(first + plan.segment, p.size[0]);
      for (int d = first; d < behind + kTaps - 1; ++d) {
        of_still.depth = d;
        of_moved.depth = d * p.stride[0] - p.padding[0] + kd;
        const bool reached = of_moved.depth >= 0 && of_moved.depth < p.moved_size[0];
        if (kTaps == 1 && !reached) continue;
        __syncthreads();
        if (reached) moved_copy.template all<kBatch>(shared, threadIdx.x, blockDim.x);
        if (d < behind) still_copy.template all<2>(still, threadIdx.x, blockDim.x);
        __syncthreads();
        if (!t.active) continue;
#pragma unroll
        for (int g = kTaps - 1; g >= 0; --g) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            y[g][c] = g > 0 ? y[g > 0 ? g - 1 : 0][c] : d < behind ? own_still[c * kLanes] : 0.f;
          }
        }
        if (!reached) continue;
#pragma unroll
        for (int kh = 0; kh < kK; ++kh) {
          const float* const row = own_moved + ((kh % kStride) * plan.moved.step + kh / kStride) * moved_row;
          float x[kWindow];
#pragma unroll
          for (int i = 0; i < kWindow; ++i) x[i] = row[i * kLanes];
#pragma unroll
          for (int g = 0; g < kTaps; ++g) {
            // Not 0 times NaN.
            if (kTaps > 1 && (d - g < first || d - g >= behind || kd + g * kStride >= kK)) continue;
#pragma unroll
            for (int c = 0; c < kColumns; ++c) {
#pragma unroll
              for (int kw = 0; kw < kK; ++kw) sums[g][kh][kw] += y[g][c] * x[c * kStride + kw];
            }
          }
        }
      }
    }

    // Of every thread to shared memory; a warp adds those of one channel and tap.
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int units = plan.rows * plan.groups;  // threads of a channel
    constexpr int kAll = kTaps * kK * kK;
    float* const partials = p.partials + int64_t(blockIdx.y) * plan.weights;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      shared[i * blockDim.x + threadIdx.x] = sums[i / (kK * kK)][i / kK % kK][i % kK];
    }
    __syncthreads();
    for (int i = warp; i < of_still.channels * kAll; i += warps) {
      const int c = i / kAll, tap = i - c * kAll, tap_d = kd + tap / (kK * kK) * kStride;
      if (kTaps > 1 && tap_d >= kK) continue;
      float sum = 0.f;
      for (int unit = lane; unit < units; unit += 32) {
        const int group = unit / plan.rows, row = unit - group * plan.rows;
        const int thread = kLanes > 1 ? unit * kLanes + c : (group * planes + c) * plan.rows + row;
        sum += shared[tap * blockDim.x + thread];
      }
      sum = warp_sum(sum);
      if (lane == 0) {
        partials[(int64_t(channel + c) * p.kernel[0] + tap_d) * (kK * kK) + tap % (kK * kK)] = sum;
      }
    }
  }
};

template <int kLanes, int kStride, int kK, int kTaps>
__global__ void __launch_bounds__(kDepthwiseThreads, 2)
    conv_depthwise_wgrad_kernel(const __grid_constant__ DepthwiseWgradParams p) {
  extern __shared__ __align__(16) float depthwise_shared[];
  let_dependents_start();  // another phase, whose partial sums are its own, or the sum, which waits
  DepthwiseWgrad<kLanes, kStride, kK, kTaps>::run(p, depthwise_shared);
  wait_for_prerequisites();  // the phases ahead have ended when this one has
}

// A warp a weight, in a fixed order.
__global__ void __launch_bounds__(kDepthwiseThreads)
    conv_depthwise_sum_kernel(const __grid_constant__ DepthwiseWgradParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t i = int64_t(blockIdx.x) * (kDepthwiseThreads / 32) + threadIdx.x / 32;
  wait_for_prerequisites();
  let_dependents_start();
  if (i >= p.plan.weights) return;
  const int splits = p.plan.splits * p.plan.phases[0] * p.plan.phases[1] * p.plan.phases[2];
  float sum = 0.f;
  for (int split = lane; split < splits; split += 32) sum += p.partials[int64_t(split) * p.plan.weights + i];
  sum = warp_sum(sum);
  if (lane != 0) return;
  const int taps = p.kernel[0] * p.kernel[1] * p.kernel[2], tap = static_cast<int>(i % taps);
  const int channel = static_cast<int>(i / taps);
  const int kw = tap % p.kernel[2], kh = tap / p.kernel[2] % p.kernel[1], kd = tap / p.kernel[2] / p.kernel[1];
  store_as(p.dw, channel * p.dw_stride_c + kd * p.dw_stride_k[0] + kh * p.dw_stride_k[1] + kw * p.dw_stride_k[2],
           p.dw_dtype, sum);
}

}  // namespace kgopt
