// What a warp does with a row of a strip, 16 positions of 64 channels: y by wgmma; in the first pass the norm's sums,
// in the second dy.
#pragma once

#include <cuda_runtime.h>

#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/gradients/norm_lse/dx.cuh"
#include "conv3d/gradients/norm_lse/params.h"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

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

// y without bias, as accumulators lie. base: the lane's row of ldmatrix in the halo, to which offsets of K are added;
// weights: as a descriptor; low_bytes: to the halo's second term; undo: of scaled values, what undoes that. kOneBatch:
// all of K is one.
template <ConvMath kMath, int kBatch, bool kOneBatch>
__device__ __forceinline__ void norm_lse_multiply_x(float (&acc)[kNormLseColumns / 2], uint32_t base,
                                                    const int* own_offsets, uint32_t b_first, int k_steps,
                                                    uint32_t low_bytes, float undo) {
  constexpr int kColumns = kNormLseColumns, kBStep = kColumns * 8 * 4 / 16;
  constexpr WgmmaType kType = kNormLseType<kMath>;
  if constexpr (conv_split_factor(kMath) == 2) {
    // The tensor core truncates when it adds to its accumulator; summing a few steps outside rounds.
#pragma unroll 1
    for (int first = 0; first < (kOneBatch ? kBatch : k_steps); first += kBatch) {
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
          wgmma<kType, kColumns>(partial, high[k], b + k_steps * kBStep, true);
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
    for (int first = 0; first < k_steps; first += kBatch) {
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
  if constexpr (conv_is_scaled(kMath)) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) acc[i] *= undo;
  }
}

// A row's part of the sums of dz and dz times centered y, and each position's shift and share. table: the forward's
// columns, from the lane's first one on; shift: what the row before came to.
template <bool kCoarse>
__device__ __forceinline__ void norm_lse_add_row(float (&acc)[kNormLseColumns / 2], const float (&own_dlse)[2],
                                                 const bool (&valid)[2], bool is_whole, const float4* table, int t,
                                                 float (&shift)[2], float2* shares_at, float (&sums)[16][2]) {
  constexpr int kColumns = kNormLseColumns;
  constexpr float kLog2E = 1.44269504088896340736f;
  // Of dz, what the position's share is a factor of. The shift is what the row before came to; where that is
  // too far off, at the first row and where values leap, it is the largest y. All in powers of 2.
  float part[kColumns / 2], total[2];
  for (bool is_exact = false;; is_exact = true) {
    if (is_exact) {
      shift[0] = shift[1] = -INFINITY;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float bias = table[j / 2 * 8 + (j & 1)].x;
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
      const float4 column = table[j / 2 * 8 + (j & 1)];
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
    const float center = table[j / 2 * 8 + (j & 1)].w;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = j / 2 * 4 + half * 2 + (j & 1);
      const float dz = share[half] * part[i];
      sums[j][0] += dz;
      sums[j][1] = fmaf(dz, acc[i] + center, sums[j][1]);
    }
  }
}

// dy in place of y, times dy_scale. own: each position's shift and share; forward, backward: columns from the lane's
// first one on. kStores: dy goes to memory.
template <bool kCoarse, bool kStores, bool kScaled>
__device__ __forceinline__ void norm_lse_make_dy(float (&acc)[kNormLseColumns / 2], const float2 (&own)[2],
                                                 const float4* forward, const float4* backward, float dy_scale) {
  constexpr int kColumns = kNormLseColumns;
  constexpr float kLog2E = 1.44269504088896340736f;
  // What a share is a factor of, then dy, in place of the products. A share that waits for all exponentials
  // makes the compiler start their special functions together, for which sums for dweight leave no
  // registers.
  float part[kColumns / 2], total[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float4 column = forward[j / 2 * 8 + (j & 1)];
    const float third = column.w * (2.f / 3);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = j / 2 * 4 + half * 2 + (j & 1);
      const float th = norm_lse_tanh<kCoarse>(fmaf(acc[i], column.y, column.z));
      const float e = norm_lse_exponential(fmaf(acc[i], kLog2E, column.x + own[half].x), th);
      if (kStores) total[half] += e;
      part[i] = e * fmaf(fmaf(-th, th, 1.f), fmaf(th, third, column.w), 1.f);
    }
  }
  float share[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    share[half] = kStores && total[half] == 0.f ? 0.f : own[half].y;
    if constexpr (kScaled && !kStores) share[half] *= dy_scale;
  }
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const float2 column = *reinterpret_cast<const float2*>(backward + j / 2 * 8 + (j & 1));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = j / 2 * 4 + half * 2 + (j & 1);
      acc[i] = fmaf(share[half], part[i], fmaf(acc[i], column.x, column.y));
    }
  }
}

// A row of dy to memory. position: of channel 0, the lane's first.
template <typename Element>
__device__ __forceinline__ void norm_lse_store_dy(const FewChannelsParams& p, const float (&acc)[kNormLseColumns / 2],
                                                  int64_t position, int t, bool is_there) {
  Element* to = static_cast<Element*>(p.stored) + position + t * 2 * p.stored_stride_c;
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

#endif

}  // namespace kgopt
