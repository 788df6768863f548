// y = act((pre_act(x) - mean) * rstd * weight + bias), one read and one write.
#include "../common/pointwise.cuh"
#include "../common/traverse.cuh"
#include "groupnorm.h"

namespace kgopt {
namespace {

template <typename T, Chain kPre, Chain kAct>
struct Normalize {
  using Element = T;
  using Acc = acc_t<T>;
  static constexpr int kInputs = 1;
  struct alignas(4 * sizeof(Acc) > 16 ? 16 : 4 * sizeof(Acc)) Coef {
    Acc mean, rstd, weight, bias;
  };
  const Coef* table;
  ActChain pre, act;
  bool add_input;

  __device__ Coef load(int64_t row) const {
    Coef c = table[row];
    c.weight *= c.rstd;
    return c;
  }
  // The mean is subtracted first: folded into the bias it would cancel only after rounding.
  __device__ Acc apply(const Coef& c, Acc x, Acc) const {
    const Acc y = apply_chain<kAct>(act, (apply_chain<kPre>(pre, x) - c.mean) * c.weight + c.bias);
    return add_input ? x + y : y;
  }
};

template <typename T, Chain kPre, Chain kAct>
Status launch_normalize(const NormalizeParams& p, cudaStream_t stream) {
  using F = Normalize<T, kPre, kAct>;
  ElementwiseArgs<F> a{};
  a.x = static_cast<const T*>(p.x);
  a.y = static_cast<T*>(p.y);
  a.n = p.dims.n;
  a.c = p.dims.c;
  a.s = p.dims.s;
  a.f.table = static_cast<const typename F::Coef*>(p.table);
  a.f.pre = p.pre_act;
  a.f.act = p.act;
  a.f.add_input = p.add_input;
  return launch_elementwise("normalize_kernel", a, p.dims.channels_last, stream, true);
}

}  // namespace

Status run_normalize(const NormalizeParams& p, cudaStream_t stream) {
  Status status;
  KGOPT_DISPATCH_DTYPE(p.dims.dtype, T, {
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, status = launch_normalize<T, kPre, kAct>(p, stream));
  });
  return status;
}

}  // namespace kgopt
