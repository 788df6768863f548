// Activations on the CPU.
#include "../common/cpu_block.h"
#include "activation_checks.h"

namespace kgopt {
namespace {

using namespace cpu;

Tensor activation(Tensor x, std::string act) {
  const char* const op = "activation";
  const Dtype dtype = check_dtype(op, "x", x);
  const ActChain chain = check_act(op, act);
  const MemoryFormat format = activation_format(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  const int64_t total = x.numel();
  dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    torch::stable::parallel_for(0, (total + kBlock - 1) / kBlock, 16, [&](int64_t begin, int64_t end) {
      acc_t<T> buffer[kBlock];
      for (int64_t at = begin * kBlock; at < std::min(total, end * kBlock); at += kBlock) {
        const int64_t n = std::min(kBlock, total - at);
        load_block(from + at, buffer, n);
        activate_chain(chain, buffer, n);
        store_block(buffer, to + at, n);
      }
    });
  });
  return y;
}

Tensor activation_backward(Tensor dy, Tensor x, std::string act) {
  const char* const op = "activation_backward";
  check_activation_backward(op, dy, x);
  const Dtype dtype = check_dtype(op, "x", x);
  const ActChain chain = check_act(op, act);
  const MemoryFormat format = activation_format(x);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    torch::stable::parallel_for(0, x.numel(), 4096, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Acc value;
        to[i] =
            static_cast<T>(static_cast<Acc>(gradient[i]) * chain_derivative(chain, static_cast<Acc>(from[i]), &value));
      }
    });
  });
  return dx;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("activation", TORCH_BOX(&kgopt::activation));
  m.impl("activation_backward", TORCH_BOX(&kgopt::activation_backward));
}
