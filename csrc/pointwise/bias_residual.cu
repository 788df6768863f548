// What follows a convolution: its bias, a residual, a division and activations, in one pass over its output.
#include "common/device/floor.cuh"
#include "common/device/traverse.cuh"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

// With kScaled it reads fp16 values that are too large by a power of two a channel.
template <typename T, bool kResidual, Chain kAct, bool kScaled>
struct AddBias {
  using Element = T;
  using Input = std::conditional_t<kScaled, __half, T>;
  static constexpr int kInputs = kResidual ? 2 : 1;
  static constexpr bool kWalks = kAct == Chain::kAny, kHasScalars = kWalks;
  struct Coef {
    acc_t<T> bias;
    std::conditional_t<kScaled, float2, char> factors;
  };
  const T* bias;
  const float2* factors;  // [channels]; a power alone may be none of fp32
  uint32_t channels;
  acc_t<T> scale;
  ActChain act;
  // Rows are (sample, channel) pairs; there are fewer than 2^32 of them, which the launcher checks.
  __device__ Coef load(int64_t row) const {
    const uint32_t channel = static_cast<uint32_t>(row) % channels;
    Coef coef{bias == nullptr ? acc_t<T>(0) : to_acc(bias[channel]), {}};
    if constexpr (kScaled) coef.factors = factors[channel];
    return coef;
  }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const acc_t<T> (&y)[kSize], const acc_t<T> (&residual)[kSize],
                                        acc_t<T> (&out)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      acc_t<T> value = y[j];
      if constexpr (kScaled) value = value * coef(j).factors.x * coef(j).factors.y;
      out[j] = (value + coef(j).bias + (kResidual ? residual[j] : acc_t<T>(0))) * scale;
    }
    if constexpr (kAct == Chain::kRelu) {
      apply_chain<kAct, kIsCoarse<T>>(floored(act), out);
    } else {
      apply_chain<kAct, kIsCoarse<T>>(act, out);
    }
  }
};

template <typename T, bool kResidual, Chain kAct, bool kScaled>
Status launch(const BiasResidualParams& p, cudaStream_t stream) {
  using F = AddBias<T, kResidual, chain_for<T>(kAct), kScaled>;
  ElementwiseArgs<F> a{};
  a.y = static_cast<T*>(p.y);
  a.x = kScaled ? static_cast<const typename F::Input*>(p.scaled) : static_cast<const typename F::Input*>(p.y);
  a.second = static_cast<const T*>(p.residual);
  a.n = p.n;
  a.c = p.c;
  a.s = p.s;
  a.f.bias = static_cast<const T*>(p.bias);
  a.f.factors = static_cast<const float2*>(p.factors);
  a.f.channels = static_cast<uint32_t>(p.c);
  a.f.scale = static_cast<acc_t<T>>(p.scale);
  a.f.act = p.act;
  if constexpr (chain_for<T>(kAct) != Chain::kAny) {
    if (elementwise_size(a, p.channels_last) == 1) return launch<T, kResidual, Chain::kAny, kScaled>(p, stream);
  }
  return launch_elementwise("bias_residual_kernel", a, p.channels_last, stream);
}

template <typename T, Chain kAct, bool kScaled>
Status launch_act(const BiasResidualParams& p, cudaStream_t stream) {
  return p.residual != nullptr ? launch<T, true, kAct, kScaled>(p, stream) : launch<T, false, kAct, kScaled>(p, stream);
}

template <typename T, bool kScaled>
Status launch_chain(const BiasResidualParams& p, cudaStream_t stream) {
  switch (chain_kind(p.act)) {
    case Chain::kNone:
    case Chain::kRelu: return launch_act<T, Chain::kRelu, kScaled>(p, stream);
    default: return launch_act<T, Chain::kAny, kScaled>(p, stream);
  }
}

}  // namespace

Status run_bias_residual(const BiasResidualParams& p, cudaStream_t stream) {
  if (p.n * p.c >= (int64_t(1) << 32)) {
    return Status::Unsupported("bias_residual_kernel", "x has too many samples and channels");
  }
  if (p.scaled != nullptr) return launch_chain<float, true>(p, stream);
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, { status = launch_chain<T, false>(p, stream); });
  return status;
}

}  // namespace kgopt
