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

// Waits for `count` words and folds them by one warp, in an order that depends on nothing else: fold(state, word, i)
// for each, join(state) across the lanes.
template <typename State, typename Fold, typename Join>
__device__ __forceinline__ State fold_words(const uint64_t* from, int count, Fold fold, Join join) {
  constexpr int kBatch = 8;  // loads in flight
  State state{};
  for (int first = threadIdx.x % 32; first < count; first += 32 * kBatch) {
    uint64_t word[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) word[k] = first + 32 * k < count ? load_word(from + first + 32 * k) : 0;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int i = first + 32 * k;
      if (i >= count) break;
      if (word[k] == 0) word[k] = wait_word(from + i);
      fold(state, word[k], i);
    }
  }
  __syncwarp();
  return join(state);
}

}  // namespace kgopt
