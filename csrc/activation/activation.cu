// Pointwise chains on their own, and their derivatives.
#include "../common/pointwise.cuh"
#include "../common/traverse.cuh"
#include "activation.h"

namespace kgopt {
namespace {

template <typename T, Chain kAct>
struct Activate {
  using Element = T;
  static constexpr int kInputs = 1;
  struct Coef {};
  ActChain act;
  __device__ Coef load(int64_t) const { return {}; }
  __device__ acc_t<T> apply(Coef, acc_t<T> x, acc_t<T>) const { return apply_chain<kAct>(act, x); }
};

template <typename T, Chain kAct>
struct ActivateGradient {
  using Element = T;
  static constexpr int kInputs = 2;
  struct Coef {};
  ActChain act;
  __device__ Coef load(int64_t) const { return {}; }
  __device__ acc_t<T> apply(Coef, acc_t<T> x, acc_t<T> dy) const {
    acc_t<T> value;
    return dy * chain_slope<kAct>(act, x, &value);
  }
};

template <template <typename, Chain> class F, typename T, Chain kAct>
Status launch(const char* name, const ActivationParams& p, cudaStream_t stream) {
  ElementwiseArgs<F<T, kAct>> a{};
  a.x = static_cast<const T*>(p.x);
  a.second = static_cast<const T*>(p.dy);
  a.y = static_cast<T*>(p.y);
  a.n = a.c = 1;
  a.s = p.numel;
  a.f.act = p.act;
  return launch_elementwise(name, a, false, stream);
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
