// What the kernels for small groups share: loads that keep their order, and sums.
#pragma once

#include "common/device/dtype.cuh"
#include "common/device/reduce.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/small/plan.h"

namespace kgopt {

inline constexpr int kSmallMaxWarps = kSmallMaxThreads / 32;

// Value i of T as bits, 0 where it is not wanted. The compiler leaves these loads in their order, and what waits for
// them behind all of them: a use of x ahead of the parameters' loads would make them wait for x.
template <typename T>
__device__ __forceinline__ uint32_t load_bits(const void* values, uint32_t i, bool wanted) {
  uint32_t bits;
  if constexpr (sizeof(T) == 4) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.relaxed.cta.global.b32 %0, [%1];\n\t}"
        : "=&r"(bits)
        : "l"(static_cast<const uint32_t*>(values) + i), "r"(uint32_t(wanted)));
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.b32 %0, 0;\n\t@p ld.relaxed.cta.global.u16 %0, [%1];\n\t}"
        : "=&r"(bits)
        : "l"(static_cast<const uint16_t*>(values) + i), "r"(uint32_t(wanted)));
  }
  return bits;
}
template <typename T>
__device__ __forceinline__ T load_in_order(const void* values, uint32_t i, bool wanted) {
  const uint32_t bits = load_bits<T>(values, i, wanted);
  return *reinterpret_cast<const T*>(&bits);
}
// The same of a vector.
template <typename T>
__device__ __forceinline__ Vec<T, kSmallRun> load_run_in_order(const T* from, bool wanted) {
  Vec<T, kSmallRun> v;
  if constexpr (sizeof(T) == 4) {
    uint4 bits;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\t"
        "mov.b32 %3, 0;\n\t@p ld.relaxed.cta.global.v4.b32 {%0, %1, %2, %3}, [%4];\n\t}"
        : "=&r"(bits.x), "=&r"(bits.y), "=&r"(bits.z), "=&r"(bits.w)
        : "l"(from), "r"(uint32_t(wanted)));
    v = *reinterpret_cast<const Vec<T, kSmallRun>*>(&bits);
  } else {
    uint2 bits;
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\t"
        "@p ld.relaxed.cta.global.v2.b32 {%0, %1}, [%2];\n\t}"
        : "=&r"(bits.x), "=&r"(bits.y)
        : "l"(from), "r"(uint32_t(wanted)));
    v = *reinterpret_cast<const Vec<T, kSmallRun>*>(&bits);
  }
  return v;
}

// Over `lanes` neighbouring lanes, a power of two, or over the warp.
template <int kValues>
__device__ __forceinline__ void lanes_sum(uint32_t lanes, float (&v)[kValues]) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < static_cast<int>(lanes)) {
#pragma unroll
      for (int i = 0; i < kValues; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], mask);
    }
  }
}

// Over the block, `shared` zero from its number of warps on.
__device__ __forceinline__ float block_total(float v, float4* shared, uint32_t warps) {
  float total[1] = {v};
  lanes_sum(32, total);
  if (threadIdx.x % 32 == 0) reinterpret_cast<float*>(shared)[threadIdx.x / 32] = total[0];
  __syncthreads();
  float sum = 0.f;
  const auto add = [&](int i) {
    const float4 s = shared[i];
    sum += (s.x + s.y) + (s.z + s.w);
  };
  add(0);
  if (warps > 4) add(1);
  if (warps > 8) {
#pragma unroll
    for (int i = 2; i < kSmallMaxWarps / 4; ++i) add(i);
  }
  return sum;
}

// dweight and dbias are fp32 or of x's type.
template <typename T>
__device__ __forceinline__ void store_gradient(void* to, uint32_t channel, Dtype dtype, float v) {
  if (sizeof(T) == 4 || dtype == Dtype::kFloat32) {
    static_cast<float*>(to)[channel] = v;
  } else {
    static_cast<T*>(to)[channel] = from_acc<T>(v);
  }
}

// Parameters of a thread's elements, fp32 or x's type T, as bits: what converts them would wait for each load in turn.
// kBoth: the loads of both are there, each where it is wanted, and have a register of their own, or one would wait for
// the other.
template <typename T, int kElements, bool kBoth>
struct SmallAffine {
  uint32_t words[kElements] = {}, halves[kBoth ? kElements : 1] = {};

  __device__ __forceinline__ void load_words(const void* values, int k, uint32_t channel, bool wanted) {
    words[k] = load_bits<float>(values, channel, wanted);
  }
  __device__ __forceinline__ void load_halves(const void* values, int k, uint32_t channel, bool wanted) {
    (kBoth ? halves[kBoth ? k : 0] : words[k]) = load_bits<T>(values, channel, wanted);
  }
  __device__ __forceinline__ float value(int k, bool wide) const {
    if (wide || sizeof(T) == 4) return __uint_as_float(words[k]);
    const uint16_t half = static_cast<uint16_t>(kBoth ? halves[kBoth ? k : 0] : words[k]);
    return static_cast<float>(to_acc(*reinterpret_cast<const T*>(&half)));
  }
};
// Calls load(as_words, as_halves): with both, or behind a branch with what is wanted.
template <typename T, bool kBoth, typename Load>
__device__ __forceinline__ void load_as_wanted(bool wide, Load load) {
  if (sizeof(T) == 4) {
    load(std::true_type(), std::false_type());
  } else if (kBoth) {
    load(std::true_type(), std::true_type());
  } else if (wide) {
    load(std::true_type(), std::false_type());
  } else {
    load(std::false_type(), std::true_type());
  }
}

// What a thread has of its team's unit: kRuns vectors of kRun elements.
template <typename T, int kRun_, int kRuns_, Chain kAct_>
struct SmallTraits {
  using Element = T;
  static constexpr int kRun = kRun_, kRuns = kRuns_, kElements = kRun * kRuns;
  static constexpr Chain kAct = kAct_;
};

}  // namespace kgopt
