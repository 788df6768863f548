// The backward of a norm, a sum and a PReLU or LeakyReLU on CUDA.
#include "groupnorm/api/group_norm_api.h"

namespace kgopt {
namespace {

// dx, dz, dweight and dbias; p has the slope or the slopes and where their gradient goes.
std::tuple<Tensor, Tensor, Tensor, Tensor> run_sum_backward(const char* op, const Tensor& dy, const Tensor& x,
                                                            const Tensor& mean, const Tensor& rstd,
                                                            const GroupNormDims& d, const OptTensor& weight,
                                                            const OptTensor& bias, const OptTensor& residual,
                                                            PReluBwdParams p) {
  const DeviceInfo info = check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  Tensor dz = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  const auto gradients = allocate_gradients(x, d, weight, bias);
  const auto& [dx, dweight, dbias] = gradients;
  if (d.numel() == 0) return {dx, dz, dweight, dbias};
  const Tensor dense = aligned(dense_in(x, format)), dense_dy = aligned(dense_in(dy, format));
  const OptTensor added = residual ? OptTensor(aligned(dense_in(*residual, format))) : std::nullopt;
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  p.dy = dense_dy.const_data_ptr();
  p.residual = data_or_null(added);
  p.dz = dz.mutable_data_ptr();
  p.norm.x = dense.const_data_ptr();
  p.norm.dy = dz.const_data_ptr();
  p.norm.dims = d;
  plan_prelu_bwd(&p, info.sm_count);
  Workspace workspace(x);
  const int64_t slope_sums = workspace.reserve(p.dslope ? d.c * acc_size(d) : 0);
  prepare_backward_passes(op, x, dense_mean, dense_rstd, w, b, gradients, &workspace, &p.norm);
  p.slope_sums = workspace.at<void>(slope_sums);
  raise_on_error(op, run_prelu_bwd(p, stream_of(x)));
  return {dx, dz, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> group_norm_prelu_backward(Tensor dy, Tensor x, Tensor mean,
                                                                             Tensor rstd, Tensor slope,
                                                                             int64_t num_groups, OptTensor weight,
                                                                             OptTensor bias, OptTensor residual) {
  const char* const op = "group_norm_prelu_backward";
  const GroupNormDims d = check_prelu_backward(op, dy, x, mean, rstd, slope, num_groups, weight, bias, residual);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  Tensor dslope = empty_like_shape(slope, sizes_of(slope));
  if (d.numel() == 0) torch::stable::zero_(dslope);
  const Tensor dense_slope = dense_in(slope, MemoryFormat::Contiguous);
  PReluBwdParams p;
  p.slopes = slopes_of(op, dense_slope, d);
  p.dslope = dslope.mutable_data_ptr();
  const auto [dx, dz, dweight, dbias] = run_sum_backward(op, dy, x, mean, rstd, d, weight, bias, residual, p);
  return {dx, dz, dslope, dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_add_leaky_relu_backward(Tensor dy, Tensor x, Tensor residual,
                                                                              Tensor mean, Tensor rstd,
                                                                              int64_t num_groups, OptTensor weight,
                                                                              OptTensor bias, double slope) {
  const char* const op = "group_norm_add_leaky_relu_backward";
  const GroupNormDims d = check_sum_backward(op, dy, x, mean, rstd, num_groups, weight, bias, residual);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  PReluBwdParams p;
  p.slope = slope;
  return run_sum_backward(op, dy, x, mean, rstd, d, weight, bias, residual, p);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_prelu_backward", TORCH_BOX(&kgopt::group_norm_prelu_backward));
  m.impl("group_norm_add_leaky_relu_backward", TORCH_BOX(&kgopt::group_norm_add_leaky_relu_backward));
}
