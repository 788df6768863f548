// What the Hopper convolution does with its sums beside storing them: a residual of y's layout is added to them, and
// the moments of what is stored are kept by channel.
//
// The rows of a residual are read in the accumulators' order, 16 bytes a load. They are asked into L2 when the producer
// comes to the tile, and into registers segment by segment while other segments' taps are added up, in the registers
// that the accumulators of the outer taps leave.
#pragma once

#include <type_traits>

#include "../common/async.cuh"
#include "../common/dtype.cuh"
#include "../common/reduce.cuh"
#include "conv3d_hopper_params.h"
#include "conv3d_hopper_plan.h"

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

__device__ __forceinline__ void bulk_prefetch_to_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Of output positions [q0, q0 + rows) of a plane, numbered by the input's width; all channels. Only where the output is
// as wide as the input, so that these are neighbours.
template <typename Element>
__device__ __forceinline__ void prefetch_residual(const HopperParams& p, int n, int od, int q0, int rows) {
  if (od >= p.out[0] || p.out[2] != p.in[2] || p.y_stride[1] != p.y_stride[2] * p.out[2]) return;
  const int first = max(q0, 0), end = min(q0 + rows, p.out[1] * p.out[2]);
  if (first >= end) return;
  const Element* const from = static_cast<const Element*>(p.residual) + n * p.y_stride_n + od * p.y_stride[0];
  const uint32_t row_bytes = static_cast<uint32_t>(p.y_stride[2]) * sizeof(Element);
  bulk_prefetch_to_l2(from + first * p.y_stride[2], (end - first) * row_bytes);
}

// A thread's part of the residual: 8 channels in each 32 of each of its rows.
template <typename Element, int kRows, int kTile>
struct HopperResidual {
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

// Where the moments of a thread's channel lie: each of a block's warpgroups has a slice of every sample to itself, so
// that a tile's are merged into it without atomics, in the order of the tiles.
__device__ __forceinline__ float* hopper_moments(const HopperParams& p, int n, int n_tile, int tile_channels) {
  const int thread = threadIdx.x % 128, c = n_tile * tile_channels + thread;
  if (thread >= tile_channels || c >= p.c_out) return nullptr;
  const int64_t slice = int64_t(n) * hopper_moment_slices(p.plan) + blockIdx.x * kHopperConsumers + threadIdx.x / 128;
  return p.moments + (slice * p.c_out + c) * 3;
}

// Merges a warpgroup's tile into `to`, which holds `before`; null for threads that own no channel. value(row, block, i)
// is channel i of a thread's 8 in the block's 32, of which two fours are next_four apart; `stored` has a bit for each
// row that counts. `shared` is the warpgroup's own, 4 * (2 * kTile + 1) floats.
template <int kRows, int kTile, typename F>
__device__ __forceinline__ void add_moments(const F& value, uint32_t stored, int c_local, int next_four, float* shared,
                                            float* to, Moments<float> before) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, g = lane / 4, t4 = lane % 4;
  const int barrier = 1 + threadIdx.x / 128;
  float count = static_cast<float>(__popc(stored));
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) count += __shfl_xor_sync(0xffffffff, count, lanes);
  const float over_count = count > 0.f ? 1.f / count : 0.f;
  named_barrier(barrier, 128);  // all have read what the tile's products left in `shared`
#pragma unroll
  for (int block = 0; block < kTile / 32; ++block) {
    float mean[8] = {};
    // The sum over this warp's rows of channel g of the thread's 8, of the values or of their squared deviations: each
    // step sends half of the sums to the other half of the lanes.
    auto add_up = [&](bool squares) {
      float sum[8] = {};
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const bool counts = stored >> row & 1;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float v = value(row, block, i) - (squares ? mean[i] : 0.f);
          if (counts) sum[i] += squares ? v * v : v;
        }
      }
#pragma unroll
      for (int width = 4; width > 0; width /= 2) {
        const bool upper = g & width;
#pragma unroll
        for (int i = 0; i < width; ++i) {
          const float send = upper ? sum[i] : sum[i + width], keep = upper ? sum[i + width] : sum[i];
          sum[i] = keep + __shfl_xor_sync(0xffffffff, send, width * 4);
        }
      }
      return sum[0];
    };
    const float own_mean = add_up(false) * over_count;
#pragma unroll
    for (int i = 0; i < 8; ++i) mean[i] = __shfl_sync(0xffffffff, own_mean, i * 4 + t4);
    const float deviation = add_up(true);
    reinterpret_cast<float2*>(shared)[warp * kTile + block * 32 + c_local + g / 4 * next_four + g % 4] =
        make_float2(own_mean, deviation);
  }
  if (lane == 0) shared[4 * kTile * 2 + warp] = count;
  named_barrier(barrier, 128);
  if (to) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float2 part = reinterpret_cast<const float2*>(shared)[w * kTile + threadIdx.x % 128];
      merge(before, Moments<float>{part.x, part.y, shared[4 * kTile * 2 + w]});
    }
    to[0] = before.mean, to[1] = before.m2, to[2] = before.count;
  }
}

#endif

}  // namespace kgopt
