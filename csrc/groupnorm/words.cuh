// What blocks tell each other: 64-bit words, zero at launch, written once and complete. A reader waits until a word is
// no longer zero, so nobody needs a fence, which takes microseconds under the load of the stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kgopt {

__device__ __forceinline__ uint64_t load_word(const uint64_t* p) {
  uint64_t v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ uint64_t wait_word(const uint64_t* p) {
  uint64_t v = load_word(p);
  while (v == 0) {
    __nanosleep(40);
    v = load_word(p);
  }
  return v;
}
__device__ __forceinline__ void store_word(uint64_t* p, uint64_t v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Two floats, the second without a sign, as a word that is not zero.
__device__ __forceinline__ uint64_t pack_word(float first, float second) {
  return uint64_t(__float_as_uint(first)) << 32 | (__float_as_uint(second) | 0x80000000u);
}
__device__ __forceinline__ float2 unpack_word(uint64_t word) {
  return make_float2(__uint_as_float(static_cast<uint32_t>(word >> 32)),
                     __uint_as_float(static_cast<uint32_t>(word) & 0x7fffffffu));
}
// Two floats with their signs; a second of zero goes as -0, so that the word is not zero.
__device__ __forceinline__ uint64_t pack_signed_word(float first, float second) {
  const uint32_t bits = __float_as_uint(second);
  return uint64_t(__float_as_uint(first)) << 32 | (bits == 0 ? 0x80000000u : bits);
}
__device__ __forceinline__ float2 unpack_signed_word(uint64_t word) {
  return make_float2(__uint_as_float(static_cast<uint32_t>(word >> 32)), __uint_as_float(static_cast<uint32_t>(word)));
}

}  // namespace kgopt
