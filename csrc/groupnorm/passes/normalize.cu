// y = act((pre_act(x) - mean) * rstd * weight + bias + residual), one read of each and one write.
#include "common/device/floor.cuh"
#include "common/device/pointwise.cuh"
#include "common/device/traverse_padded.cuh"
#include "groupnorm/groupnorm.h"
#include "groupnorm/passes/normalize_padded.h"

namespace kgopt {
namespace {

template <typename T, Chain kPre, Chain kAct, bool kResidual>
struct Normalize {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = kResidual ? 2 : 1;
  static constexpr bool kWalks = kPre == Chain::kAny && kAct == Chain::kAny, kHasScalars = kWalks;
  struct alignas(4 * sizeof(Acc) > 16 ? 16 : 4 * sizeof(Acc)) Coef {
    Acc mean, rstd, weight, bias;
  };
  const Coef* table;
  ActChain pre, act;
  bool add_input;

  template <Chain kChain, int kSize>
  static __device__ __forceinline__ void apply(const ActChain& chain, Acc (&y)[kSize]) {
    if constexpr (has_floor(kChain)) {
      apply_chain<kChain, kIsCoarse<T>>(floored(chain), y);
    } else {
      apply_chain<kChain, kIsCoarse<T>>(chain, y);
    }
  }
  __device__ Coef load(int64_t row) const {
    Coef c = table[row];
    c.weight *= c.rstd;
    return c;
  }
  // The mean is subtracted first: folded into the bias it would cancel only after rounding.
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const Acc (&x)[kSize], const Acc (&residual)[kSize],
                                        Acc (&y)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = x[j];
    apply<kPre>(pre, y);
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = (y[j] - coef(j).mean) * coef(j).weight + coef(j).bias;
    if constexpr (kResidual) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) y[j] += residual[j];
    }
    apply<kAct>(act, y);
    if (!add_input) return;
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] += x[j];
  }
};

template <typename F>
ElementwiseArgs<F> args_of(const NormalizeParams& p) {
  using T = typename F::Element;
  ElementwiseArgs<F> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = static_cast<const T*>(p.residual);
  a.y = static_cast<T*>(p.y);
  a.n = p.dims.n;
  a.c = p.dims.c;
  a.s = p.dims.s;
  a.f.table = static_cast<const typename F::Coef*>(p.table);
  a.f.pre = p.pre_act;
  a.f.act = p.act;
  a.f.add_input = p.add_input;
  return a;
}

template <typename T, Chain kPre, Chain kAct, bool kResidual = false>
Status launch_normalize(const NormalizeParams& p, cudaStream_t stream) {
  using F = Normalize<T, chain_for<T>(kPre), chain_for<T>(kAct), kResidual>;
  const ElementwiseArgs<F> a = args_of<F>(p);
  if constexpr (!F::kHasScalars) {
    if (elementwise_size(a, p.dims.channels_last) == 1) {
      return launch_normalize<T, Chain::kAny, Chain::kAny, kResidual>(p, stream);
    }
  }
  return launch_elementwise("normalize_kernel", a, p.dims.channels_last, stream, true);
}

template <typename T, Chain kAct>
Status launch_padded(const NormalizeParams& p, const PaddedShape& pad, cudaStream_t stream) {
  ElementwiseArgs<Normalize<T, Chain::kNone, kAct, false>> a = args_of<Normalize<T, Chain::kNone, kAct, false>>(p);
  a.s = int64_t(pad.out[0]) * pad.out[1] * pad.out[2];
  return launch_elementwise_padded("normalize_padded_kernel", a, pad, stream);
}

template <typename T>
Status launch_padded_chain(const NormalizeParams& p, const PaddedShape& pad, cudaStream_t stream) {
  switch (chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return launch_padded<T, Chain::kRelu>(p, pad, stream);
    case Chain::kSilu: return launch_padded<T, Chain::kSilu>(p, pad, stream);
    default: return launch_padded<T, Chain::kAny>(p, pad, stream);
  }
}

}  // namespace

Status run_normalize_padded(const NormalizeParams& p, const PaddedShape& pad, cudaStream_t stream) {
  if (const char* why = normalize_padded_refusal(p, pad)) return Status::Unsupported("normalize_padded_kernel", why);
  switch (p.dims.dtype) {
    case Dtype::kFloat32: return launch_padded_chain<float>(p, pad, stream);
    case Dtype::kBFloat16: return launch_padded_chain<__nv_bfloat16>(p, pad, stream);
    default: return launch_padded_chain<__half>(p, pad, stream);
  }
}

Status run_normalize(const NormalizeParams& p, cudaStream_t stream) {
  if (p.slopes.data) return run_normalize_prelu(p, stream);
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, {
    if (p.residual) {
      if (p.pre_act.empty() && (p.act.empty() || is_two_lines(p.act))) {
        return launch_normalize<T, Chain::kNone, Chain::kLeakyRelu, true>(p, stream);
      }
      return launch_normalize<T, Chain::kAny, Chain::kAny, true>(p, stream);
    }
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, {
      constexpr bool kFloored = kPre != Chain::kAny && (kAct == Chain::kNone || kAct == Chain::kRelu);
      status = launch_normalize<T, kFloored ? Chain::kRelu : kPre, kFloored ? Chain::kRelu : kAct>(p, stream);
    });
  });
  return status;
}

}  // namespace kgopt
