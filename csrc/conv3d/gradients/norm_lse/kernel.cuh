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
#include "conv3d/gradients/norm_lse/dx.cuh"
#include "conv3d/gradients/norm_lse/params.h"
#include "conv3d/gradients/norm_lse/row.cuh"
#include "conv3d/gradients/scale.cuh"
#include "conv3d/implicit_gemm/kernel.cuh"
#include "groupnorm/shared/affine_row.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

// K entry -> byte offset in the halo. Padded entries point at the plane of zeros: a zero weight alone would turn an
// infinite input into a NaN. Of scaled values, where an infinite one gives that anyway, they repeat the last.
template <bool kScaled>
__device__ __forceinline__ void norm_lse_fill_offsets(const FewChannelsPlan& plan, int* offsets, int thread) {
  for (int entry = thread * 4; entry < plan.k_steps * 8; entry += kNormLseThreads * 4) {
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
}

// Strip -> its first position in the halo, in bytes, and its place in a tile.
__device__ __forceinline__ void norm_lse_fill_strips(const FewChannelsPlan& plan, int2* strips, int thread) {
  for (int i = thread; i < plan.strips; i += kNormLseThreads) {
    const int per_row = plan.tile[2] / kFewChannelsStrip;
    const int w = i % per_row * kFewChannelsStrip, h = i / per_row % plan.segments * plan.rows;
    const int d = i / (per_row * plan.segments);
    const int base = (d * plan.step[0] * plan.halo[1] + h * plan.step[1]) * plan.pitch + plan.lead + w * plan.step[2];
    strips[i] = make_int2(base * 16, d << 24 | h << 14 | w);
  }
}

// A block's sums of dz and dz xhat, and of scaled values what the second pass makes its scales of. columns: the
// backward's; thread: of the computing ones.
template <bool kScaled>
__device__ __forceinline__ void norm_lse_write_sums(const ConvNormLseParams& q, const float (&sums)[16][2],
                                                    float* scratch, const float4* columns, int64_t n, int64_t slice,
                                                    int at, float largest_undo, float largest_dlse) {
  constexpr int kColumns = kNormLseColumns, kWarps = kNormLseConsumers * 4;
  const FewChannelsParams& p = q.conv;
  const FewChannelsPlan& plan = p.plan;
  const int warp = at / 32, g = at % 32 >> 2, t = at & 3;
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
  [[maybe_unused]] uint32_t* const sizes = reinterpret_cast<uint32_t*>(scratch) + kWarps * kColumns * 2 + kColumns * 4;
  if constexpr (kScaled) sizes[warp] = __reduce_max_sync(0xffffffffu, __float_as_uint(largest_dlse));
  named_barrier(1, kWarps * 32);
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
    if (at % 2 == 1) sum *= columns[at / 2].w;
    static_cast<float*>(q.norm.partial_sums)[(n * plan.slices + slice) * p.c_out * 2 + at] = sum;
  }
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

  norm_lse_fill_offsets<kScaled>(plan, offsets, tid);
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
  norm_lse_fill_strips(plan, strip_table, tid);
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
          norm_lse_multiply_x<kMath, kBatch, kMakesDweight>(acc, base, own_offsets, b_first, plan.k_steps, low_bytes,
                                                            undo);
          // All four warps are through with the products of the row before, whose operands are written anew.
          if constexpr (kMakesDweight) {
            dweight.use();
            named_barrier(kNormLseBarrier + warp / 4, 128);
          }
          if (row >= rows && !kMakesDweight) continue;

          if constexpr (kSums) {
            norm_lse_add_row<kCoarse>(acc, own_dlse, valid, is_whole, forward_table + t * 2, t, shift, shares_at, sums);
          } else {
            if (row < rows) {
              norm_lse_make_dy<kCoarse, kStore, kScaled>(acc, own, forward_table + t * 2, backward_table + t * 2,
                                                         scales.dy);
            }
            if (row >= rows || !is_whole) {  // the products are those of all warps of a warpgroup
#pragma unroll
              for (int i = 0; i < kColumns / 2; ++i) {
                if (row >= rows || !valid[i >> 1 & 1]) acc[i] = 0.f;
              }
            }
            if constexpr (kStore) {
              const int64_t position = n * p.y_stride_n + d * p.y_stride[0] + (h0 + row) * p.y_stride[1] + w;
              norm_lse_store_dy<Element>(p, acc, position, t, row < rows && inside && w < q.row);
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
      if constexpr (kScaled) dweight.scale(1.f / scales.dy, 1.f / scales.x);
      float* const to = q.dweight.partials + (int64_t(blockIdx.x) * kConsumers + warp / 4) * kNormLseDweightFloats;
      dweight.for_each(warp & 3, lane, [&](int at, float sum) { to[at] = sum; });
    }
    if constexpr (kSums) {
      norm_lse_write_sums<kScaled>(q, sums, scratch, backward_table, n, slice, tid - kLoaders, largest_undo,
                                   largest_dlse);
    }
  }
#endif
}

}  // namespace kgopt
