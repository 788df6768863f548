// Powers of two that bring values into the range of fp16, whose products then have the digits of TF32 for half of the
// bytes, or those of fp32 in two terms.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kgopt {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// The one that brings values of this size, given as bits, below 2^15.
__device__ __forceinline__ float scale_of_size(uint32_t bits) {
  const int exponent = bits >> 23;
  if (exponent == 0 || exponent >= 255) return 1.f;
  return __int_as_float(min(max(268 - exponent, 67), 187) << 23);
}
// The largest of the block's values, which are not negative, as bits; NaN is the largest. Ends with shared memory being
// read: a barrier must come before the next call.
template <int kWarps>
__device__ __forceinline__ uint32_t block_size(float v, uint32_t* scratch) {
  const uint32_t of_warp = __reduce_max_sync(0xffffffffu, __float_as_uint(v));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = of_warp;
  __syncthreads();
  return __reduce_max_sync(0xffffffffu, scratch[threadIdx.x % kWarps]);
}

#endif

}  // namespace kgopt
