// What follows a convolution: its bias, a residual, a division and activations, in one pass over its output.
#include "common/floor.cuh"
#include "common/traverse.cuh"
#include "pointwise/pointwise.h"

namespace kgopt {
namespace {

template <typename T, bool kResidual, Chain kAct>
struct AddBias {
  using Element = T;
  static constexpr int kInputs = kResidual ? 2 : 1;
  static constexpr bool kWalks = kAct == Chain::kAny, kHasScalars = kWalks;
  struct Coef {
    acc_t<T> bias;
  };
  const T* bias;
  uint32_t channels;
  acc_t<T> scale;
  ActChain act;
  // Rows are (sample, channel) pairs; there are fewer than 2^32 of them, which the launcher checks.
  __device__ Coef load(int64_t row) const {
    return {bias == nullptr ? acc_t<T>(0) : to_acc(bias[static_cast<uint32_t>(row) % channels])};
  }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf coef, const acc_t<T> (&y)[kSize], const acc_t<T> (&residual)[kSize],
                                        acc_t<T> (&out)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) out[j] = (y[j] + coef(j).bias + (kResidual ? residual[j] : acc_t<T>(0))) * scale;
    if constexpr (kAct == Chain::kRelu) {
      apply_chain<kAct, kIsCoarse<T>>(floored(act), out);
    } else {
      apply_chain<kAct, kIsCoarse<T>>(act, out);
    }
  }
};

template <typename T, bool kResidual, Chain kAct>
Status launch(const BiasResidualParams& p, cudaStream_t stream) {
  ElementwiseArgs<AddBias<T, kResidual, chain_for<T>(kAct)>> a{};
  a.x = a.y = static_cast<T*>(p.y);
  a.second = static_cast<const T*>(p.residual);
  a.n = p.n;
  a.c = p.c;
  a.s = p.s;
  a.f.bias = static_cast<const T*>(p.bias);
  a.f.channels = static_cast<uint32_t>(p.c);
  a.f.scale = static_cast<acc_t<T>>(p.scale);
  a.f.act = p.act;
  if constexpr (chain_for<T>(kAct) != Chain::kAny) {
    if (elementwise_size(a, p.channels_last) == 1) return launch<T, kResidual, Chain::kAny>(p, stream);
  }
  return launch_elementwise("bias_residual_kernel", a, p.channels_last, stream);
}

template <typename T, Chain kAct>
Status launch_act(const BiasResidualParams& p, cudaStream_t stream) {
  return p.residual != nullptr ? launch<T, true, kAct>(p, stream) : launch<T, false, kAct>(p, stream);
}

}  // namespace

Status run_bias_residual(const BiasResidualParams& p, cudaStream_t stream) {
  if (p.n * p.c >= (int64_t(1) << 32)) {
    return Status::Unsupported("bias_residual_kernel", "x has too many samples and channels");
  }
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    switch (chain_kind(p.act)) {
      case Chain::kNone:
      case Chain::kRelu: status = launch_act<T, Chain::kRelu>(p, stream); break;
      default: status = launch_act<T, Chain::kAny>(p, stream);
    }
  });
  return status;
}

}  // namespace kgopt
