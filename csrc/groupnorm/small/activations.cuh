// Activations of small tensors, of which a kernel for any chain finds out at run time.
#pragma once

#include "common/device/pointwise.cuh"

namespace kgopt {

// A kernel whose chain is Chain::kAny looks up at run time which ones its activations are. Few elements do not pay for
// kernels of their own, but for the usual ones: no pre-activation, and behind the norm none, relu or SiLU. What they
// need not jump over they need not fetch, and instructions come from memory at first, as x does.
template <int kElements>
__device__ __forceinline__ void apply_kind(Chain kind, const ActChain& chain, float (&v)[kElements]) {
  if (kind == Chain::kNone) return;
  if (kind == Chain::kRelu) {
    apply_chain<Chain::kRelu, false>(chain, v);
  } else if (kind == Chain::kSilu) {
    apply_chain<Chain::kSilu, false>(chain, v);
  } else {
    apply_chain<Chain::kAny, false>(chain, v);
  }
}

// v becomes the chain's value, and `by` is multiplied with its slope. A bit for each element whose gradient is 0
// instead.
template <int kElements>
__device__ __forceinline__ uint32_t apply_slope(Chain kind, const ActChain& chain, float (&v)[kElements],
                                                float (&by)[kElements]) {
  uint32_t bits = 0;
  if (kind == Chain::kRelu) {
    const auto stopped = chain_slopes<Chain::kRelu, false, true>(chain, v, by);
#pragma unroll
    for (int k = 0; k < kElements; ++k) bits |= uint32_t(stopped[k]) << k;
  } else if (kind == Chain::kSilu) {
    chain_slopes<Chain::kSilu, false, true>(chain, v, by);
  } else if (kind == Chain::kAny) {
    bits = chain_slopes<Chain::kAny, false, true>(chain, v, by).bits;
  }
  return bits;
}
// A gradient that comes in becomes the one that goes out.
template <int kElements>
__device__ __forceinline__ void multiply_slope(Chain kind, const ActChain& chain, float (&v)[kElements],
                                               float (&gradient)[kElements]) {
  const uint32_t stopped = apply_slope(kind, chain, v, gradient);
#pragma unroll
  for (int k = 0; k < kElements; ++k) gradient[k] = stopped >> k & 1 ? 0.f : gradient[k];
}

}  // namespace kgopt
