// What the convolution with taps as columns does with its sums beside storing them: a residual of y's layout is added
// to them, and the moments of what is stored are kept by channel.
//
// The rows of a residual are read in the accumulators' order, 16 bytes a load. They are asked into L2 when the producer
// comes to the tile, and into registers segment by segment while other segments' taps are added up, in the registers
// that the accumulators of the outer taps leave.
#pragma once

#include <type_traits>

#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "conv3d/wgmma/tap_columns/params.h"
#include "conv3d/wgmma/tap_columns/plan.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void bulk_prefetch_to_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Of output positions [q0, q0 + rows) of a plane, numbered by the input's width; all channels. Only where the output is
// as wide as the input, so that these are neighbours.
template <typename Element>
__device__ __forceinline__ void prefetch_residual(const TapColumnsParams& p, int n, int od, int q0, int rows) {
  if (od >= p.out[0] || p.out[2] != p.in[2] || p.y_stride[1] != p.y_stride[2] * p.out[2]) return;
  const int first = max(q0, 0), end = min(q0 + rows, p.out[1] * p.out[2]);
  if (first >= end) return;
  const Element* const from = static_cast<const Element*>(p.residual) + n * p.y_stride_n + od * p.y_stride[0];
  const uint32_t row_bytes = static_cast<uint32_t>(p.y_stride[2]) * sizeof(Element);
  bulk_prefetch_to_l2(from + first * p.y_stride[2], (end - first) * row_bytes);
}

// A thread's part of the residual: 8 channels in each 32 of each of its rows.
template <typename Element, int kRows, int kTile>
struct TapColumnsResidual {
  static constexpr int kPieces = sizeof(Element) == 4 ? 2 : 1;  // of 16 bytes
  static constexpr int kNextPiece = 16;                         // channels from one to the other
  uint4 piece[kRows][kTile / 32 * kPieces];

  // from: the thread's first channel of the row; channels from `left` on are beyond the tensor's.
  __device__ __forceinline__ void load(int row, const Element* from, bool valid, int left) {
#pragma unroll
    for (int i = 0; i < kTile / 32 * kPieces; ++i) {
      const int c = i / kPieces * 32 + i % kPieces * kNextPiece;
      piece[row][i] = make_uint4(0, 0, 0, 0);
      if (valid && c < left) piece[row][i] = __ldcs(reinterpret_cast<const uint4*>(from + c));
    }
  }
  // Channel i of the thread's 8 in a block of 32.
  __device__ __forceinline__ float at(int row, int block, int i) const {
    const uint4& v = piece[row][block * kPieces + i / 4 * (kPieces - 1)];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    if constexpr (sizeof(Element) == 4) return __uint_as_float(words[i % 4]);
    const uint32_t word = words[i / 2];
    if constexpr (std::is_same_v<Element, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 ? word >> 16 : word)));
    }
    return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
  }
};

// Moments by channel of what a warp stores, kept in registers from tile to tile: lane (g, t4) has channel g of the 8
// that threads t4 hold in each block of 32. Each warp of a block has a slice of every sample in memory to itself, into
// which it merges what it has when it comes to another sample or to other channels, so there are no atomics, and the
// order is that of the tiles.
template <int kTile>
struct TapColumnsMoments {
  Moments<float> own[kTile / 32];

  // c: the lane's channel of each block's first 32.
  __device__ __forceinline__ void flush(const TapColumnsParams& p, int n, int c) {
    const int64_t slice =
        int64_t(n) * tap_columns_moment_slices(p.plan) + blockIdx.x * (kWgmmaConsumers * 4) + threadIdx.x / 32;
#pragma unroll
    for (int block = 0; block < kTile / 32; ++block) {
      if (c + block * 32 < p.c_out && own[block].count > 0.f) {
        float* const to = p.moments + (slice * p.c_out + c + block * 32) * 3;
        Moments<float> before{to[0], to[1], to[2]};
        merge(before, own[block]);
        to[0] = before.mean, to[1] = before.m2, to[2] = before.count;
      }
      own[block] = Moments<float>();
    }
  }

  // value(row, block, i) is channel i of the thread's 8; `stored` has a bit for each row that counts.
  template <int kRows, typename F>
  __device__ __forceinline__ void add(const F& value, uint32_t stored) {
    const bool all = __all_sync(0xffffffff, stored == (1u << kRows) - 1);
#pragma unroll
    for (int block = 0; block < kTile / 32; ++block) {
      auto at = [&](int row, int i) { return value(row, block, i); };
      merge(own[block], all ? of_all<kRows>(at) : of_some<kRows>(at, stored));
    }
  }

 private:
  // What the other half of the lanes has of what this one keeps, where they send half of what they have each.
  static __device__ __forceinline__ float from_other(float low, float high, bool upper, int width) {
    return __shfl_xor_sync(0xffffffff, upper ? low : high, width * 4);
  }

  // One pass: a thread's values relative to its first, then lanes with equal counts.
  template <int kRows, typename F>
  static __device__ __forceinline__ Moments<float> of_all(const F& value) {
    float mean[8], m2[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float shift = value(0, i);
      float sum = 0.f, squares = 0.f;
#pragma unroll
      for (int row = 1; row < kRows; ++row) {
        const float v = value(row, i) - shift;
        sum += v;
        squares += v * v;
      }
      const float d = sum * (1.f / kRows);
      mean[i] = shift + d;
      m2[i] = squares - sum * d;
    }
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int width = 4; width > 0; width /= 2) {
      const bool upper = g & width;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float other = from_other(mean[i], mean[i + width], upper, width);
        const float other_m2 = from_other(m2[i], m2[i + width], upper, width);
        const float own = upper ? mean[i + width] : mean[i], delta = other - own;
        mean[i] = own + 0.5f * delta;
        // Of kRows * 4 / width values on either side.
        m2[i] = (upper ? m2[i + width] : m2[i]) + other_m2 + delta * delta * (kRows * 2.f / width);
      }
    }
    return {mean[0], m2[0] < 0.f ? 0.f : m2[0], kRows * 8.f};  // keeps NaN
  }

  // Two passes over the rows that count.
  template <int kRows, typename F>
  static __device__ __forceinline__ Moments<float> of_some(const F& value, uint32_t stored) {
    const int g = threadIdx.x % 32 / 4;
    float count = static_cast<float>(__popc(stored));
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2) count += __shfl_xor_sync(0xffffffff, count, lanes);
    const float over_count = count > 0.f ? 1.f / count : 0.f;
    float mean[8] = {};
    auto add_up = [&](bool squares) {
      float sum[8] = {};
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const bool counts = stored >> row & 1;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float v = value(row, i) - mean[i];
          if (counts) sum[i] += squares ? v * v : v;
        }
      }
#pragma unroll
      for (int width = 4; width > 0; width /= 2) {
        const bool upper = g & width;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const float other = from_other(sum[i], sum[i + width], upper, width);
          sum[i] = (upper ? sum[i + width] : sum[i]) + other;
        }
      }
      return sum[0];
    };
    const float own_mean = add_up(false) * over_count;
#pragma unroll
    for (int i = 0; i < 8; ++i) mean[i] = __shfl_sync(0xffffffff, own_mean, i * 4 + threadIdx.x % 4);
    return {own_mean, add_up(true), count};
  }
};

#endif

}  // namespace kgopt
