// Activations on CUDA.
#include "activation/activation.h"
#include "activation/activation_checks.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

Tensor activation(Tensor x, std::string act) {
  const char* const op = "activation";
  ActivationParams p;
  p.dtype = check_dtype(op, "x", x);
  p.act = check_act(op, act);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = activation_format(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.numel = x.numel();
  raise_on_error(op, run_activation(p, static_cast<cudaStream_t>(current_stream(x))));
  return y;
}

Tensor activation_backward(Tensor dy, Tensor x, std::string act) {
  const char* const op = "activation_backward";
  ActivationParams p;
  check_activation_backward(op, dy, x);
  p.dtype = check_dtype(op, "x", x);
  p.act = check_act(op, act);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = activation_format(x);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  p.x = dense.const_data_ptr();
  p.dy = dense_dy.const_data_ptr();
  p.y = dx.mutable_data_ptr();
  p.numel = x.numel();
  raise_on_error(op, run_activation_backward(p, static_cast<cudaStream_t>(current_stream(x))));
  return dx;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("activation", TORCH_BOX(&kgopt::activation));
  m.impl("activation_backward", TORCH_BOX(&kgopt::activation_backward));
}
