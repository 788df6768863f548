// What the Hopper convolution does with its sums beside storing them: a residual of y's layout is added to them.
//
// The rows of a residual are read in the accumulators' order, 16 bytes a load. They are asked into L2 when the producer
// comes to the tile, and into registers segment by segment while other segments' taps are added up, in the registers
// that the accumulators of the outer taps leave.
#pragma once

#include "../common/dtype.cuh"
#include "conv3d_hopper_params.h"

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

#endif

}  // namespace kgopt
