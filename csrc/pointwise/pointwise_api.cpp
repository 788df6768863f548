// What stands between norms and convolutions, on CUDA.
#include "pointwise.h"

#include "../conv3d/conv_call.h"
#include "pointwise_checks.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

cudaStream_t stream_of(const Tensor& x) { return static_cast<cudaStream_t>(current_stream(x)); }

Tensor conv_add(Tensor x, Tensor weight, OptTensor bias, OptTensor residual, IntArray stride, IntArray padding,
                IntArray dilation, IntArray output_padding, int64_t groups, bool transposed, double divisor) {
  const char* const op = "conv_add";
  const ConvShape shape =
      check_conv_add(op, x, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = shape.out_channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
  const std::string backend = "auto";
  const ConvArgs conv{op,
                      x,
                      weight,
                      bias,
                      stride,
                      padding,
                      dilation,
                      output_padding,
                      groups,
                      transposed,
                      static_cast<int>(x.dim()) - 2,
                      backend,
                      std::nullopt};
  // Kernels of our own add the bias to what they store; ATen's pass runs far below the speed of the memory in
  // channels_last.
  bool left_bias = false;
  Tensor y = conv_forward(conv, &left_bias);
  if (!left_bias) bias = std::nullopt;
  if ((!bias && !residual && divisor == 1) || y.numel() == 0) return y;
  const Tensor dense_bias = bias ? dense_in(*bias, MemoryFormat::Contiguous) : Tensor();
  const Tensor dense_residual = residual ? dense_in(*residual, format) : Tensor();
  BiasResidualParams p;
  p.y = y.mutable_data_ptr();
  p.bias = bias ? dense_bias.const_data_ptr() : nullptr;
  p.residual = residual ? dense_residual.const_data_ptr() : nullptr;
  p.n = shape.n;
  p.c = shape.c_out;
  p.s = shape.out[0] * shape.out[1] * shape.out[2];
  p.scale = 1 / divisor;
  p.channels_last = shape.out_channels_last;
  p.dtype = shape.dtype;
  raise_on_error(op, run_bias_residual(p, stream_of(x)));
  return y;
}

Tensor upsample_linear(Tensor x, OptTensor residual) {
  const char* const op = "upsample_linear";
  const IntArray sizes = check_upsample_linear(op, x, residual);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format), dense_residual = residual ? dense_in(*residual, format) : Tensor();
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  const bool last = format != MemoryFormat::Contiguous;
  UpsampleLinearParams p;
  p.x = dense.const_data_ptr();
  p.residual = residual ? dense_residual.const_data_ptr() : nullptr;
  p.y = y.mutable_data_ptr();
  p.n = last ? x.size(0) : x.size(0) * x.size(1);
  p.c = last ? x.size(1) : 1;
  p.double_depth = x.dim() == 5;
  p.d = p.double_depth ? x.size(2) : 1;
  p.h = x.size(x.dim() - 2);
  p.w = x.size(x.dim() - 1);
  p.dtype = check_dtype(op, "x", x);
  raise_on_error(op, run_upsample_linear(p, stream_of(x)));
  return y;
}

Tensor upsample_linear_backward(Tensor dy) {
  const char* const op = "upsample_linear_backward";
  const IntArray sizes = check_upsample_linear_backward(op, dy);
  const DeviceGuard guard(dy.get_device_index());
  check_gpu(op, dy);
  const MemoryFormat format = memory_format_of(dy);
  const Tensor dense = dense_in(dy, format);
  Tensor dx = empty_like_shape(dy, sizes, std::nullopt, format);
  const bool last = format != MemoryFormat::Contiguous;
  UpsampleLinearBackwardParams p;
  p.dy = dense.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  p.n = last ? dx.size(0) : dx.size(0) * dx.size(1);
  p.c = last ? dx.size(1) : 1;
  p.double_depth = dx.dim() == 5;
  p.d = p.double_depth ? dx.size(2) : 1;
  p.h = dx.size(dx.dim() - 2);
  p.w = dx.size(dx.dim() - 1);
  p.dtype = check_dtype(op, "dy", dy);
  raise_on_error(op, run_upsample_linear_backward(p, stream_of(dy)));
  return dx;
}

Tensor repeat_elements(const char* op, const Tensor& x, const IntArray& sizes, const IntArray& factors, bool backward) {
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  const Tensor& small = backward ? y : x;
  const bool last = format != MemoryFormat::Contiguous;
  UpsampleNearestParams p;
  p.from = dense.const_data_ptr();
  p.to = y.mutable_data_ptr();
  p.n = last ? small.size(0) : small.size(0) * small.size(1);
  p.c = last ? small.size(1) : 1;
  p.d = small.dim() == 5 ? small.size(2) : 1;
  p.h = small.size(small.dim() - 2);
  p.w = small.size(small.dim() - 1);
  for (size_t i = 0; i < factors.size(); ++i) p.factors[3 - factors.size() + i] = factors[i];
  p.backward = backward;
  p.dtype = check_dtype(op, "x", x);
  raise_on_error(op, run_upsample_nearest(p, stream_of(x)));
  return y;
}

Tensor upsample_nearest(Tensor x, IntArray factors) {
  const char* const op = "upsample_nearest";
  return repeat_elements(op, x, check_upsample_nearest(op, "x", x, factors, false), factors, false);
}

Tensor upsample_nearest_backward(Tensor dy, IntArray factors) {
  const char* const op = "upsample_nearest_backward";
  return repeat_elements(op, dy, check_upsample_nearest(op, "dy", dy, factors, true), factors, true);
}

Tensor max_pool(Tensor x, IntArray kernel, IntArray stride, IntArray padding) {
  const char* const op = "max_pool";
  const IntArray sizes = check_max_pool(op, x, kernel, stride, padding);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  const bool last = format != MemoryFormat::Contiguous;
  MaxPoolParams p;
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.n = last ? x.size(0) : x.size(0) * x.size(1);
  p.c = last ? x.size(1) : 1;
  const int rank = static_cast<int>(x.dim()) - 2;
  for (int i = 0; i < rank; ++i) {
    const int at = 3 - rank + i;
    p.in[at] = x.size(2 + i);
    p.out[at] = sizes[2 + i];
    p.kernel[at] = kernel[i];
    p.stride[at] = stride[i];
    p.padding[at] = padding[i];
  }
  p.dtype = check_dtype(op, "x", x);
  raise_on_error(op, run_max_pool(p, stream_of(x)));
  return y;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("conv_add", TORCH_BOX(&kgopt::conv_add));
  m.impl("upsample_linear", TORCH_BOX(&kgopt::upsample_linear));
  m.impl("upsample_linear_backward", TORCH_BOX(&kgopt::upsample_linear_backward));
  m.impl("upsample_nearest", TORCH_BOX(&kgopt::upsample_nearest));
  m.impl("upsample_nearest_backward", TORCH_BOX(&kgopt::upsample_nearest_backward));
  m.impl("max_pool", TORCH_BOX(&kgopt::max_pool));
}
