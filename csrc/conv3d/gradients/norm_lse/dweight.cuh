// dweight and dbias from the dy that a warpgroup has in registers: dy^T [64 channels x 64 positions] times x [64
// positions x 8 input channels], for each tap; both operands in shared memory, sums in registers from start to end. dy
// lies as [8 channels][position][channel], channels innermost, and x is the halo as it lies, a tap of the width being
// 16 bytes further.
#pragma once

#include <cuda_runtime.h>

#include "common/device/async.cuh"
#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "common/device/wgmma.cuh"
#include "conv3d/few_channels/load.cuh"
#include "conv3d/gradients/norm_lse/params.h"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

#if defined(__CUDA_ARCH__) && defined(__CUDA_ARCH_FEAT_SM90_ALL)

// D[64 x kN] += A B, or D = A B unless `add`; half types with channels innermost in both.
template <ConvMath kMath, int kN>
__device__ __forceinline__ void norm_lse_wgmma(float (&d)[kN / 2], uint64_t a_descriptor, uint64_t b_descriptor,
                                               bool add = true) {
  static_assert(kN == 24 || kN == 8);
#define KGOPT_NORM_LSE_WGMMA(k, types, scale)                                                   \
  if constexpr (kN == 24) {                                                                     \
    KGOPT_WGMMA_SHARED_SHAPE(24, k, types, scale, KGOPT_S12, "%12", "%13", "%14",               \
                             KGOPT_D8(0) KGOPT_COMMA KGOPT_D4(8));                              \
  } else {                                                                                      \
    KGOPT_WGMMA_SHARED_SHAPE(8, k, types, scale, "%0,%1,%2,%3", "%4", "%5", "%6", KGOPT_D4(0)); \
  }
  if constexpr (kMath == ConvMath::kBf16) {
    KGOPT_NORM_LSE_WGMMA("k16", ".f32.bf16.bf16", "1, 1, 1, 1")
  } else {
    KGOPT_NORM_LSE_WGMMA("k16", ".f32.f16.f16", "1, 1, 1, 1")
  }
#undef KGOPT_NORM_LSE_WGMMA
}

// Bytes to the next eight words (or positions) of K and to the next eight rows or columns.
__device__ __forceinline__ uint64_t norm_lse_descriptor(uint32_t low, uint32_t to_next_eight) {
  return uint64_t(low) | uint64_t(to_next_eight >> 4) << 32;
}

// What a thread has of a warpgroup's sums. warp: of the four.
template <ConvMath kMath>
struct NormLseDweightSums {
  static constexpr bool kScaled = conv_is_scaled(kMath), kTerms = kMath == ConvMath::kFp16x3;
  static constexpr bool kAddsBias = kMath == ConvMath::kFp16x1;  // to dbias what products would round
  static constexpr int kSplit = ConvMathTraits<kMath>::kSplit;
  static constexpr int kTaps = kNormLseTaps;

  float taps[kTaps][12] = {};
  float bias[4] = {};

  // dy as accumulators lie to words of two half values, in two terms where there are.
  static __device__ __forceinline__ void convert(const float (&dy)[kNormLseColumns / 2],
                                                 uint32_t (&words)[kSplit][kNormLseColumns / 4]) {
#pragma unroll
    for (int i = 0; i < kNormLseColumns / 4; ++i) {
      if constexpr (kTerms) {
        split_half(dy[2 * i], dy[2 * i + 1], &words[0][i], &words[1][i]);
      } else {
        using Element = std::conditional_t<kScaled, __half, typename ConvMathTraits<kMath>::Element>;
        const float pair[2] = {dy[2 * i], dy[2 * i + 1]};
        const Vec<Element, 2> packed = pack<Element>(pair);
        words[0][i] = *reinterpret_cast<const uint32_t*>(&packed);
      }
    }
  }
  // to: the warpgroup's operands.
  static __device__ __forceinline__ void put_dy(uint32_t to, int warp, int lane,
                                                const uint32_t (&words)[kSplit][kNormLseColumns / 4]) {
    const uint32_t at = to + warp * 256 + (lane >> 2) * 32 + (lane & 3) * 4;
#pragma unroll
    for (int term = 0; term < kSplit; ++term) {
#pragma unroll
      for (int i = 0; i < kNormLseColumns / 4; ++i) {
        store_word(at + term * kNormLseDyBytes + i / 2 * kNormLseDyBlock + i % 2 * 16, words[term][i]);
      }
    }
  }
  // Where products would round dy for dbias, too. Of the eight threads that have the same 16 columns each keeps two.
  __device__ __forceinline__ void add_to_bias(int lane, const float (&dy)[kNormLseColumns / 2]) {
    float s[16];
#pragma unroll
    for (int j = 0; j < 16; ++j) s[j] = dy[j / 2 * 4 + (j & 1)] + dy[j / 2 * 4 + (j & 1) + 2];
#pragma unroll
    for (int count = 8; count >= 2; count /= 2) {
      const int mask = count * 2;
      const bool is_upper = lane & mask;
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const float sent = is_upper ? s[j] : s[j + count], kept = is_upper ? s[j + count] : s[j];
        s[j] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
      }
    }
    bias[0] += s[0], bias[1] += s[1];
  }

  // Starts the products of a row of 64 positions; in two terms, finishes them. halo: where each strip's row begins in
  // the halo, as a descriptor has it; to_low: where its second term is from there.
  __device__ __forceinline__ void multiply(uint32_t operands, uint32_t all_ones, const uint32_t (&halo)[4], int pitch,
                                           uint32_t to_low) {
    if constexpr (kTerms) return multiply_terms(operands, all_ones, halo, pitch, to_low);
    const uint64_t b_ones = norm_lse_descriptor(wgmma_b_descriptor(all_ones), 128);
    const uint32_t a_first = wgmma_b_descriptor(operands);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t a = norm_lse_descriptor(a_first + k * 16, kNormLseDyBlock);
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        norm_lse_wgmma<kMath, 24>(taps[tap], a, norm_lse_descriptor(halo[k] + tap * pitch, 16));
      }
      if constexpr (!kAddsBias) norm_lse_wgmma<kMath, 8>(bias, a, b_ones);
    }
    wgmma_commit();
  }
  // After the products are waited for.
  __device__ __forceinline__ void use() {
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) wgmma_use(taps[tap]);
    if constexpr (!kAddsBias) wgmma_use(bias);
  }
  // Powers of two that undo scales.
  __device__ __forceinline__ void scale(float undo_dy, float undo_x) {
#pragma unroll
    for (int i = 0; i < kTaps * 12; ++i) taps[i / 12][i % 12] *= undo_dy, taps[i / 12][i % 12] *= undo_x;
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] *= undo_dy;
  }

  // f(place among the warpgroup's sums, sum)
  template <typename F>
  __device__ __forceinline__ void for_each(int warp, int lane, const F& f) const {
    const int c = warp * 16 + (lane >> 2), t = lane & 3;
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
      for (int i = 0; i < 12; ++i) {
        const int column = (tap * kTaps + i / 4) * kNormLseDxChannels + t * 2 + (i & 1);
        f(column * kNormLseColumns + c + (i >> 1 & 1) * 8, taps[tap][i]);
      }
    }
    if constexpr (!kAddsBias) {  // all columns of ones gave the same
      const int row = (kNormLseDxColumns + t) * kNormLseColumns + c;
      f(row, t == 0 ? bias[0] : 0.f);
      f(row + 8, t == 0 ? bias[2] : 0.f);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        f((kNormLseDxColumns + warp) * kNormLseColumns + (lane >> 2) * 8 + t * 2 + i, bias[i]);
      }
    }
  }

 private:
  // Sums of their own for each row, since the tensor core truncates when it adds to its accumulator.
  __device__ __forceinline__ void multiply_terms(uint32_t operands, uint32_t all_ones, const uint32_t (&halo)[4],
                                                 int pitch, uint32_t to_low) {
    const uint64_t b_ones = norm_lse_descriptor(wgmma_b_descriptor(all_ones), 128);
    const uint32_t a_first = wgmma_b_descriptor(operands);
    float of_taps[kTaps][12], of_bias[4];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint64_t a = norm_lse_descriptor(a_first + k * 16, kNormLseDyBlock);
      const uint64_t a_low = norm_lse_descriptor(a_first + k * 16 + kNormLseDyBytes / 16, kNormLseDyBlock);
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        const uint32_t b = halo[k] + tap * pitch;
        norm_lse_wgmma<kMath, 24>(of_taps[tap], a_low, norm_lse_descriptor(b, 16), k > 0);
        norm_lse_wgmma<kMath, 24>(of_taps[tap], a, norm_lse_descriptor(b + to_low, 16));
        norm_lse_wgmma<kMath, 24>(of_taps[tap], a, norm_lse_descriptor(b, 16));
      }
      norm_lse_wgmma<kMath, 8>(of_bias, a_low, b_ones, k > 0);
      norm_lse_wgmma<kMath, 8>(of_bias, a, b_ones);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int tap = 0; tap < kTaps; ++tap) {
      wgmma_use(of_taps[tap]);
#pragma unroll
      for (int i = 0; i < 12; ++i) taps[tap][i] += of_taps[tap][i];
    }
    wgmma_use(of_bias);
#pragma unroll
    for (int i = 0; i < 4; ++i) bias[i] += of_bias[i];
  }
  static __device__ __forceinline__ void store_word(uint32_t at, uint32_t word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
  }
};

#endif

// Adds up the warpgroups' sums, always in the same order.
__global__ void __launch_bounds__(kNormLseSumLanes* kNormLseSumShares)
    norm_lse_dweight_kernel(const __grid_constant__ ConvNormLseParams q) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ float shares[kNormLseSumShares][kNormLseSumLanes];
  const FewChannelsParams& p = q.conv;
  const int lane = threadIdx.x % kNormLseSumLanes, share = threadIdx.x / kNormLseSumLanes;
  const int i = blockIdx.x * kNormLseSumLanes + lane;
  const int64_t count = p.n * p.plan.slices * kNormLseConsumers;
  const int rows = i / kNormLseColumns == kNormLseDxColumns ? kNormLseBiasRows : 1;
  float sum = 0.f;
#pragma unroll 8
  for (int64_t of = share; of < count; of += kNormLseSumShares) {
    const float* const from = q.dweight.partials + of * kNormLseDweightFloats + i;
    for (int row = 0; row < rows; ++row) sum += from[row * kNormLseColumns];
  }
  shares[share][lane] = sum;
  __syncthreads();
  const int c = i % kNormLseColumns, column = i / kNormLseColumns;
  if (share > 0 || c >= p.c_out) return;
#pragma unroll
  for (int k = 1; k < kNormLseSumShares; ++k) sum += shares[k][lane];
  if (column == kNormLseDxColumns) {
    if (q.dweight.dbias) store_as(q.dweight.dbias, c, q.dweight.dtype, sum);
    return;
  }
  const int c_in = column % kNormLseDxChannels, tap = column / kNormLseDxChannels;
  const int h = tap / kNormLseTaps, w = tap % kNormLseTaps;
  if (!q.dweight.dw || c_in >= p.c_in || h >= p.plan.kernel[1] || w >= p.plan.kernel[2]) return;
  const int64_t at =
      c * q.dweight.stride_out + c_in * q.dweight.stride_in + h * q.dweight.stride[0] + w * q.dweight.stride[1];
  store_as(q.dweight.dw, at, q.dweight.dtype, sum);
#endif
}

}  // namespace kgopt
