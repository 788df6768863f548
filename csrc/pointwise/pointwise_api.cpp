// What stands between norms and convolutions, on CUDA.
#include "pointwise/pointwise_api.h"
#include "groupnorm/api/group_norm_api.h"
#include "pointwise/pointwise_checks.h"

namespace kgopt {

using torch::stable::accelerator::DeviceGuard;

void add_tail(const char* op, const Tensor& y, const OptTensor& bias, const ConvShape& shape, const ConvTail& tail) {
  const Tensor dense_bias = bias ? dense_in(*bias, MemoryFormat::Contiguous) : Tensor();
  BiasResidualParams p;
  p.y = y.mutable_data_ptr();
  p.bias = bias ? dense_bias.const_data_ptr() : nullptr;
  p.residual = tail.residual;
  p.n = shape.n;
  p.c = shape.c_out;
  p.s = shape.out[0] * shape.out[1] * shape.out[2];
  p.scale = tail.scale;
  p.act = tail.act;
  p.channels_last = shape.out_channels_last;
  p.dtype = shape.dtype;
  raise_on_error(op, run_bias_residual(p, stream_of(y)));
}

Tensor run_conv_add(const char* op, const Tensor& x, const Tensor& weight, OptTensor bias, const OptTensor& residual,
                    const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                    const IntArray& output_padding, int64_t groups, bool transposed, double divisor,
                    const std::string& act, const std::string& backend, Tensor* moments) {
  const ConvShape shape =
      check_conv_add(op, x, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = shape.out_channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
  const ConvArgs conv = conv_args(op, static_cast<int>(x.dim()) - 2, x, weight, bias, stride, padding, dilation,
                                  output_padding, groups, transposed, backend);
  // Kernels of our own add the bias to what they store, one of them does all of it; ATen's passes run far below the
  // speed of the memory in channels_last.
  const Tensor dense_residual = residual ? dense_in(*residual, format) : Tensor();
  ConvTail tail;
  tail.residual = residual ? dense_residual.const_data_ptr() : nullptr;
  tail.scale = 1 / divisor;
  tail.act = check_act(op, act);
  if (moments) {
    *moments = allocate_moments(x, shape.c_out);
    tail.moments = moments;
  }
  Tensor y = conv_forward(conv, &tail);
  if (!tail.left_bias) bias = std::nullopt;
  const bool nothing_left = !tail.left_rest || (!residual && divisor == 1 && tail.act.empty());
  if (y.numel() > 0 && (bias || !nothing_left)) add_tail(op, y, bias, shape, tail);
  if (moments && tail.left_moments) channel_moments_cuda(op, y, *moments);
  return y;
}

namespace {

Tensor conv_add(Tensor x, Tensor weight, OptTensor bias, OptTensor residual, IntArray stride, IntArray padding,
                IntArray dilation, IntArray output_padding, int64_t groups, bool transposed, double divisor,
                std::string act, std::string backend) {
  return run_conv_add("conv_add", x, weight, bias, residual, stride, padding, dilation, output_padding, groups,
                      transposed, divisor, act, backend, nullptr);
}

std::tuple<Tensor, Tensor> conv_add_moments(Tensor x, Tensor weight, OptTensor bias, OptTensor residual,
                                            IntArray stride, IntArray padding, IntArray dilation,
                                            IntArray output_padding, int64_t groups, bool transposed, double divisor,
                                            std::string act, std::string backend) {
  Tensor moments;
  const Tensor y = run_conv_add("conv_add_moments", x, weight, bias, residual, stride, padding, dilation,
                                output_padding, groups, transposed, divisor, act, backend, &moments);
  return {y, moments};
}

// A contiguous tensor is a batch of N * C images of one channel.
template <typename Params>
void set_batch(Params* p, const Tensor& x, MemoryFormat format) {
  const bool last = format != MemoryFormat::Contiguous;
  p->n = last ? x.size(0) : x.size(0) * x.size(1);
  p->c = last ? x.size(1) : 1;
}

template <typename Params>
void set_sizes(Params* p, const Tensor& x, MemoryFormat format) {
  set_batch(p, x, format);
  p->d = x.dim() == 5 ? x.size(2) : 1;
  p->h = x.size(x.dim() - 2);
  p->w = x.size(x.dim() - 1);
}

Tensor upsample_linear(Tensor x, OptTensor residual) {
  const char* const op = "upsample_linear";
  const IntArray sizes = check_upsample_linear(op, x, residual);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format), dense_residual = residual ? dense_in(*residual, format) : Tensor();
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  UpsampleLinearParams p;
  p.x = dense.const_data_ptr();
  p.residual = residual ? dense_residual.const_data_ptr() : nullptr;
  p.y = y.mutable_data_ptr();
  set_sizes(&p, x, format);
  p.double_depth = x.dim() == 5;
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
  UpsampleLinearBackwardParams p;
  p.dy = dense.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  set_sizes(&p, dx, format);
  p.double_depth = dx.dim() == 5;
  p.dtype = check_dtype(op, "dy", dy);
  raise_on_error(op, run_upsample_linear_backward(p, stream_of(dy)));
  return dx;
}

// Some channels of a channels_last tensor, as torch.cat's backward gives them: elements from one position to the next;
// 0 for any other tensor.
int64_t pitch_of_part(const Tensor& x) {
  if (x.size(1) == 1 || x.stride(1) != 1) return 0;
  const int64_t pitch = x.stride(x.dim() - 1);
  int64_t stride = pitch;
  for (int64_t i = x.dim() - 1; i > 1; --i) {
    if (x.stride(i) != stride) return 0;
    stride *= x.size(i);
  }
  return pitch >= x.size(1) && x.stride(0) == stride ? pitch : 0;
}

Tensor repeat_elements(const char* op, const Tensor& x, const IntArray& sizes, const IntArray& factors, bool backward) {
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const int64_t pitch = pitch_of_part(x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = pitch > 0 ? x : dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  UpsampleNearestParams p;
  p.from = dense.const_data_ptr();
  p.to = y.mutable_data_ptr();
  set_sizes(&p, backward ? y : x, format);
  p.pitch = pitch > 0 ? pitch : p.c;
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

// y of these sizes, by an op that goes from positions of y to positions of x: set_dim(p, at, i) for dim 2 + i of x,
// which is `at` of three.
template <typename Params, typename SetDim>
Tensor gather_positions(const char* op, const Tensor& x, const IntArray& sizes,
                        Status (*run)(const Params&, cudaStream_t), SetDim set_dim) {
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  Params p;
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  set_batch(&p, x, format);
  const int rank = static_cast<int>(x.dim()) - 2;
  for (int i = 0; i < rank; ++i) {
    const int at = 3 - rank + i;
    p.in[at] = x.size(2 + i);
    p.out[at] = sizes[2 + i];
    set_dim(&p, at, i);
  }
  p.dtype = check_dtype(op, "x", x);
  raise_on_error(op, run(p, stream_of(x)));
  return y;
}

Tensor max_pool(Tensor x, IntArray kernel, IntArray stride, IntArray padding) {
  const char* const op = "max_pool";
  const IntArray sizes = check_max_pool(op, x, kernel, stride, padding);
  return gather_positions(op, x, sizes, run_max_pool, [&](MaxPoolParams* p, int at, int i) {
    p->kernel[at] = kernel[i];
    p->stride[at] = stride[i];
    p->padding[at] = padding[i];
  });
}

Tensor upsample_conv_weight(Tensor weight, IntArray factors, int64_t groups, bool channels_last) {
  const char* const op = "upsample_conv_weight";
  const IntArray sizes = check_upsample_conv_weight(op, weight, factors, groups);
  const DeviceGuard guard(weight.get_device_index());
  check_gpu(op, weight);
  const MemoryFormat format = channels_last ? channels_last_format(weight.dim()) : MemoryFormat::Contiguous;
  Tensor to = empty_like_shape(weight, sizes, std::nullopt, format);
  UpsampleConvWeightParams p = upsample_conv_weight_params(weight, to, factors, groups, channels_last);
  p.dtype = check_dtype(op, "weight", weight);
  raise_on_error(op, run_upsample_conv_weight(p, stream_of(weight)));
  return to;
}

}  // namespace

Tensor pad_replicate_cuda(Tensor x, IntArray pad) {
  const char* const op = "pad_replicate";
  const int rank = static_cast<int>(x.dim()) - 2;
  return gather_positions(op, x, check_pad_replicate(op, x, pad), run_pad_replicate,
                          [&](PadReplicateParams* p, int at, int i) { p->before[at] = pad[2 * (rank - 1 - i)]; });
}

}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("conv_add", TORCH_BOX(&kgopt::conv_add));
  m.impl("conv_add_moments", TORCH_BOX(&kgopt::conv_add_moments));
  m.impl("upsample_linear", TORCH_BOX(&kgopt::upsample_linear));
  m.impl("upsample_linear_backward", TORCH_BOX(&kgopt::upsample_linear_backward));
  m.impl("upsample_nearest", TORCH_BOX(&kgopt::upsample_nearest));
  m.impl("upsample_nearest_backward", TORCH_BOX(&kgopt::upsample_nearest_backward));
  m.impl("pad_replicate", TORCH_BOX(&kgopt::pad_replicate_cuda));
  m.impl("max_pool", TORCH_BOX(&kgopt::max_pool));
  m.impl("upsample_conv_weight", TORCH_BOX(&kgopt::upsample_conv_weight));
}
