// The gradient of a PReLU behind a norm on CUDA, a pass ahead of the norm's own backward.
#include "groupnorm/api/group_norm_api.h"

namespace kgopt {
namespace {

std::tuple<Tensor, Tensor> group_norm_prelu_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor slope,
                                                     int64_t num_groups, OptTensor weight, OptTensor bias,
                                                     OptTensor residual) {
  const char* const op = "group_norm_prelu_backward";
  const GroupNormDims d = check_prelu_backward(op, dy, x, mean, rstd, slope, num_groups, weight, bias, residual);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const DeviceInfo info = check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  Tensor dz = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  Tensor dslope = empty_like_shape(slope, sizes_of(slope));
  if (d.numel() == 0) {
    torch::stable::zero_(dslope);
    return {dz, dslope};
  }
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  const OptTensor added = residual ? OptTensor(aligned(dense_in(*residual, format))) : std::nullopt;
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  const Tensor dense_slope = dense_in(slope, MemoryFormat::Contiguous);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  PReluGradientParams p;
  p.x = dense.const_data_ptr();
  p.dy = dense_dy.const_data_ptr();
  p.residual = data_or_null(added);
  p.dz = dz.mutable_data_ptr();
  p.affine.mean = dense_mean.const_data_ptr();
  p.affine.rstd = dense_rstd.const_data_ptr();
  p.affine.weight = data_or_null(w);
  p.affine.bias = data_or_null(b);
  p.affine.affine_dtype = affine_dtype(op, w, b);
  p.affine.c = d.c;
  p.affine.g = d.g;
  p.slopes = slopes_of(op, dense_slope, d);
  p.dims = d;
  p.dslope = dslope.mutable_data_ptr();
  plan_prelu_gradient(&p, info.sm_count);
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(d.n * p.slices * d.c * acc_size(d));
  workspace.allocate();
  p.partial_sums = workspace.at<void>(partials);
  raise_on_error(op, run_prelu_gradient(p, stream_of(x)));
  return {dz, dslope};
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_prelu_backward", TORCH_BOX(&kgopt::group_norm_prelu_backward));
}
