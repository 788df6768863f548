// No activation and ReLU in one instance, Chain::kRelu: nothing is below minus infinity.
#pragma once

#include "common/pointwise.cuh"

namespace kgopt {

constexpr Chain with_floor(Chain kind) { return kind == Chain::kNone ? Chain::kRelu : kind; }

struct FlooredChain {
  const ActChain& chain;
  float floor;
};
__device__ __forceinline__ FlooredChain floored(const ActChain& act) { return {act, act.empty() ? -INFINITY : 0.f}; }

// As their namesakes of common/pointwise.cuh.
template <Chain kChain, bool kCoarse, int kSize>
__device__ __forceinline__ void apply_chain(const FlooredChain& act, float (&x)[kSize]) {
  if constexpr (kChain == Chain::kRelu) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = fast_max(x[j], act.floor);
  } else {
    apply_chain<kChain, kCoarse>(act.chain, x);
  }
}
template <Chain kChain>
__device__ __forceinline__ float apply_chain(const FlooredChain& act, float x) {
  if constexpr (kChain == Chain::kRelu) return fast_max(x, act.floor);
  return apply_chain<kChain>(act.chain, x);
}
template <Chain kChain, typename T, bool kScaled = false, int kSize>
__device__ __forceinline__ void finish_chain(const FlooredChain& act, float (&x)[kSize]) {
  if constexpr (kChain == Chain::kRelu) {
    apply_chain<kChain, kIsCoarse<T>>(act, x);
  } else {
    finish_chain<kChain, T, kScaled>(act.chain, x);
  }
}

// Likewise the activation of a backward: nothing compares with NaN.
template <Chain kChain, bool kCoarse, int kSize>
__device__ __forceinline__ void multiply_slopes(const FlooredChain& act, float (&x)[kSize], float (&gradient)[kSize]) {
  if constexpr (kChain == Chain::kRelu) {
    const float stop = act.chain.empty() ? NAN : 0.f;
#pragma unroll
    for (int j = 0; j < kSize; ++j) gradient[j] = x[j] <= stop ? 0.f : gradient[j];
  } else {
    multiply_slopes<kChain, kCoarse>(act.chain, x, gradient);
  }
}

}  // namespace kgopt
