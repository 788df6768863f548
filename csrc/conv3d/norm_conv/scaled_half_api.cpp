// fp32 tensors as scaled fp16, convolutions of these, and their gradients, on CUDA.
#include "conv3d/norm_conv/scaled_half_call.h"

#include "conv3d/api/gradients.h"
#include "conv3d/norm_conv/scaled_half.h"
#include "groupnorm/api/checks.h"
#include "groupnorm/api/group_norm_api.h"
#include "layout/layout_api.h"
#include "pointwise/pointwise_api.h"
#include "pointwise/pointwise_checks.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

const std::string kAutoBackend = "auto";

struct __attribute__((visibility("hidden"))) ScaledWeight {
  Tensor half;     // of the weight's sizes, in channels_last
  Tensor factors;  // [C, 2] of the results, which are too large by their product
};

// For a convolution of a tensor, or with of_gradient for the gradient of its input, whose `inverse` is the result's.
ScaledWeight scale_weight(const char* op, const Tensor& weight, const Tensor& inverse, bool of_gradient) {
  const int rank = static_cast<int>(weight.dim()) - 2;
  ScaledHalfParams p;
  p.c_out = weight.size(0);
  p.c = weight.size(1);
  p.weight = static_cast<const float*>(weight.const_data_ptr());
  p.w_stride_out = weight.stride(0);
  p.w_stride_in = weight.stride(1);
  spatial_strides(weight, rank, p.w_stride_k);
  for (int i = 0; i < rank; ++i) p.kernel[3 - rank + i] = weight.size(2 + i);
  const Tensor powers = empty_like_shape(weight, {of_gradient ? p.c : 0}, ScalarType::Double);
  ScaledWeight scaled{empty_like_shape(weight, sizes_of(weight), ScalarType::Half, channels_last_format(rank + 2)),
                      empty_like_shape(weight, {of_gradient ? p.c : p.c_out, 2})};
  p.half_weight = scaled.half.mutable_data_ptr();
  p.factors = static_cast<float*>(scaled.factors.mutable_data_ptr());
  if (of_gradient) {
    p.powers = static_cast<double*>(powers.mutable_data_ptr());
    p.inverse_out = static_cast<const double*>(inverse.const_data_ptr());
    raise_on_error(op, run_scaled_weights_by_input(p, stream_of(weight)));
  } else {
    p.inverse = const_cast<double*>(static_cast<const double*>(inverse.const_data_ptr()));
    raise_on_error(op, run_scaled_weights(p, false, stream_of(weight)));
  }
  return scaled;
}

// act((half + bias + residual) / divisor), scaled back.
Tensor scaled_back(const char* op, const Tensor& half, const Tensor& factors, const void* bias,
                   const OptTensor& residual, double divisor, const ActChain& act) {
  const MemoryFormat format = channels_last_format(half.dim());
  const Tensor y = empty_like_shape(half, sizes_of(half), ScalarType::Float, format);
  const Tensor dense = dense_in(half, format), dense_residual = residual ? dense_in(*residual, format) : Tensor();
  BiasResidualParams tail;
  tail.y = y.mutable_data_ptr();
  tail.scaled = dense.const_data_ptr();
  tail.factors = static_cast<const float*>(factors.const_data_ptr());
  tail.bias = bias;
  tail.residual = residual ? dense_residual.const_data_ptr() : nullptr;
  tail.n = half.size(0);
  tail.c = half.size(1);
  tail.s = positions_of(half);
  tail.scale = 1 / divisor;
  tail.act = act;
  tail.channels_last = true;
  raise_on_error(op, run_bias_residual(tail, stream_of(y)));
  return y;
}

void check_tensor(const char* op, const char* arg, const Tensor& t, ScalarType expected) {
  KGOPT_CHECK(t.scalar_type() == expected, op, ": ", arg, " has dtype ", scalar_type_name(t.scalar_type()),
              ", expected ", scalar_type_name(expected));
}

void check_channels(const char* op, const char* arg, const Tensor& t, int64_t channels) {
  KGOPT_CHECK(channels % 8 == 0 && channels > 0, op, ": ", arg, " has shape ", shape_string(t),
              ", expected a multiple of 8 channels");
}

void check_precision(const char* op) {
  KGOPT_CHECK(resolve_allow_tf32(std::nullopt), op,
              ": torch.backends.cudnn.allow_tf32 is False, expected True: this op has TF32's digits");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> scaled_half(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       double eps, std::string act) {
  const char* const op = "scaled_half";
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  check_tensor(op, "x", x, ScalarType::Float);
  check_channels(op, "x", x, x.size(1));
  KGOPT_CHECK(x.numel() > 0, op, ": x has shape ", shape_string(x), ", expected at least one element");
  check_prologue(op, x, std::nullopt, num_groups, weight, bias, eps, act);
  check_precision(op);
  ScaledSource source;
  source.act = check_act(op, act);
  const char* const refusal = scaled_half_act_refusal(source.act);
  KGOPT_CHECK(refusal == nullptr, op, ": act is ", act, ", expected another one than ", refusal);
  const DeviceGuard guard(x.get_device_index());
  const Tensor mean = empty_like_shape(x, {x.size(0), num_groups}), rstd = empty_like_shape(x, sizes_of(mean));
  source.num_groups = num_groups;
  source.weight = weight;
  source.bias = bias;
  source.eps = eps;
  source.mean = &mean;
  source.rstd = &rstd;
  const ScaledTensor scaled = scale_half(op, x, source);
  return {scaled.half, scaled.inverse, mean, rstd};
}

// What both ops of a convolution are given.
ConvShape check_scaled_conv(const char* op, const Tensor& x, const Tensor& inverse, const Tensor& weight,
                            const OptTensor& bias, const IntArray& stride, const IntArray& padding,
                            const IntArray& dilation) {
  const int rank = static_cast<int>(stride.size());
  KGOPT_CHECK(rank == 2 || rank == 3, op, ": stride is ", list_string(stride), ", expected 2 or 3 values");
  check_tensor(op, "x", x, ScalarType::Half);
  check_tensor(op, "weight", weight, ScalarType::Float);
  const ConvShape shape =
      check_conv(op, x, weight, bias, stride, padding, dilation, IntArray(rank, 0), 1, false, rank, true);
  check_channels(op, "weight", weight, shape.c_in);
  check_channels(op, "weight", weight, shape.c_out);
  KGOPT_CHECK(!shape.is_empty(), op, ": x has shape ", shape_string(x),
              ", expected at least one element, and a result");
  KGOPT_CHECK(shape.kernel[0] * shape.kernel[1] * shape.kernel[2] <= kScaledMostTaps, op, ": weight has shape ",
              shape_string(weight), ", expected at most ", kScaledMostTaps, " taps");
  check_same_device(op, "inverse", inverse, x);
  check_tensor(op, "inverse", inverse, ScalarType::Double);
  check_shape(op, "inverse", inverse, {shape.c_in});
  check_precision(op);
  return shape;
}

Tensor conv_scaled_half(Tensor x, Tensor inverse, Tensor weight, OptTensor bias, OptTensor residual, IntArray stride,
                        IntArray padding, IntArray dilation) {
  const char* const op = "conv_scaled_half";
  const ConvShape shape = check_scaled_conv(op, x, inverse, weight, bias, stride, padding, dilation);
  if (residual) {
    check_same_device(op, "residual", *residual, x);
    check_tensor(op, "residual", *residual, ScalarType::Float);
    check_shape(op, "residual", *residual, shape.out_sizes);
  }
  const DeviceGuard guard(x.get_device_index());
  const ConvArgs args = conv_args(op, shape.rank, x, weight, bias, stride, padding, dilation, IntArray(shape.rank, 0),
                                  1, false, kAutoBackend);
  const ScaledTensor scaled{dense_in(x, channels_last_format(x.dim())), dense_in(inverse, MemoryFormat::Contiguous)};
  return conv_of_scaled(args, shape, scaled, residual, 1, ActChain());
}

ConvGradients conv_scaled_half_backward(Tensor dy, Tensor x, Tensor inverse, Tensor weight, IntArray stride,
                                        IntArray padding, IntArray dilation, std::vector<bool> mask) {
  const char* const op = "conv_scaled_half_backward";
  const ConvShape shape = check_scaled_conv(op, x, inverse, weight, std::nullopt, stride, padding, dilation);
  check_same_device(op, "dy", dy, x);
  check_tensor(op, "dy", dy, ScalarType::Float);
  check_shape(op, "dy", dy, shape.out_sizes);
  KGOPT_CHECK(mask.size() == 3, op, ": mask has ", mask.size(), " values, expected 3");
  const DeviceGuard guard(x.get_device_index());
  const Tensor half_x = aligned(dense_in(x, channels_last_format(x.dim())));
  const IntArray zeros(shape.rank, 0);
  const ConvArgs args =
      conv_args(op, shape.rank, half_x, weight, std::nullopt, stride, padding, dilation, zeros, 1, false, kAutoBackend);
  WgradPlan plan;
  if (mask[1]) {
    plan = plan_wgrad(problem_of(args, shape, ConvEpilogue::kStore), limits_of(args));
    KGOPT_CHECK(plan.refusal == nullptr, op, ": no kernel for the gradient of weight: ", plan.refusal);
  }
  ScaledSource source;
  std::optional<Tensor> dbias;
  if (mask[2]) dbias = conv_bias_gradient(op, aligned(dense_in(dy, channels_last_format(dy.dim()))), shape);
  if (mask[2] && !dbias) {  // from the means
    dbias = empty_like_shape(dy, {shape.c_out});
    source.sums = &*dbias;
  }
  const ScaledTensor of_dy = scale_half(op, dy, source);
  SomeConvGradients result;
  if (mask[1]) {
    // By ATen it would be rounded to fp16: of so many products that may be its largest error.
    const Tensor of_x = dense_in(inverse, MemoryFormat::Contiguous);
    WgradSumParams sum{};
    sum.inverse[0] = static_cast<const double*>(of_dy.inverse.const_data_ptr());
    sum.inverse[1] = static_cast<const double*>(of_x.const_data_ptr());
    result[1] = conv_wgrad(op, of_dy.half, half_x, weight, shape, plan, sum);
  }
  if (mask[0]) {
    const ScaledWeight scaled = scale_weight(op, weight, of_dy.inverse, true);
    const Tensor half_dx = std::get<0>(conv_backward(of_dy.half, half_x, scaled.half, stride, padding, dilation, zeros,
                                                     1, false, {true, false, false}, kAutoBackend, std::nullopt));
    result[0] = scaled_back(op, half_dx, scaled.factors, nullptr, std::nullopt, 1, ActChain());
  }
  result[2] = dbias;
  return all_gradients(dy, result);
}

}  // namespace

ScaledTensor scale_half(const char* op, const Tensor& given_x, const ScaledSource& source) {
  const MemoryFormat format = channels_last_format(given_x.dim());
  const Tensor x = aligned(dense_in(given_x, format));
  ScaledHalfParams p;
  p.x = static_cast<const float*>(x.const_data_ptr());
  p.n = x.size(0);
  p.c = x.size(1);
  p.s = positions_of(x);
  p.sm_count = check_gpu(op, x).sm_count;
  p.pads = source.pad != nullptr;
  if (p.pads) p.pad = *source.pad;
  p.groups = source.num_groups;
  if (source.num_groups > 0) p.act = source.act;

  const Tensor moments = allocate_moments(x, p.c);
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(scaled_half_partial_bytes(p));
  const int64_t range = workspace.reserve(p.n * p.c * 2 * sizeof(float));
  const int64_t table = source.num_groups > 0 ? workspace.reserve(p.n * p.c * 4 * sizeof(float)) : 0;
  const int64_t scale = workspace.reserve(p.c * sizeof(float));
  workspace.allocate();
  ScaledTensor scaled;
  scaled.inverse = empty_like_shape(x, {p.c}, ScalarType::Double);
  p.partials = workspace.at<void>(partials);
  p.moments = static_cast<float*>(moments.mutable_data_ptr());
  p.range = workspace.at<float>(range);
  p.scale = workspace.at<float>(scale);
  p.inverse = static_cast<double*>(scaled.inverse.mutable_data_ptr());
  if (source.sums) p.sums = static_cast<float*>(source.sums->mutable_data_ptr());
  raise_on_error(op, run_channel_ranges(p, stream_of(x)));
  if (source.num_groups > 0) {
    moments_table_cuda(op, moments, source.num_groups, source.weight, source.bias, source.eps,
                       workspace.at<void>(table));
    p.table = workspace.at<float>(table);
    if (source.mean) p.mean = static_cast<float*>(source.mean->mutable_data_ptr());
    if (source.rstd) p.rstd = static_cast<float*>(source.rstd->mutable_data_ptr());
  }
  scaled.half = empty_like_shape(x, p.pads ? source.padded_sizes : sizes_of(x), ScalarType::Half, format);
  p.half_x = scaled.half.mutable_data_ptr();
  raise_on_error(op, run_scaled_inputs(p, stream_of(x)));
  return scaled;
}

Tensor conv_of_scaled(const ConvArgs& a, const ConvShape& shape, ScaledTensor x, const OptTensor& residual,
                      double divisor, const ActChain& act) {
  const ScaledWeight weight = scale_weight(a.op, a.weight, x.inverse, false);
  const Tensor y = conv_forward({a.op, x.half, weight.half, std::nullopt, a.stride, a.padding, a.dilation,
                                 a.output_padding, a.groups, a.transposed, a.rank, kAutoBackend, std::nullopt});
  x.half = Tensor();
  const Tensor bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  return scaled_back(a.op, y, weight.factors, a.bias ? bias.const_data_ptr() : nullptr, residual, divisor, act);
}

}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("scaled_half", TORCH_BOX(&kgopt::scaled_half));
  m.impl("conv_scaled_half", TORCH_BOX(&kgopt::conv_scaled_half));
  m.impl("conv_scaled_half_backward", TORCH_BOX(&kgopt::conv_scaled_half_backward));
}
