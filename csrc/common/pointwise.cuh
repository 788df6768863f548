// Pointwise chains inside the GroupNorm kernels: a few single activations are compiled in, every other chain is walked
// at run time. The launcher picks once.
#pragma once

#include "activation.h"

namespace kgopt {

// Out of line: inlined into unrolled vectors, every activation would be there once for each element.
template <typename Acc>
__device__ __noinline__ Acc any_chain_value(ActChain chain, Acc x) {
  return chain_value(chain, x);
}
template <typename Acc>
struct ValueAndSlope {
  Acc value, slope;
};
template <typename Acc>
__device__ __noinline__ ValueAndSlope<Acc> any_chain_slope(ActChain chain, Acc x) {
  ValueAndSlope<Acc> r;
  r.slope = chain_derivative(chain, x, &r.value);
  return r;
}

// Four instructions: __expf and __fdividef take three more for subnormal numbers, and bf16 kernels run out of issue
// slots before they run out of bandwidth. Below x = -87.3 this is 0.
__device__ __forceinline__ float fast_sigmoid(float x) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return s;
}
// Keeps NaN.
__device__ __forceinline__ float fast_relu(float x) {
  float y;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
  return y;
}

template <Chain kChain, typename Acc>
__device__ __forceinline__ Acc apply_chain(const ActChain& chain, Acc x) {
  if constexpr (kChain == Chain::kNone) return x;
  if constexpr (kChain == Chain::kRelu) {
    if constexpr (sizeof(Acc) == 4) return fast_relu(x);
    return act_value(Act::kRelu, x);
  }
  if constexpr (kChain == Chain::kSilu) {
    if constexpr (sizeof(Acc) == 4) return x * fast_sigmoid(x);
    return act_value(Act::kSilu, x);
  }
  // No call for the empty one of a pair, nor for leaky_relu: the whole grid takes the same branch.
  if (chain.length == 0) return x;
  if (is_leaky_relu(chain)) return act_value(Act::kLeakyRelu, x);
  return any_chain_value(chain, x);
}

template <Chain kChain, typename Acc>
__device__ __forceinline__ Acc chain_slope(const ActChain& chain, Acc x, Acc* value) {
  if constexpr (kChain == Chain::kNone) {
    *value = x;
    return Acc(1);
  }
  if constexpr (kChain == Chain::kRelu) {
    *value = act_value(Act::kRelu, x);
    return act_derivative(Act::kRelu, x);
  }
  if constexpr (kChain == Chain::kSilu) {
    if constexpr (sizeof(Acc) == 4) {
      const Acc s = fast_sigmoid(x);
      *value = x * s;
      return s * (1.f + x * (1.f - s));
    }
    *value = act_value(Act::kSilu, x);
    return act_derivative(Act::kSilu, x);
  }
  if (chain.length == 0) {
    *value = x;
    return Acc(1);
  }
  if (is_leaky_relu(chain)) {
    *value = act_value(Act::kLeakyRelu, x);
    return act_derivative(Act::kLeakyRelu, x);
  }
  const ValueAndSlope<Acc> r = any_chain_slope(chain, x);
  *value = r.value;
  return r.slope;
}

// Runs `body` with kPre and kAct bound to the chains' kinds. Pairs that no network has share the run-time chain.
#define KGOPT_DISPATCH_CHAINS(pre, act, kPre, kAct, ...)                                           \
  do {                                                                                             \
    const ::kgopt::Chain pre_kind = ::kgopt::chain_kind(pre), act_kind = ::kgopt::chain_kind(act); \
    if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kNone) {                  \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kNone;         \
      __VA_ARGS__;                                                                                 \
    } else if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kRelu) {           \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kRelu;         \
      __VA_ARGS__;                                                                                 \
    } else if (pre_kind == ::kgopt::Chain::kNone && act_kind == ::kgopt::Chain::kSilu) {           \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kNone, kAct = ::kgopt::Chain::kSilu;         \
      __VA_ARGS__;                                                                                 \
    } else if (pre_kind == ::kgopt::Chain::kRelu && act_kind == ::kgopt::Chain::kNone) {           \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kRelu, kAct = ::kgopt::Chain::kNone;         \
      __VA_ARGS__;                                                                                 \
    } else {                                                                                       \
      constexpr ::kgopt::Chain kPre = ::kgopt::Chain::kAny, kAct = ::kgopt::Chain::kAny;           \
      __VA_ARGS__;                                                                                 \
    }                                                                                              \
  } while (0)

}  // namespace kgopt
