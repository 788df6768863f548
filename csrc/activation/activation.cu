// Pointwise chains on their own, and their derivatives.
#include "activation/activation.h"
#include "common/device/pointwise.cuh"
#include "common/device/traverse.cuh"

namespace kgopt {
namespace {

template <typename T, Chain kAct>
struct Activate {
  using Element = T;
  static constexpr int kInputs = 1;
  static constexpr bool kWalks = kAct == Chain::kAny, kHasScalars = kWalks;
  struct Coef {};
  ActChain act;
  __device__ Coef load(int64_t) const { return {}; }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf, const acc_t<T> (&x)[kSize], const acc_t<T> (&)[kSize],
                                        acc_t<T> (&y)[kSize]) const {
#pragma unroll
    for (int j = 0; j < kSize; ++j) y[j] = x[j];
    apply_chain<kAct, kIsCoarse<T>>(act, y);
  }
};

template <typename T, Chain kAct>
struct ActivateGradient {
  using Element = T;
  static constexpr int kInputs = 2;
  static constexpr bool kWalks = kAct == Chain::kAny, kHasScalars = kWalks;
  struct Coef {};
  ActChain act;
  __device__ Coef load(int64_t) const { return {}; }
  template <int kSize, typename CoefOf>
  __device__ __forceinline__ void apply(CoefOf, const acc_t<T> (&x)[kSize], const acc_t<T> (&dy)[kSize],
                                        acc_t<T> (&dx)[kSize]) const {
    acc_t<T> values[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      values[j] = x[j];
      dx[j] = dy[j];
    }
    multiply_slopes<kAct, kIsCoarse<T>>(act, values, dx);
  }
};

template <template <typename, Chain> class F, typename T, Chain kAct>
Status launch(const char* name, const ActivationParams& p, cudaStream_t stream) {
  ElementwiseArgs<F<T, chain_for<T>(kAct)>> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = static_cast<const T*>(p.dy);
  a.y = static_cast<T*>(p.y);
  a.n = a.c = 1;
  a.s = p.numel;
  a.f.act = p.act;
  if constexpr (!F<T, chain_for<T>(kAct)>::kHasScalars) {
    if (elementwise_size(a, false) == 1) return launch<F, T, Chain::kAny>(name, p, stream);
  }
  return launch_elementwise_rows(name, a, stream);
}

template <template <typename, Chain> class F>
Status dispatch(const char* name, const ActivationParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dtype, T, {
    switch (chain_kind(p.act)) {
      case Chain::kRelu: status = launch<F, T, Chain::kRelu>(name, p, stream); break;
      case Chain::kSilu: status = launch<F, T, Chain::kSilu>(name, p, stream); break;
      default: status = launch<F, T, Chain::kAny>(name, p, stream);
    }
  });
  return status;
}

}  // namespace

Status run_activation(const ActivationParams& p, cudaStream_t stream) {
  return dispatch<Activate>("activation_kernel", p, stream);
}

Status run_activation_backward(const ActivationParams& p, cudaStream_t stream) {
  return dispatch<ActivateGradient>("activation_backward_kernel", p, stream);
}

}  // namespace kgopt
