// fp32 numbers as two terms of fp16, as layout.h says.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "layout/layout.h"

namespace kgopt {

inline constexpr int kSplitTop = 14;  // bits that the largest magnitude comes below

// The exponent k of the scale. Bounded, so that the scale and its inverse are numbers of fp32.
__device__ __forceinline__ int split_exponent(uint32_t largest) {
  const float value = __uint_as_float(largest);
  return value > 0.f ? min(126, max(-126, kSplitTop - 1 - ilogbf(value))) : 0;
}
__device__ __forceinline__ float split_scale(uint32_t largest) { return ldexpf(1.f, split_exponent(largest)); }

// What fp16 cannot hold, an infinity, comes out of both terms' products as NaN.
__device__ __forceinline__ void split_half(float x, float scale, __half* high, __half* low) {
  const float scaled = x * scale;
  *high = __float2half_rn(scaled);
  *low = __float2half_rn((scaled - __half2float(*high)) * float(1 << kSplitBits));
}

}  // namespace kgopt
