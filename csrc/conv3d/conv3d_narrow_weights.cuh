// Weights of the narrow kernels: their scales where they become fp16; with channels as rows, the left operand, in
// registers from start to end.
#pragma once

#include <cuda_runtime.h>

#include "../common/wgmma.cuh"
#include "conv3d_kernel.cuh"
#include "conv3d_narrow_load.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A power of two for the values of a warp, of which each thread has kCount, and what undoes it: the largest finite one
// comes below 2^5.
struct WarpScale {
  static constexpr float kUndoesZeros = 0x1p-116f;  // where all values are tiny

  float scale = 1.f, undo = 1.f;

  template <int kCount>
  __device__ __forceinline__ void fit(const float* v) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float size = fabsf(v[i]);
      most = size < INFINITY ? fmaxf(most, size) : most;
    }
    const uint32_t bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    const uint32_t exponent = min(max(bits >> 23, 15u), 254u);
    scale = __uint_as_float((258 - exponent) << 23);
    undo = __uint_as_float((exponent - 4) << 23);
  }
};

// K entry -> where its weight lies in a filter, and the one of the channel that shares its word; -1: padding.
__device__ __forceinline__ void fill_weight_table(const NarrowParams& p, int2* table, int thread, int threads) {
  const NarrowPlan& plan = p.plan;
  const int taps = plan.kernel[0] * plan.kernel[1] * plan.kernel[2];
  for (int k = thread; k < kNarrowChannelSteps * 8; k += threads) {
    const int chunk = k / 4, tap = chunk % taps, channel = (chunk / taps * 4 + k % 4) * 2;
    int2 v = make_int2(-1, -1);
    if (chunk < plan.words / 4 * taps && channel < p.c_in) {
      const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % plan.kernel[1],
                d = tap / (plan.kernel[2] * plan.kernel[1]);
      v.x = static_cast<int>(channel * p.w_stride_in + d * p.w_stride_k[0] + h * p.w_stride_k[1] + w * p.w_stride_k[2]);
      if (channel + 1 < p.c_in) v.y = v.x + static_cast<int>(p.w_stride_in);
    }
    table[k] = v;
  }
}

// A thread's fragments: of channels g and g + 8 of its warp's 16.
struct ChannelWeights {
  static constexpr int kSteps = kNarrowChannelSteps;

  uint32_t words[kSteps][4], low_words[kSteps][4];
  float unscaled[2];  // what undoes the scale of each channel

  // channels: within the block's c_valid, which begin at c_begin of the conv group.
  __device__ __forceinline__ void load(const NarrowParams& p, const int2* table, int group, int c_begin, int c_valid,
                                       const int (&channels)[2], int t) {
    // No branches and little arithmetic: all loads are under way before the first is used.
    const bool is_channel[2] = {channels[0] < c_valid, channels[1] < c_valid};
    const float* filter[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      filter[r] = static_cast<const float*>(p.weight) + group * p.w_stride_group +
                  (c_begin + min(channels[r], c_valid - 1)) * p.w_stride_out;
    }
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      const int2 at = table[i / 4 * 8 + (i >> 1 & 1) * 4 + t];
      const float* const w = filter[i & 1];
      const float first = w[max(at.x, 0)], second = w[max(at.y, 0)];
      words[i / 4][i & 3] = at.x < 0 || !is_channel[i & 1] ? 0 : __float_as_uint(first);  // the values for now
      low_words[i / 4][i & 3] = at.y < 0 || !is_channel[i & 1] ? 0 : __float_as_uint(second);
    }
    split();
  }

 private:
  // Two terms of each, scaled such that a channel's largest comes below 2^11.
  __device__ __forceinline__ void split() {
    auto larger = [](float m, uint32_t word) {
      const float v = fabsf(__uint_as_float(word));
      return v < INFINITY ? fmaxf(m, v) : m;
    };
    float most[2] = {0.f, 0.f}, scale[2];
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      most[i & 1] = larger(larger(most[i & 1], words[i / 4][i & 3]), low_words[i / 4][i & 3]);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // The lanes of a channel are four neighbours.
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(0xffffffffu, most[r], 2));
      const uint32_t exponent = min(max(__float_as_uint(most[r]) >> 23, 11u), 254u);
      scale[r] = __uint_as_float((264 - exponent) << 23);
      unscaled[r] = __uint_as_float((exponent - 10) << 23);
    }
#pragma unroll
    for (int i = 0; i < kSteps * 4; ++i) {
      uint32_t& high = words[i / 4][i & 3];
      uint32_t& low = low_words[i / 4][i & 3];
      split_half(__uint_as_float(high) * scale[i & 1], __uint_as_float(low) * scale[i & 1], &high, &low);
    }
  }
};

#endif

}  // namespace kgopt
