// Element types on the device: conversion to and from the accumulation type, and 16-byte vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/dtype.h"

namespace kgopt {

// Statistics and arithmetic are fp32, in fp64 for fp64 data.
template <typename T>
struct AccumulateType {
  using type = float;
};
template <>
struct AccumulateType<double> {
  using type = double;
};
template <typename T>
using acc_t = typename AccumulateType<T>::type;

template <typename T>
__device__ __forceinline__ acc_t<T> to_acc(T v) {
  return static_cast<acc_t<T>>(v);
}
template <typename T>
__device__ __forceinline__ T from_acc(acc_t<T> v) {
  return static_cast<T>(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_acc<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}
template <>
__device__ __forceinline__ __half from_acc<__half>(float v) {
  return __float2half_rn(v);
}

// kSize elements that load and store as one access.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vec {
  T v[kSize];
};

template <typename T>
inline constexpr int kVecSize = 16 / sizeof(T);

template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> load_vec(const T* p) {
  return *reinterpret_cast<const Vec<T, kSize>*>(p);
}
template <typename T, int kSize>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, kSize>& v) {
  *reinterpret_cast<Vec<T, kSize>*>(p) = v;
}

// To global memory. Written out: behind a branch the compiler turns an assignment into stores of a word each, which
// take several times as long.
__device__ __forceinline__ void store_words(void* to, const uint4& bits) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
               : "memory");
}
__device__ __forceinline__ void store_words(void* to, const uint2& bits) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(bits.x), "r"(bits.y) : "memory");
}
// store_vec for what lies in global memory: results.
template <typename T, int kSize>
__device__ __forceinline__ void store_result(T* p, const Vec<T, kSize>& v) {
  constexpr int kBytes = sizeof(v);
  if constexpr (kSize > 1 && kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) store_words(p + i * 16 / sizeof(T), reinterpret_cast<const uint4*>(&v)[i]);
  } else if constexpr (kSize > 1 && kBytes == 8) {
    store_words(p, *reinterpret_cast<const uint2*>(&v));
  } else {
    store_vec(p, v);
  }
}

// A 16-byte vector of 2-byte elements to floats and back, two elements an instruction where the hardware can.
template <typename T, int kSize>
__device__ __forceinline__ void unpack(const Vec<T, kSize>& v, acc_t<T> (&x)[kSize]) {
#pragma unroll
  for (int j = 0; j < kSize; ++j) x[j] = to_acc(v.v[j]);
}
template <int kSize>
__device__ __forceinline__ void unpack(const Vec<__nv_bfloat16, kSize>& v, float (&x)[kSize]) {
  if constexpr (kSize % 2 == 0) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(&v);
#pragma unroll
    for (int j = 0; j < kSize / 2; ++j) {  // a bfloat16 is the upper half of a float
      x[2 * j] = __uint_as_float(words[j] << 16);
      x[2 * j + 1] = __uint_as_float(words[j] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = to_acc(v.v[j]);
  }
}
// By pairs: read one by one, the halves of a word would take a register each for as long as the vector lives.
template <int kSize>
__device__ __forceinline__ void unpack(const Vec<__half, kSize>& v, float (&x)[kSize]) {
  if constexpr (kSize % 2 == 0) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(&v);
#pragma unroll
    for (int j = 0; j < kSize / 2; ++j) {
      const uint32_t word = words[j];
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
      x[2 * j] = pair.x;
      x[2 * j + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = to_acc(v.v[j]);
  }
}
template <typename T, int kSize>
__device__ __forceinline__ Vec<T, kSize> pack(const acc_t<T> (&x)[kSize]) {
  Vec<T, kSize> v;
  if constexpr (sizeof(T) == 2 && kSize % 2 == 0) {
    uint32_t* const words = reinterpret_cast<uint32_t*>(&v);
#pragma unroll
    for (int j = 0; j < kSize / 2; ++j) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(x[2 * j], x[2 * j + 1]);
        words[j] = *reinterpret_cast<const uint32_t*>(&pair);
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * j], x[2 * j + 1]);
        words[j] = *reinterpret_cast<const uint32_t*>(&pair);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kSize; ++j) v.v[j] = from_acc<T>(x[j]);
  }
  return v;
}

// An element of a tensor whose type is known at run time only; for the few values of an affine parameter.
template <typename Acc>
__device__ __forceinline__ Acc load_as(const void* p, int64_t i, Dtype dtype) {
  switch (dtype) {
    case Dtype::kBFloat16: return static_cast<Acc>(static_cast<float>(static_cast<const __nv_bfloat16*>(p)[i]));
    case Dtype::kFloat16: return static_cast<Acc>(static_cast<float>(static_cast<const __half*>(p)[i]));
    case Dtype::kFloat64: return static_cast<Acc>(static_cast<const double*>(p)[i]);
    default: return static_cast<Acc>(static_cast<const float*>(p)[i]);
  }
}
template <typename Acc>
__device__ __forceinline__ void store_as(void* p, int64_t i, Dtype dtype, Acc v) {
  switch (dtype) {
    case Dtype::kBFloat16: static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(static_cast<float>(v)); break;
    case Dtype::kFloat16: static_cast<__half*>(p)[i] = __float2half_rn(static_cast<float>(v)); break;
    case Dtype::kFloat64: static_cast<double*>(p)[i] = static_cast<double>(v); break;
    default: static_cast<float*>(p)[i] = static_cast<float>(v);
  }
}

// Calls f(T()) with the element type that dtype names.
#define KGOPT_DISPATCH_DTYPE(dtype, T, ...) \
  switch (dtype) {                          \
    case ::kgopt::Dtype::kFloat32: {        \
      using T = float;                      \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::kgopt::Dtype::kBFloat16: {       \
      using T = __nv_bfloat16;              \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::kgopt::Dtype::kFloat16: {        \
      using T = __half;                     \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
    case ::kgopt::Dtype::kFloat64: {        \
      using T = double;                     \
      __VA_ARGS__;                          \
      break;                                \
    }                                       \
  }

}  // namespace kgopt
