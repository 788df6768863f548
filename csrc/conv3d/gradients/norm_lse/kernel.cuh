// With y the convolution's output, xhat = (y - mean) rstd, t = tanh(xhat weight + bias), r = y + t (t + 3) / 6:
//   p  = dlse exp(r) / sum_channels exp(r)                        the gradient of r
//   dz = p (1 - t^2) (t / 3 + 1/2)
//   dy = p + rstd (weight dz - (sum_group weight dz + xhat sum_group weight dz xhat) / m)
// Two passes over x compute y alike, in registers: the first adds up dz and dz xhat, and leaves each position's share
// of its exponentials. The second multiplies dy for dx and dweight where the plan is one for it, else it stores dy. y
// itself is never stored, so that neither pass reads more than x and some words of a position.
//
// Products and their operands are those of conv3d/few_channels/gather/kernel.cuh: rows are positions, columns all the
// channels, so that what belongs to a position stays within four lanes. Of a strip a lane has neighbouring positions,
// 2 g and 2 g + 1, which it stores together.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dependent_launch.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/few_channels/weights.cuh"
#include "conv3d/gradients/norm_lse/dweight.cuh"
#include "conv3d/gradients/norm_lse/params.h"
#include "conv3d/gradients/scale.cuh"
#include "conv3d/implicit_gemm/kernel.cuh"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <ConvMath kMath>
inline constexpr WgmmaType kNormLseType = kMath == ConvMath::kBf16 ? WgmmaType::kBf16 : WgmmaType::kFp16;

// f(place, weight, the next input channel's weight) for each word of the right operand that makes y of scaled values;
// zeros where it is padding.
template <typename F>
__device__ __forceinline__ void norm_lse_weight_words(const FewChannelsParams& p, int thread, const F& f) {
  const FewChannelsPlan& plan = p.plan;
#pragma unroll 2
  for (int i = thread; i < plan.k_steps * 8 * kNormLseColumns; i += kNormLseThreads) {
    // As they lie there: four words of a column, eight columns, the other four words, eight columns more.
    const int c_out = (i >> 6) % (kNormLseColumns / 8) * 8 + (i >> 2 & 7);
    const int k = i / (8 * kNormLseColumns) * 8 + (i >> 5 & 1) * 4 + (i & 3);
    const int c_in = k % plan.words * 2, tap = k / plan.words, w = tap % plan.kernel[2];
    const int h = tap / plan.kernel[2] % plan.kernel[1], d = tap / (plan.kernel[2] * plan.kernel[1]);
    const bool is_there = c_out < p.c_out && c_in < p.c_in && d < plan.kernel[0];
    const float* const from = static_cast<const float*>(p.weight) + c_out * p.w_stride_out + c_in * p.w_stride_in +
                              d * p.w_stride_k[0] + h * p.w_stride_k[1] + w * p.w_stride_k[2];
    const float first = is_there ? from[0] : 0.f;
    f(i, first, is_there && c_in + 1 < p.c_in ? from[p.w_stride_in] : 0.f);
  }
}
__device__ __forceinline__ float norm_lse_weight_size(const FewChannelsParams& p, int thread) {
  float size = 0.f;
  norm_lse_weight_words(p, thread, [&](int, float a, float b) {
    const float larger = fmaxf(fabsf(a), fabsf(b));
    if (larger < INFINITY) size = fmaxf(size, larger);
  });
  return size;
}
template <bool kTwo>
__device__ __forceinline__ void norm_lse_load_scaled_weights(const FewChannelsParams& p, uint32_t* weights, float scale,
                                                             int thread) {
  uint32_t* const low = weights + p.plan.k_steps * 8 * kNormLseColumns;
  norm_lse_weight_words(p, thread, [&](int i, float a, float b) {
    uint32_t rest;
    split_half(a * scale, b * scale, &weights[i], &rest);
    if (kTwo) low[i] = rest;
  });
}

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

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Of fp32 values as fp16, powers of two that values are multiplied by. x: of the sample, 0 where each tile
// has its own; dlse: no scale, but the largest one's size.
struct NormLseScales {
  float weight = 1.f, x = 0.f, dy = 1.f, dlse = 0.f;
};
// From what the first pass left of its slices. Called by the whole block; a barrier must come behind it.
__device__ __forceinline__ void norm_lse_sample_scales(const ConvNormLseParams& q, int64_t n, uint32_t* scratch,
                                                       NormLseScales* scales) {
  const float2* const sizes = static_cast<const float2*>(q.sizes) + n * q.norm.slices;
  float2 largest = make_float2(0.f, 0.f);
  for (int64_t i = threadIdx.x; i < q.norm.slices; i += kNormLseThreads) {
    const float2 v = sizes[i];
    largest = make_float2(fmaxf(largest.x, v.x), fmaxf(largest.y, v.y));
  }
  __syncthreads();
  const uint32_t undo = block_size<kNormLseThreads / 32>(largest.x, scratch);
  __syncthreads();
  scales->dlse = __uint_as_float(block_size<kNormLseThreads / 32>(largest.y, scratch));
  scales->x = __uint_as_float((254u << 23) - undo);  // one over a power of two
}
// Of a channel: a normalized value is at most the root of its group's size, and what follows tanh has a slope below
// 0.6.
__device__ __forceinline__ float norm_lse_dy_bound(const ConvNormLseParams& q, const GradientRow<float>& of_dy,
                                                   float dlse) {
  const FewChannelsParams& p = q.conv;
  const float count = float(p.c_out) * float(p.out[0]) * float(p.out[1]) * float(p.out[2]), rstd = of_dy.affine.rstd;
  return dlse * (1.f + 0.6f * fabsf(rstd * of_dy.affine.weight)) +
         rstd * (fabsf(of_dy.term) + (sqrtf(count) + 64.f) * fabsf(of_dy.term_xhat));
}

// tanh of z, or within 2e-7 of it, of twice z in powers of 2.
template <bool kCoarse>
__device__ __forceinline__ float norm_lse_tanh(float z) {
  return kCoarse ? tanh_approx(z) : fmaf(-2.f, rcp_approx(1.f + exp2_approx(z)), 1.f);
}
// exp(r), of y less the shift in powers of 2.
__device__ __forceinline__ float norm_lse_exponential(float y, float th) {
  constexpr float kLog2E = 1.44269504088896340736f;
  return exp2_approx(fmaf(th, fmaf(th, kLog2E / 6, kLog2E / 2), y));
}

#endif

template <ConvMath kMath, bool kLargeBatch, NormLsePass kPass>
__global__ void __launch_bounds__(kNormLseThreads, 1)
    conv_norm_lse_kernel(const __grid_constant__ ConvNormLseParams q) {
#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Element = typename ConvMathTraits<kMath>::Element;
  constexpr int kColumns = kNormLseColumns, kProducers = kNormLseProducers, kConsumers = kNormLseConsumers;
  constexpr float kLog2E = 1.44269504088896340736f;
  constexpr bool kSums = kPass == NormLsePass::kSums, kStore = kPass == NormLsePass::kStore;
  constexpr bool kMakesDweight = kPass == NormLsePass::kGradients;
  // TF32 and half types round y by more than the approximation is off.
  constexpr bool kCoarse = ConvMathTraits<kMath>::kSplit == 1;
  constexpr int kLoaders = 128 * kProducers, kWarps = kConsumers * 4, kThreads = kNormLseThreads;
  constexpr int kSplit = ConvMathTraits<kMath>::kSplit, kBatch = few_channels_batch(kMath, 1, kLargeBatch);
  constexpr bool kScaled = conv_is_scaled(kMath), kTerms = kMath == ConvMath::kFp16x3;
  constexpr WgmmaType kType = kNormLseType<kMath>;
  static_assert(kWarps * (kColumns * 2 + 1) + kColumns * 4 <= kColumns * 3 * kWarps, "scratch is that of moments");
  extern __shared__ __align__(128) uint32_t smem[];
  const FewChannelsParams& p = q.conv;
  const FewChannelsPlan& plan = p.plan;
  const FewChannelsSmemLayout layout = few_channels_smem_layout(plan);
  uint64_t* const full = reinterpret_cast<uint64_t*>(smem + layout.barriers);
  uint64_t* const empty = full + 4;
  uint32_t* const weights = smem + layout.weights;
  int* const offsets = reinterpret_cast<int*>(smem + layout.offsets);
  [[maybe_unused]] uint32_t* const scales_scratch = smem + layout.scratch;
  int2* const strip_table = reinterpret_cast<int2*>(smem + layout.strips);
  float* const scratch = reinterpret_cast<float*>(smem + layout.scratch);
  // Of a column: bias in powers of 2, scale and offset that make of its products z (or twice z in powers of 2), and
  // what centers them or, of the second pass, half of rstd weight.
  float4* const forward_table = reinterpret_cast<float4*>(smem + layout.columns);
  // Factor and offset that make of its products dy's part without the position's share, and rstd.
  float4* const backward_table = reinterpret_cast<float4*>(scratch + kWarps * kColumns * 2);
  uint32_t* const halo = smem + layout.halo;
  const int stage_words = few_channels_stage_words(plan);
  const int tid = threadIdx.x;
  const int64_t n = blockIdx.x / plan.slices, slice = blockIdx.x % plan.slices;

  // K entry -> byte offset in the halo. Padded entries point at the plane of zeros: a zero weight alone would turn an
  // infinite input into a NaN. Of scaled values, where an infinite one gives that anyway, they repeat the last.
  for (int entry = tid * 4; entry < plan.k_steps * 8; entry += kThreads * 4) {
    const int i = kScaled ? min(entry, plan.k_words - 4) : entry;
    int offset = few_channels_planes(plan) * plan.plane;
    if (i < plan.k_words) {
      const int word = i % plan.words, tap = i / plan.words;
      const int w = tap % plan.kernel[2], h = tap / plan.kernel[2] % plan.kernel[1];
      const int d = tap / (plan.kernel[2] * plan.kernel[1]);
      offset = word / 4 * plan.plane +
               ((d * plan.dilation[0] * plan.halo[1] + h * plan.dilation[1]) * plan.pitch + w * plan.dilation[2]) * 4;
    }
    offsets[(entry >> 2 & 1) * plan.k_steps + entry / 8] = offset * 4;
  }
  [[maybe_unused]] NormLseScales scales;
  if constexpr (kScaled) {
    scales.weight = scale_of_size(block_size<kThreads / 32>(norm_lse_weight_size(p, tid), scales_scratch));
    norm_lse_load_scaled_weights<kTerms>(p, weights, scales.weight, tid);
    if constexpr (kMakesDweight) {
      norm_lse_sample_scales(q, n, scales_scratch, &scales);
    }
  } else {
    few_channels_weight_table<kMath, kColumns, 1>(p, reinterpret_cast<int2*>(halo), tid, kThreads);
    __syncthreads();
    few_channels_load_weights<kMath, kColumns, 1>(p, reinterpret_cast<const int2*>(halo), 0, 0, p.c_out, weights, tid,
                                                  kThreads);
  }
  __syncthreads();  // the halo's space is free again, and scratch
  for (int i = tid; i < plan.strips; i += kThreads) {
    const int per_row = plan.tile[2] / kFewChannelsStrip;
    const int w = i % per_row * kFewChannelsStrip, h = i / per_row % plan.segments * plan.rows;
    const int d = i / (per_row * plan.segments);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w * plan.step[2];
    strip_table[i] = make_int2(base * 16, d << 24 | h << 14 | w);
  }
  [[maybe_unused]] float bound = 0.f;  // of dy in this thread's column
  for (int c = tid; c < kColumns; c += kThreads) {
    // A padded column's exponential is 0.
    float4 forward = make_float4(-INFINITY, 0.f, 0.f, 0.f), backward = make_float4(0.f, 0.f, 0.f, 0.f);
    if (c < p.c_out) {
      AffineRow<float> row;
      const float bias = p.bias ? to_acc(static_cast<const Element*>(p.bias)[c]) : 0.f;
      if constexpr (!kSums) {
        const GradientRow<float> of_dy = static_cast<const GradientRow<float>*>(q.norm.rows)[n * p.c_out + c];
        row = of_dy.affine;
        backward.x = -row.rstd * (row.rstd * of_dy.term_xhat);
        backward.y = fmaf(bias - row.mean, backward.x, -row.rstd * of_dy.term);
        if constexpr (kScaled && kMakesDweight) bound = norm_lse_dy_bound(q, of_dy, scales.dlse);
      } else {
        row = make_affine_row<float>(q.norm.affine, n, c);
      }
      const float scale = row.rstd * row.weight, unit = kCoarse ? 1.f : 2 * kLog2E;
      backward.w = row.rstd;
      forward = make_float4(bias * kLog2E, scale * unit, fmaf(bias - row.mean, scale, row.bias) * unit,
                            kSums ? bias - row.mean : scale * 0.5f);
    }
    forward_table[c] = forward, backward_table[c] = backward;
  }
  if constexpr (kScaled && kMakesDweight) {
    scales.dy = scale_of_size(block_size<kThreads / 32>(bound, scales_scratch));
    if (tid < kColumns) backward_table[tid].x *= scales.dy, backward_table[tid].y *= scales.dy;
  }
  few_channels_prepare_stages(plan, layout, smem, kThreads, kLoaders, kWarps);
  [[maybe_unused]] const bool makes_dx = kMakesDweight && q.dx.dx != nullptr;
  [[maybe_unused]] uint32_t* const dx_weights = smem + norm_lse_dx_smem(plan) / 4;
  [[maybe_unused]] uint32_t* const ones = dx_weights + norm_lse_dx_bytes(kMath) / 4;
  if constexpr (kMakesDweight) {
    if (makes_dx) norm_lse_load_dx_weights<kMath>(p, dx_weights, scales.weight, tid);
    using Operand = std::conditional_t<kScaled, __half, Element>;
    const float pair[2] = {1.f, 1.f};
    const Vec<Operand, 2> packed = pack<Operand>(pair);
    if (tid < kNormLseOnesBytes / 4) ones[tid] = *reinterpret_cast<const uint32_t*>(&packed);
  }
  wgmma_fence_shared();  // the weights
  __syncthreads();

  int tile_count;
  TileCursor cursor = few_channels_tiles(plan, slice, &tile_count);
  const int tiles_w = static_cast<int>(plan.tiles[2]), tiles_h = static_cast<int>(plan.tiles[1]);
  if (tid < kLoaders) {
    if constexpr (kMakesDweight && !kScaled) {  // sums take more of them
      set_registers<32, false>();
    } else {
      share_registers<kProducers, kConsumers, false>();
    }
    // Products for dweight read the halo itself.
    few_channels_load_tiles<kMath, true, kProducers, kMakesDweight>(p, layout, smem, n, 0, cursor, tile_count,
                                                                    scales.x);
    if constexpr (kMakesDweight) {  // those around the sums
      __syncthreads();
      __syncthreads();
    }
  } else {
    if constexpr (kMakesDweight && !kScaled) {
      set_registers<160, true>();
    } else {
      share_registers<kProducers, kConsumers, true>();
    }
    const int lane = tid & 31, warp = tid / 32 - kLoaders / 32, g = lane >> 2, t = lane & 3;
    const int jobs = (plan.strips + 3) / 4;
    uint32_t b_first = wgmma_b_descriptor(shared_address(weights));
    asm volatile("" : "+r"(b_first));  // else it would be computed again for each product
    constexpr int kBStep = kColumns * 8 * 4 / 16;
    // ldmatrix takes the address of row `lane` % 16 of the first four words (lanes below 16) and the last four; row g
    // is position 2 g, and row g + 8 the next one.
    const int lane_bytes = ((lane & 7) * 2 + (lane >> 3 & 1)) * plan.step[2] * 16;
    const int* const own_offsets = offsets + (lane >> 4) * plan.k_steps;
    const int base_step = plan.step[1] * plan.pitch * 16;
    const int64_t positions = int64_t(p.out[0]) * p.out[1] * p.out[2];
    [[maybe_unused]] const float* const dlse = q.dlse + n * positions;
    float2* const shares = reinterpret_cast<float2*>(q.shares) + n * positions;
    [[maybe_unused]] Element* const dx = static_cast<Element*>(q.dx.dx) + n * q.dx.stride_n;
    [[maybe_unused]] float* const frames = q.dx.frames + n * q.dx.frame_n * kNormLseDxChannels;

    [[maybe_unused]] float sums[kSums ? 16 : 1][2] = {};
    // Of the two rows of dx that the next rows of dy add to.
    [[maybe_unused]] NormLseCarried carried(dx_weights + norm_lse_dx_weight_bytes(kMath) / 4, tid - kLoaders);
    [[maybe_unused]] uint32_t dx_first = wgmma_b_descriptor(shared_address(dx_weights));
    if constexpr (kMakesDweight) asm volatile("" : "+r"(dx_first));
    using Dweight = NormLseDweightSums<kMakesDweight ? kMath : ConvMath::kBf16>;
    [[maybe_unused]] Dweight dweight;
    [[maybe_unused]] const uint32_t operands =
        shared_address(ones) + kNormLseOnesBytes + warp / 4 * norm_lse_operand_bytes(kMath);
    [[maybe_unused]] float shift[2] = {0.f, 0.f};
    // Of scaled values: what undoes the scale of a stage's y, and of dx; the largest of the stages' scales and of dlse.
    [[maybe_unused]] const float* const undo_scales =
        reinterpret_cast<const float*>(smem + layout.barriers + kFewChannelsScales);
    [[maybe_unused]] const float undo_weight = 1.f / scales.weight, undo_dx = 1.f / scales.dy * undo_weight;
    [[maybe_unused]] const uint32_t low_bytes = few_channels_planes(plan) * plan.plane * 4;
    [[maybe_unused]] float largest_undo = 0.f, largest_dlse = 0.f;
    int stage = 0, job = warp / 4;
    uint32_t parity = 0;
    for (int tile = 0; tile < tile_count; ++tile, cursor.advance(tiles_h, tiles_w)) {
      barrier_wait(full + stage, parity);
      [[maybe_unused]] float undo = 1.f;
      if constexpr (kScaled) {
        undo = undo_scales[stage] * undo_weight;
        if (kSums) largest_undo = fmaxf(largest_undo, undo_scales[stage]);
      }
      for (; job < jobs; job += kConsumers) {
        const int s = job * 4 + (warp & 3);
        const int2 strip = strip_table[min(s, plan.strips - 1)];
        const int d = cursor.d * plan.tile[0] + (strip.y >> 24);
        const int h0 = cursor.h * plan.tile[1] + ((strip.y >> 14) & 1023);
        const int w = cursor.w * plan.tile[2] + (strip.y & 16383) + 2 * g;
        const bool inside = s < plan.strips && d < p.out[0];
        const bool valid[2] = {inside && w < p.out[2], inside && w + 1 < p.out[2]};
        const int rows = min(plan.rows, p.out[1] - h0);
        // The four warps of a warpgroup go together, wherever their strips end.
        const int out_rows = plan.segments == 1 ? rows : plan.rows;
        uint32_t base = shared_address(halo + stage * stage_words) + strip.x + lane_bytes;
        const bool is_whole = __all_sync(0xffffffffu, valid[0] && valid[1]);
        const int64_t position = (int64_t(d) * p.out[1] + h0) * p.out[2] + w;
        float2* shares_at = shares + position;
        [[maybe_unused]] const float* dlse_at = dlse + position;
        [[maybe_unused]] int dx_at, frame_at;
        [[maybe_unused]] uint32_t halo_at[4];  // the four strips' rows
        if constexpr (kMakesDweight) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = strip_table[min(job * 4 + i, plan.strips - 1)].x;
            halo_at[i] = wgmma_b_descriptor(shared_address(halo + stage * stage_words) + at);
          }
        }
        if constexpr (kMakesDweight) {
          if (makes_dx) {
            dx_at = t * 2 * q.dx.stride_c + d * q.dx.stride[0] + (h0 + plan.origin[1]) * q.dx.stride[1] + w +
                    plan.origin[2];
            frame_at = (d * q.dx.frame_depth + w / kFewChannelsStrip * q.dx.frame_column + h0 * q.dx.frame_row) *
                           kNormLseDxChannels +
                       t * 2;
            const float zeros[kNormLseDxRow] = {};
            carried.store(0, zeros);
            carried.store(1, zeros);
          }
        }
#pragma unroll 1
        for (int row = 0; row < out_rows; ++row, base += base_step, shares_at += p.out[2], dlse_at += p.out[2]) {
          float acc[kColumns / 2];
          [[maybe_unused]] float own_dlse[2] = {0.f, 0.f};
          [[maybe_unused]] float2 own[2] = {};
          if (row < rows) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (!valid[half]) continue;
              if constexpr (kSums) {
                own_dlse[half] = dlse_at[half];
                if constexpr (kScaled) {
                  const float size = fabsf(own_dlse[half]);
                  if (size < INFINITY) largest_dlse = fmaxf(largest_dlse, size);
                }
              } else {
                own[half] = shares_at[half];
              }
            }
          }
          if constexpr (kTerms) {
            // The tensor core truncates when it adds to its accumulator; summing a few steps outside rounds.
#pragma unroll 1
            for (int first = 0; first < (kMakesDweight ? kBatch : plan.k_steps); first += kBatch) {
              float partial[kColumns / 2];
#pragma unroll
              for (int group = 0; group < kBatch; group += kNormLseGroup) {
                uint32_t high[kNormLseGroup][4], low[kNormLseGroup][4];
#pragma unroll
                for (int k = 0; k < kNormLseGroup; ++k) {
                  if (group + k >= kBatch) continue;
                  const uint32_t at = base + own_offsets[first + group + k];
                  load_matrices(high[k], at);
                  load_matrices(low[k], at + low_bytes);
                }
                wgmma_fence();
#pragma unroll
                for (int k = 0; k < kNormLseGroup; ++k) {
                  if (group + k >= kBatch) continue;
                  const uint32_t b = b_first + (first + group + k) * kBStep;
                  wgmma<kType, kColumns>(partial, low[k], b, group + k > 0);
                  wgmma<kType, kColumns>(partial, high[k], b + plan.k_steps * kBStep, true);
                  wgmma<kType, kColumns>(partial, high[k], b, true);
                }
                wgmma_commit();
                wgmma_wait<0>();
              }
              wgmma_use(partial);
#pragma unroll
              for (int i = 0; i < kColumns / 2; ++i) acc[i] = first == 0 ? partial[i] : acc[i] + partial[i];
            }
          } else {
            for (int first = 0; first < plan.k_steps; first += kBatch) {
              uint32_t a[kBatch][4];
#pragma unroll
              for (int i = 0; i < kBatch; ++i) load_matrices(a[i], base + own_offsets[first + i]);
              wgmma_fence();
#pragma unroll
              for (int i = 0; i < kBatch; ++i) {
                wgmma<kType, kColumns>(acc, a[i], b_first + (first + i) * kBStep, i > 0 || first > 0);
              }
              wgmma_commit();
              wgmma_wait<0>();
            }
            wgmma_use(acc);
          }
          if constexpr (kScaled) {
#pragma unroll
            for (int i = 0; i < kColumns / 2; ++i) acc[i] *= undo;
          }
          // All four warps are through with the products of the row before, whose operands are written anew.
          if constexpr (kMakesDweight) {
            dweight.use();
            named_barrier(kNormLseBarrier + warp / 4, 128);
          }
          if (row >= rows && !kMakesDweight) continue;

          if constexpr (kSums) {
            // Of dz, what the position's share is a factor of. The shift is what the row before came to; where that is
            // too far off, at the first row and where values leap, it is the largest y. All in powers of 2.
            float part[kColumns / 2], total[2];
            for (bool is_exact = false;; is_exact = true) {
              if (is_exact) {
                shift[0] = shift[1] = -INFINITY;
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                  const float bias = forward_table[j / 2 * 8 + t * 2 + (j & 1)].x;
#pragma unroll
                  for (int half = 0; half < 2; ++half) {
                    shift[half] = fmaxf(shift[half], fmaf(acc[j / 2 * 4 + half * 2 + (j & 1)], kLog2E, bias));
                  }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  shift[half] = fmaxf(shift[half], __shfl_xor_sync(0xffffffffu, shift[half], 1));
                  shift[half] = fmaxf(shift[half], __shfl_xor_sync(0xffffffffu, shift[half], 2));
                  if (shift[half] == -INFINITY) shift[half] = 0.f;  // zeros, not NaN
                }
              }
              total[0] = total[1] = 0.f;
#pragma unroll
              for (int j = 0; j < 16; ++j) {
                const float4 column = forward_table[j / 2 * 8 + t * 2 + (j & 1)];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int i = j / 2 * 4 + half * 2 + (j & 1);
                  const float th = norm_lse_tanh<kCoarse>(fmaf(acc[i], column.y, column.z));
                  // y and the shift may be large and near each other: the products are not rounded before the sum.
                  const float e = norm_lse_exponential(fmaf(acc[i], kLog2E, column.x - shift[half]), th);
                  total[half] += e;
                  part[i] = e * (fmaf(-th, th, 1.f) * fmaf(th, 1.f / 3, 0.5f));
                }
              }
              bool fits = true;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                total[half] += __shfl_xor_sync(0xffffffffu, total[half], 1);
                total[half] += __shfl_xor_sync(0xffffffffu, total[half], 2);
                fits = fits && (!valid[half] || (total[half] > 0x1p-12f && total[half] < 0x1p12f));
              }
              if (is_exact || __all_sync(0xffffffffu, fits)) break;
            }
            float share[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              share[half] = total[half] == 0.f ? 0.f : __fdividef(own_dlse[half], total[half]);
              if (t == half && valid[half]) shares_at[half] = make_float2(-shift[half], share[half]);
              const float result = shift[half] + __log2f(total[half]);
              shift[half] = fabsf(result) < 1e30f ? result : 0.f;
            }
            if (!is_whole) {
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                if (valid[half]) continue;  // what is not may be NaN
                share[half] = 0.f;
#pragma unroll
                for (int j = 0; j < 16; ++j) {
                  acc[j / 2 * 4 + half * 2 + (j & 1)] = part[j / 2 * 4 + half * 2 + (j & 1)] = 0.f;
                }
              }
            }
#pragma unroll
            for (int j = 0; j < 16; ++j) {
              const float center = forward_table[j / 2 * 8 + t * 2 + (j & 1)].w;
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                const int i = j / 2 * 4 + half * 2 + (j & 1);
                const float dz = share[half] * part[i];
                sums[j][0] += dz;
                sums[j][1] = fmaf(dz, acc[i] + center, sums[j][1]);
              }
            }
          } else {
            if (row < rows) {
              // What a share is a factor of, then dy, in place of the products. A share that waits for all exponentials
              // makes the compiler start their special functions together, for which sums for dweight leave no
              // registers.
              float part[kColumns / 2], total[2] = {0.f, 0.f};
#pragma unroll
              for (int j = 0; j < 16; ++j) {
                const float4 column = forward_table[j / 2 * 8 + t * 2 + (j & 1)];
                const float third = column.w * (2.f / 3);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int i = j / 2 * 4 + half * 2 + (j & 1);
                  const float th = norm_lse_tanh<kCoarse>(fmaf(acc[i], column.y, column.z));
                  const float e = norm_lse_exponential(fmaf(acc[i], kLog2E, column.x + own[half].x), th);
                  if (kStore) total[half] += e;
                  part[i] = e * fmaf(fmaf(-th, th, 1.f), fmaf(th, third, column.w), 1.f);
                }
              }
              float share[2];
#pragma unroll
              for (int half = 0; half < 2; ++half) {
                share[half] = kStore && total[half] == 0.f ? 0.f : own[half].y;
                if constexpr (kScaled && kMakesDweight) share[half] *= scales.dy;
              }
#pragma unroll
              for (int j = 0; j < 16; ++j) {
                const float2 column = *reinterpret_cast<const float2*>(backward_table + j / 2 * 8 + t * 2 + (j & 1));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                  const int i = j / 2 * 4 + half * 2 + (j & 1);
                  acc[i] = fmaf(share[half], part[i], fmaf(acc[i], column.x, column.y));
                }
              }
            }
            if (row >= rows || !is_whole) {  // the products are those of all warps of a warpgroup
#pragma unroll
              for (int i = 0; i < kColumns / 2; ++i) {
                if (row >= rows || !valid[i >> 1 & 1]) acc[i] = 0.f;
              }
            }
            if constexpr (kStore) {
              const bool is_there = row < rows && inside && w < q.row;
              Element* to = static_cast<Element*>(p.stored) + n * p.y_stride_n + t * 2 * p.stored_stride_c +
                            d * p.y_stride[0] + (h0 + row) * p.y_stride[1] + w;
              const int64_t block_step = 8 * p.stored_stride_c;
#pragma unroll
              for (int j = 0; j < 16; j += 2, to += block_step) {
                asm("" : "+l"(to));  // else all addresses are kept in registers
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                  const float v[2] = {acc[j / 2 * 4 + k], acc[j / 2 * 4 + k + 2]};
                  if (is_there && j / 2 * 8 + t * 2 + k < p.c_out) {
                    store_vec(to + k * p.stored_stride_c, pack<Element>(v));
                  }
                }
              }
            }
            if constexpr (kMakesDweight) {
              if constexpr (Dweight::kAddsBias) dweight.add_to_bias(lane, acc);
              uint32_t dy[kSplit][kColumns / 4];
              Dweight::convert(acc, dy);
              Dweight::put_dy(operands, warp & 3, lane, dy);
              wgmma_fence_shared();
              float done[kNormLseDxRow];
              if (makes_dx) norm_lse_dx_products<kMath>(dy, dx_first, done, carried);
              // Under way until the next row's products are waited for.
              named_barrier(kNormLseBarrier + warp / 4, 128);
              dweight.multiply(operands, shared_address(ones), halo_at, plan.pitch, low_bytes / 16);
#pragma unroll
              for (int i = 0; i < 4; ++i) halo_at[i] += plan.pitch;
              if (!makes_dx || row >= rows || !inside || w - 2 * g >= p.out[2]) continue;
              // Behind the strip's last row come those that only its rows reach.
              for (int i = row;; ++i) {
                if constexpr (kScaled) {
#pragma unroll
                  for (int k = 0; k < kNormLseDxRow; ++k) done[k] *= undo_dx;
                }
                norm_lse_put_dx<Element>(q, dx + dx_at, frames + frame_at, h0, w, t, i, done);
                if (row + 1 < rows || i == row + kNormLseTaps - 1) break;
                carried.take(i - row, done);
              }
            }
          }
        }
        if constexpr (kMakesDweight) {
          wgmma_wait<0>();
          dweight.use();
        }
      }
      job -= jobs;
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage);
      if (++stage == plan.stages) {
        stage = 0;
        parity ^= 1;
      }
    }

    if constexpr (kMakesDweight) {
      // Where weights and operands were, which nobody reads any longer, there is room for each warpgroup's sums. The
      // barriers are the whole block's: racecheck takes one of some warps, behind those of single warpgroups, for none.
      float* const parts = reinterpret_cast<float*>(dx_weights);
      __syncthreads();
      if constexpr (kScaled) dweight.scale(1.f / scales.dy, 1.f / scales.x);
      dweight.for_each(warp & 3, lane, [&](int at, float sum) { parts[warp / 4 * kNormLseDweightFloats + at] = sum; });
      __syncthreads();
      float* const to = q.dweight.partials + int64_t(blockIdx.x) * kNormLseDweightFloats;
      for (int i = tid - kLoaders; i < kNormLseDweightFloats; i += kWarps * 32) {
        float sum = parts[i];
#pragma unroll
        for (int part = 1; part < kConsumers; ++part) sum += parts[part * kNormLseDweightFloats + i];
        to[i] = sum;
      }
    }
    if constexpr (kSums) {
      // Thread -> warp (positions of one channel lie in the lanes of equal t) -> block, always in the same order.
#pragma unroll
      for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sum = sums[j][i];
#pragma unroll
          for (int mask = 4; mask <= 16; mask *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
          if (g == 0) scratch[(warp * kColumns + j / 2 * 8 + t * 2 + (j & 1)) * 2 + i] = sum;
        }
      }
      [[maybe_unused]] uint32_t* const sizes = reinterpret_cast<uint32_t*>(backward_table + kColumns);
      if constexpr (kScaled) sizes[warp] = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_dlse));
      named_barrier(1, kWarps * 32);
      const int at = tid - kLoaders;
      if constexpr (kScaled) {  // those of the slice, for the scales of the second pass
        if (at == 0) {
          uint32_t largest = 0;
          for (int i = 0; i < kWarps; ++i) largest = max(largest, sizes[i]);
          static_cast<float2*>(q.sizes)[n * plan.slices + slice] = make_float2(largest_undo, __uint_as_float(largest));
        }
      }
      if (at < p.c_out * 2) {
        float sum = 0.f;
        for (int i = 0; i < kWarps; ++i) sum += scratch[i * kColumns * 2 + at];
        if (at % 2 == 1) sum *= backward_table[at / 2].w;
        static_cast<float*>(q.norm.partial_sums)[(n * plan.slices + slice) * p.c_out * 2 + at] = sum;
      }
    }
  }
#endif
}

}  // namespace kgopt
