// Instances that are one for several activations, looked up at run time: Chain::kRelu for none and ReLU, since nothing
// is below minus infinity or compares with NaN, Chain::kLeakyRelu for LeakyReLU, too. In kernels that wait for memory
// the few instructions more are hidden: SiLU takes more of them.
#pragma once

#include "common/device/pointwise.cuh"

namespace kgopt {

constexpr bool has_floor(Chain kind) { return kind == Chain::kRelu || kind == Chain::kLeakyRelu; }
constexpr Chain with_floor(Chain kind) { return kind == Chain::kNone ? Chain::kRelu : kind; }

struct FlooredChain {
  const ActChain& chain;
  float floor, stop, slope;  // max(x, floor), of which what is not above 0 is multiplied; no gradient at x <= stop
};
__device__ __forceinline__ FlooredChain floored(const ActChain& act) {
  const bool is_relu = is_one(act, Act::kRelu);
  return {act, is_relu ? 0.f : -INFINITY, is_relu ? 0.f : NAN, is_leaky_relu(act) ? act.first<float>().a : 1.f};
}

// As their namesakes of common/pointwise.cuh.
template <Chain kChain>
__device__ __forceinline__ float apply_chain(const FlooredChain& act, float x) {
  if constexpr (!has_floor(kChain)) return apply_chain<kChain>(act.chain, x);
  x = fast_max(x, act.floor);
  return kChain == Chain::kRelu || x > 0.f ? x : x * act.slope;
}
template <Chain kChain, bool kCoarse, int kSize>
__device__ __forceinline__ void apply_chain(const FlooredChain& act, float (&x)[kSize]) {
  if constexpr (has_floor(kChain)) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) x[j] = apply_chain<kChain>(act, x[j]);
  } else {
    apply_chain<kChain, kCoarse>(act.chain, x);
  }
}
template <Chain kChain, typename T, bool kScaled = false, int kSize>
__device__ __forceinline__ void finish_chain(const FlooredChain& act, float (&x)[kSize]) {
  if constexpr (has_floor(kChain)) {
    apply_chain<kChain, kIsCoarse<T>>(act, x);
  } else {
    finish_chain<kChain, T, kScaled>(act.chain, x);
  }
}

template <Chain kChain, bool kCoarse, int kSize>
__device__ __forceinline__ void multiply_slopes(const FlooredChain& act, float (&x)[kSize], float (&gradient)[kSize]) {
  if constexpr (has_floor(kChain)) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float g = kChain == Chain::kRelu || x[j] > 0.f ? gradient[j] : gradient[j] * act.slope;
      gradient[j] = x[j] <= act.stop ? 0.f : g;
    }
  } else {
    multiply_slopes<kChain, kCoarse>(act.chain, x, gradient);
  }
}

}  // namespace kgopt
