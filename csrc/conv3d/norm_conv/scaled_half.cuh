// The powers of two of scaled_half_params.h, from the bits of a channel's largest finite magnitude.
#pragma once

#include <cstdint>

#include "conv3d/norm_conv/scaled_half_params.h"

namespace kgopt {

// Of the least power of two above it. From 2^-120 on, whose scale is a number of fp32; so a channel of zeros takes no
// room from the others' weights.
__device__ __forceinline__ int scaled_exponent(uint32_t largest) { return max(int(largest >> 23) - 126, -120); }
__device__ __forceinline__ float scaled_input_scale(uint32_t largest) {
  return __uint_as_float(uint32_t(127 + kScaledInputBits - scaled_exponent(largest)) << 23);
}
__device__ __forceinline__ float scaled_input_inverse(uint32_t largest) {
  return __uint_as_float(uint32_t(127 - kScaledInputBits + scaled_exponent(largest)) << 23);
}

}  // namespace kgopt
