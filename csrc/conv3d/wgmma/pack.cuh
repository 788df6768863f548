// What the packing of weights as shared-memory images shares, for the kernels of conv3d/wgmma/common.cuh.
#pragma once

#include <cuda_runtime.h>

#include "common/device/dtype.cuh"
#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

// A weight as a half type's bits.
template <typename Params>
__device__ __forceinline__ uint32_t half_bits(const Params& p, int64_t at) {
  if (p.dtype != Dtype::kFloat32) return static_cast<const unsigned short*>(p.weight)[at];
  const float v = static_cast<const float*>(p.weight)[at];
  return p.plan.math == ConvMath::kBf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(v))
                                        : __half_as_ushort(__float2half_rn(v));
}

// The index of a piece, taken apart from the fastest dim on.
struct PackedIndex {
  uint32_t rest;
  __device__ __forceinline__ int next(uint32_t size) {
    const uint32_t digit = rest % size;
    rest /= size;
    return static_cast<int>(digit);
  }
};

// The bias of all tiles' channels, zeros where there is none.
template <typename Params>
__device__ __forceinline__ void pack_bias(const Params& p, int64_t channels, Dtype dtype) {
  for (int64_t c = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; c < channels; c += int64_t(gridDim.x) * blockDim.x) {
    p.packed_bias[c] = p.bias && c < p.c_out ? load_as<float>(p.bias, c, dtype) : 0.f;
  }
}
template <typename Params>
__device__ __forceinline__ void pack_bias(const Params& p, int64_t channels) {
  pack_bias(p, channels, p.dtype);
}

}  // namespace kgopt
