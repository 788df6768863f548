// Activations on the CPU.
#include "activation/activation_checks.h"
#include "common/cpu/block.h"

namespace kgopt {
namespace {

using namespace cpu;

// f(at, n) for blocks of all elements: longer ones where no buffer is needed.
template <typename T, typename F>
void each_block(int64_t total, const ActChain& chain, const F& f) {
  const bool direct = std::is_same_v<T, acc_t<T>> && chain.length == 1;
  const int64_t block = direct ? 8 * kBlock : kBlock;
  parallel((total + block - 1) / block, block, [&](int64_t i) { f(i * block, std::min(block, total - i * block)); });
}

Tensor activation(Tensor x, std::string act) {
  const char* const op = "activation";
  const Dtype dtype = check_dtype(op, "x", x);
  const ActChain chain = check_act(op, act);
  const MemoryFormat format = activation_format(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  dispatch_dtype(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    each_block<T>(x.numel(), chain, [&](int64_t at, int64_t n) {
      alignas(64) acc_t<T> buffer[kBlock];
      acc_t<T>* const target = target_block(to + at, buffer);
      store_block(activate_chain(chain, view_block(from + at, buffer, n), target, n), to + at, n);
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
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const T* const gradient = static_cast<const T*>(dense_dy.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    each_block<T>(x.numel(), chain, [&](int64_t at, int64_t n) {
      alignas(64) acc_t<T> value[kBlock], buffer[kBlock], inner[kBlock];
      const acc_t<T>* const v = view_block(from + at, value, n);
      const acc_t<T>* const g = view_block(gradient + at, buffer, n);
      store_block(chain_gradient(chain, v, inner, g, target_block(to + at, buffer), n), to + at, n);
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
