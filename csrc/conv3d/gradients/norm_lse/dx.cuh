// dx from the dy that a warpgroup has in registers: its weights, products, and what becomes of strips that overlap.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/dtype.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/gradients/norm_lse/params.h"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <ConvMath kMath>
inline constexpr WgmmaType kNormLseType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16 : WgmmaType::kFp16;

// Weights for dx, in the blocks of wgmma.cuh: columns are (tap, input channel), K output channels, in the order in
// which the accumulators of dy have them.
template <ConvMath kMath>
__device__ __forceinline__ void norm_lse_load_dx_weights(const FewChannelsParams& p, uint32_t* weights, float scale,
                                                         int thread) {
  using Traits = ConvMathTraits<kMath>;
  using Raw = std::conditional_t<sizeof(typename Traits::Element) == 2, unsigned short, float>;
  constexpr int kWords = norm_lse_dx_steps(kMath) * kNormLseDxColumns * 8;
#pragma unroll 3
  for (int i = thread; i < kWords; i += kNormLseThreads) {
    // As they lie there: four words of a column, eight columns, the other four words, eight columns more.
    const int word = (i >> 5 & 1) * 4 + (i & 3), at = i >> 6, block = at % (kNormLseDxColumns / 8);
    const int step = at / (kNormLseDxColumns / 8), c = i >> 2 & 7, h = block / kNormLseTaps, w = block % kNormLseTaps;
    const bool is_there = c < p.c_in && h < p.plan.kernel[1] && w < p.plan.kernel[2];
    const Raw* const from = static_cast<const Raw*>(p.weight) +
                            (is_there ? c * p.w_stride_in + h * p.w_stride_k[1] + w * p.w_stride_k[2] : 0);
    auto read = [&](int c_out) { return is_there && c_out < p.c_out ? from[c_out * p.w_stride_out] : Raw(); };
    const int c_out = step * 16 + word * 2;
    if constexpr (conv_is_scaled(kMath)) {
      uint32_t rest;
      split_half(read(c_out) * scale, read(c_out + 1) * scale, &weights[i], &rest);
      if constexpr (Traits::kSplit == 2) weights[i + kWords] = rest;
    } else {
      weights[i] = uint32_t(read(c_out)) | uint32_t(read(c_out + 1)) << 16;
    }
  }
}

// Of a lane, the two rows of dx that the next rows of dy add to.
struct NormLseCarried {
  static constexpr int kVectors = kNormLseDxRow / 4, kStep = 128 * kNormLseConsumers;
  float4* at;

  __device__ __forceinline__ NormLseCarried(uint32_t* smem, int thread)
      : at(reinterpret_cast<float4*>(smem) + thread) {}
  __device__ __forceinline__ void load(int row, float (&to)[kNormLseDxRow]) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float4 v = at[(row * kVectors + i) * kStep];
      to[i * 4] = v.x, to[i * 4 + 1] = v.y, to[i * 4 + 2] = v.z, to[i * 4 + 3] = v.w;
    }
  }
  __device__ __forceinline__ void take(int row, float (&to)[kNormLseDxRow]) const { load(row, to); }
  __device__ __forceinline__ void store(int row, const float (&v)[kNormLseDxRow]) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      at[(row * kVectors + i) * kStep] = make_float4(v[i * 4], v[i * 4 + 1], v[i * 4 + 2], v[i * 4 + 3]);
    }
  }
};

// dy of a warpgroup's 64 positions, as its accumulators lie and in the operands' type, times the weights: done becomes
// the row of dx that no later row of dy reaches, carried the two behind it.
template <ConvMath kMath>
__device__ __forceinline__ void norm_lse_dx_products(
    const uint32_t (&dy)[conv_split_factor(kMath)][kNormLseColumns / 4], uint32_t b_first, float (&done)[kNormLseDxRow],
    NormLseCarried& carried) {
  using Traits = ConvMathTraits<kMath>;
  constexpr WgmmaType kType = kNormLseType<kMath>;
  constexpr int kSteps = norm_lse_dx_steps(kMath), kBStep = kNormLseDxColumns * 8 * 4 / 16;
  uint32_t a[Traits::kSplit][kSteps][4];
#pragma unroll
  for (int i = 0; i < Traits::kSplit * kSteps * 4; ++i) {
    a[i / (kSteps * 4)][i / 4 % kSteps][i % 4] = dy[i / (kSteps * 4)][i % (kSteps * 4)];
  }
  float d[kNormLseDxColumns / 2];
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    const uint32_t b = b_first + s * kBStep;
    if constexpr (Traits::kSplit == 2) {
      wgmma<kType, kNormLseDxColumns>(d, a[1][s], b, s > 0);
      wgmma<kType, kNormLseDxColumns>(d, a[0][s], b + kSteps * kBStep, true);
    }
    wgmma<kType, kNormLseDxColumns>(d, a[0][s], b, Traits::kSplit == 2 || s > 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_use(d);
  float row[kNormLseDxRow], next[kNormLseDxRow];
  carried.load(0, done);
  carried.load(1, row);
#pragma unroll
  for (int i = 0; i < kNormLseDxRow; ++i) {
    done[i] += d[i];
    row[i] += d[kNormLseDxRow + i];
    next[i] = d[2 * kNormLseDxRow + i];
  }
  carried.store(0, row);
  carried.store(1, next);
}

// Row i of those that a strip of dy from row h0 on reaches in dx: taps of the width are added up, and the sums go to dx
// or, where other strips reach them too, to the strip's frame. w: of dy, the lane's first position. dx, frame: of the
// lane's channels where they are stored, the first row's first position. Called by whole warps.
template <typename Element>
__device__ __forceinline__ void norm_lse_put_dx(const ConvNormLseParams& q, Element* dx, float* frame, int h0, int w,
                                                int t, int i, const float (&row)[kNormLseDxRow]) {
  constexpr bool kHasOwn = sizeof(Element) == 2;
  const FewChannelsParams& p = q.conv;
  const int rows = p.plan.rows, at = w % kFewChannelsStrip;  // strips begin at multiples of their width
  // Positions `at` and at + 1 of those that the strip reaches, and what the last lanes' reach beyond.
  float v[2][2], beyond[2][2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    beyond[0][k] = row[6 + k] + row[8 + k], beyond[1][k] = row[10 + k];
    const float first = __shfl_up_sync(0xffffffffu, beyond[0][k], 4);
    const float second = __shfl_up_sync(0xffffffffu, beyond[1][k], 4);
    v[0][k] = row[k] + (at > 0 ? first : 0.f);
    v[1][k] = row[2 + k] + row[4 + k] + (at > 0 ? second : 0.f);
  }
  if (unsigned(h0 + i + p.plan.origin[1]) >= unsigned(p.in[1])) return;
  auto to_frame = [&](int place, const float (&u)[2][2]) {
    float* const to = frame + place * kNormLseDxChannels;
    *reinterpret_cast<float2*>(to) = make_float2(u[0][0], u[0][1]);
    *reinterpret_cast<float2*>(to + kNormLseDxChannels) = make_float2(u[1][0], u[1][1]);
  };
  auto to_dx = [&](int from, const float (&u)[2][2]) {
    const int place = w + from + p.plan.origin[2];
    Element* to = dx + (i * q.dx.stride[1] + from);
#pragma unroll
    for (int k = 0; k < 2; ++k, to += q.dx.stride_c) {
      const bool is_channel = t * 2 + k < p.c_in;
      if (q.dx.pairs) {
        if (!is_channel || unsigned(place) >= unsigned(p.in[2])) continue;
        if constexpr (kHasOwn) {
          const float pair[2] = {u[0][k], u[1][k]};
          store_vec(to, pack<Element>(pair));
        } else {
          *reinterpret_cast<float2*>(to) = make_float2(u[0][k], u[1][k]);
        }
      } else {
        if (is_channel && unsigned(place) < unsigned(p.in[2])) to[0] = from_acc<Element>(u[0][k]);
        if (is_channel && unsigned(place + 1) < unsigned(p.in[2])) to[1] = from_acc<Element>(u[1][k]);
      }
    }
  };
  const bool below = i >= rows && h0 + rows < p.out[1];
  [[maybe_unused]] const bool above = i < 2 && h0 > 0;
  if (below) {
    to_frame((i - rows) * kNormLseReach + at, v);
  } else if (kHasOwn && (above || (at == 0 && w > 0))) {
    to_frame(norm_lse_own_frame(rows) + (above ? i * kNormLseReach + at : kNormLseFrameColumns + i * 2), v);
  } else {
    to_dx(0, v);
  }
  if (at != kFewChannelsStrip - 2) return;
  if (below || w + 2 < p.out[2]) {
    to_frame(i >= rows ? (i - rows) * kNormLseReach + kFewChannelsStrip : kNormLseFrameColumns + i * 2, beyond);
  } else if (kHasOwn && above) {
    to_frame(norm_lse_own_frame(rows) + i * kNormLseReach + kFewChannelsStrip, beyond);
  } else {
    to_dx(2, beyond);
  }
}

#endif

// Adds up what two or four strips of dy reach of dx, always in the same order. A thread has a position with all its
// channels: first those of rows that two strips reach, then, of the other rows, those of columns.
template <typename Element>
__global__ void __launch_bounds__(kNormLseBorderThreads)
    norm_lse_dx_borders_kernel(const __grid_constant__ ConvNormLseParams q) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  constexpr int kChannels = kNormLseDxChannels;
  constexpr bool kHasOwn = sizeof(Element) == 2;
  const FewChannelsParams& p = q.conv;
  const int rows = p.plan.rows;
  const int strips_h = norm_lse_strips_h(p), strips_w = norm_lse_strips_w(p);
  const int of_rows = (strips_h - 1) * 2 * p.in[2], all = norm_lse_shared_positions(p);
  const int64_t n = blockIdx.x / p.out[0], d = blockIdx.x % p.out[0];
  const float* const frames = q.dx.frames + (n * q.dx.frame_n + d * q.dx.frame_depth) * kChannels;
  Element* const dx = static_cast<Element*>(q.dx.dx) + n * q.dx.stride_n + d * q.dx.stride[0];
  for (int i = blockIdx.y * kNormLseBorderThreads + threadIdx.x; i < all; i += gridDim.y * kNormLseBorderThreads) {
    int h, w;
    if (i < of_rows) {
      const int row = i / p.in[2];
      h = (row / 2 + 1) * rows + row % 2 + p.plan.origin[1];
      w = i % p.in[2];
    } else {
      const int rest = i - of_rows;
      h = rest / 2 / (strips_w - 1);
      w = (rest / 2 % (strips_w - 1) + 1) * kFewChannelsStrip + rest % 2 + p.plan.origin[2];
    }
    if (unsigned(h) >= unsigned(p.in[1]) || unsigned(w) >= unsigned(p.in[2])) continue;
    const int reached_h = h - p.plan.origin[1], reached_w = w - p.plan.origin[2];
    const int strip_h = min(reached_h / rows, strips_h - 1), row = reached_h - strip_h * rows;
    const int strip_w = min(reached_w / kFewChannelsStrip, strips_w - 1), at = reached_w - strip_w * kFewChannelsStrip;
    const bool above = row < 2 && strip_h > 0, left = at < 2 && strip_w > 0;
    if (above && i >= of_rows) continue;
    Element* const to = dx + h * q.dx.stride[1] + w;
    float sums[kChannels] = {};
    auto add = [&](int from_h, int from_w, int place) {
      const int strip = from_w * q.dx.frame_column + from_h * rows * q.dx.frame_row;
      const float4* const from = reinterpret_cast<const float4*>(frames + (strip + place) * kChannels);
      const float4 a = from[0], b = from[1];
      const float v[kChannels] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[c] += v[c];
    };
    if constexpr (kHasOwn) {
      add(strip_h, strip_w,
          norm_lse_own_frame(rows) + (above ? row * kNormLseReach + at : kNormLseFrameColumns + row * 2 + at));
    } else {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) sums[c] = c < p.c_in ? to_acc(to[c * q.dx.stride_c]) : 0.f;
    }
    if (left) {
      const int beyond = at + kFewChannelsStrip;
      add(strip_h, strip_w - 1,
          row >= rows ? (row - rows) * kNormLseReach + beyond : kNormLseFrameColumns + row * 2 + at);
      if (above) add(strip_h - 1, strip_w - 1, row * kNormLseReach + beyond);
    }
    if (above) add(strip_h - 1, strip_w, row * kNormLseReach + at);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      if (c < p.c_in) to[c * q.dx.stride_c] = from_acc<Element>(sums[c]);
    }
  }
#endif
}

}  // namespace kgopt
