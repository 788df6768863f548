// Values as their bits, and products of one step of K.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "common/device/dtype.cuh"
#include "common/device/mma.cuh"
#include "conv3d/gradients/few_wgrad/params.h"

namespace kgopt {
namespace few_wgrad {

template <ConvMath kMath>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kMath == ConvMath::kTf32) {
    mma_tf32(c, a, b0, b1);
  } else if constexpr (kMath == ConvMath::kBf16) {
    mma_bf16(c, a, b0, b1);
  } else {
    mma_fp16(c, a, b0, b1);
  }
}

// A value as the bits of a float.
template <ConvMath kMath>
using Stored = std::conditional_t<conv_channels_per_word(kMath) == 1, float, unsigned short>;
template <ConvMath kMath>
__device__ __forceinline__ float value_of(Stored<kMath> v) {
  if constexpr (kMath == ConvMath::kBf16) {
    return __uint_as_float(uint32_t(v) << 16);
  } else if constexpr (kMath == ConvMath::kFp16) {
    return __half2float(__ushort_as_half(v));
  } else {
    return v;
  }
}
template <ConvMath kMath>
__device__ __forceinline__ float load_value(uint32_t address) {
  if constexpr (conv_channels_per_word(kMath) == 1) {
    return __uint_as_float(load_shared(address));
  } else {
    unsigned short v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
    return value_of<kMath>(v);
  }
}

// The thread's number, from which nothing is computed ahead: registers are for accumulators.
__device__ __forceinline__ int thread_now() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread;
}

}  // namespace few_wgrad
}  // namespace kgopt
