// What blocks tell each other: 64-bit words, zero at launch, written once and complete. A reader waits until a word is
// no longer zero, so nobody needs a fence, which takes microseconds under the load of the stores.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/device/async.cuh"
#include "groupnorm/params.h"

namespace kgopt {

// Between looks for words; 30 to 300 took the same.
inline constexpr uint32_t kWordPollNanoseconds = 100;

// How many times words were told that somebody waits for. It says no more than that it is worth a look: nothing orders
// it after the words, whose own bits say that they are there.
__device__ __forceinline__ void await_told(const uint32_t* told, uint32_t times) {
  while (load_relaxed(told) < times) __nanosleep(kWordPollNanoseconds);
}
// Up to kCount words `stride` apart, and one more where `extra` is not null; `none` in place of the others. All lanes
// of a warp. All words are asked for at once, for one after the other each would be a trip to L2.
template <int kCount>
__device__ __forceinline__ void load_words(const uint64_t* from, uint32_t stride, uint32_t count, const uint64_t* extra,
                                           uint64_t none, uint64_t (&words)[kCount + 1]) {
#pragma unroll
  for (int k = 0; k <= kCount; ++k) words[k] = none;
  while (true) {
    asm("" : "+l"(from));  // or registers would keep every word's address
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < count) words[k] = load_relaxed(from + k * stride);
    }
    if (extra) words[kCount] = load_relaxed(extra);
    bool missing = false;
#pragma unroll
    for (int k = 0; k <= kCount; ++k) missing |= static_cast<uint32_t>(words[k]) == 0;  // never of a word that is there
    if (!__any_sync(0xffffffffu, missing)) return;
    __nanosleep(kWordPollNanoseconds);
  }
}
// Blocks that have cleared their share of the words; the sign changes when all of a launch have. No two launches count
// at a time: a block needs a multiprocessor's shared memory for itself, and a grid that counts more than half of them.
static __device__ uint32_t blocks_cleared;

// Words hold anything at launch. These threads of every block clear the block's share of them, kClearedWords each at
// most, and ask for them again, which await_cleared waits for: what reads as zero has reached L2, where all blocks
// look. Asked for behind a block's first loads, it would come behind them, too (8 us). A memset in front takes 2 us.
__device__ __forceinline__ void clear_words(uint64_t* words, uint32_t count, uint32_t thread, uint32_t threads,
                                            uint64_t (&seen)[kClearedWords]) {
  const uint32_t first = blockIdx.x * threads + thread, step = gridDim.x * threads;
#pragma unroll
  for (int k = 0; k < kClearedWords; ++k) {
    if (first + k * step < count) store_relaxed(words + first + k * step, 0);
  }
#pragma unroll
  for (int k = 0; k < kClearedWords; ++k) {
    seen[k] = 0;
    if (first + k * step < count) seen[k] = load_relaxed(words + first + k * step);
  }
}
__device__ __forceinline__ void await_cleared(const uint64_t* words, uint32_t thread, uint32_t threads,
                                              uint64_t (&seen)[kClearedWords]) {
#pragma unroll
  for (int k = 0; k < kClearedWords; ++k) {
    while (seen[k] != 0) seen[k] = load_relaxed(words + (blockIdx.x + k * gridDim.x) * threads + thread);
  }
}
// Then one thread counts the block, and, before its first word, waits for all others. A released addition would wait
// for the loads that other warps have under way.
__device__ __forceinline__ uint32_t count_cleared() {
  return atomicAdd(&blocks_cleared, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1);
}
__device__ __forceinline__ void await_all_cleared(uint32_t counted) {
  while (true) {
    uint32_t v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(&blocks_cleared) : "memory");
    if ((v ^ counted) & 0x80000000u) return;
  }
}
// Two floats, the second without a sign, as a word that is not zero.
__device__ __forceinline__ uint64_t pack_word(float first, float second) {
  return uint64_t(__float_as_uint(first)) << 32 | (__float_as_uint(second) | 0x80000000u);
}
__device__ __forceinline__ float2 unpack_word(uint64_t word) {
  return make_float2(__uint_as_float(static_cast<uint32_t>(word >> 32)),
                     __uint_as_float(static_cast<uint32_t>(word) & 0x7fffffffu));
}
// A lane's sums over the moments of blocks that have `full` values each, and of one that has `rest` if has_rest,
// relative to the mean of the first block, which the first of `lanes` lanes has: of the means and of the squared
// deviations.
template <int kCount>
__device__ __forceinline__ float2 sum_moments(const uint64_t (&words)[kCount + 1], uint32_t count, bool has_rest,
                                              uint32_t lanes, float full, float rest, float* origin) {
  *origin = __shfl_sync(0xffffffffu, unpack_word(words[0]).x, threadIdx.x % 32 & ~(lanes - 1));
  float sum = 0.f, squares = 0.f, deviations = 0.f;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const float2 moments = unpack_word(words[k]);
    const float distance = (k < count ? moments.x : *origin) - *origin;
    sum += distance;
    squares += distance * distance;
    deviations += moments.y;
  }
  const float2 moments = unpack_word(words[kCount]);
  const float distance = has_rest ? moments.x - *origin : 0.f, weighted = rest * distance;
  return make_float2(full * sum + weighted, deviations + full * squares + (moments.y + weighted * distance));
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
