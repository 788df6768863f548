// The backward of the third pipeline behind its convolution, on CUDA.
#include "groupnorm/lse_backward/lse_backward.h"

#include "groupnorm/api/group_norm_api.h"

namespace kgopt {
namespace {

// [N, 1, *] of the statistics' dtype, as the forward gives its result.
void check_dlse(const char* op, const Tensor& dlse, const Tensor& x) {
  IntArray shape = sizes_of(x);
  shape[1] = 1;
  check_same_device(op, "dlse", dlse, x);
  check_shape(op, "dlse", dlse, shape);
  KGOPT_CHECK(dlse.scalar_type() == stats_type(x), op, ": dlse has dtype ", scalar_type_name(dlse.scalar_type()),
              ", expected the dtype of statistics, ", scalar_type_name(stats_type(x)));
}

// `in_place`: dx is x, which is dense. Each thread has read its elements before it stores them.
std::tuple<Tensor, Tensor, Tensor> norm_lse_gradients(const char* op, const Tensor& dlse, const Tensor& x,
                                                      const Tensor& mean, const Tensor& rstd, int64_t num_groups,
                                                      const OptTensor& weight, const OptTensor& bias, bool in_place) {
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  check_dlse(op, dlse, x);
  check_group_statistics(op, mean, rstd, x, d);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const DeviceInfo info = check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  const auto gradients = in_place ? std::tuple_cat(std::make_tuple(x), allocate_affine_gradients(x, d, weight, bias))
                                  : allocate_gradients(x, d, weight, bias);
  if (d.numel() == 0) return gradients;
  const Tensor dense = dense_in(x, format);
  KGOPT_CHECK(!in_place || dense.const_data_ptr() == x.const_data_ptr(), op, ": x is not dense");
  const Tensor dense_dlse = dense_in(dlse, MemoryFormat::Contiguous);
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  NormLseBackwardParams p;
  p.dims = d;
  p.x = dense.const_data_ptr();
  p.dlse = dense_dlse.const_data_ptr();
  bool aligned = true;
  for (const void* t : {p.x, p.dlse, std::get<0>(gradients).const_data_ptr()}) {
    aligned = aligned && reinterpret_cast<uintptr_t>(t) % 16 == 0;
  }
  p.plan = plan_norm_lse_backward(d, aligned, info.sm_count);
  p.slices = p.plan.slices;
  p.slice_length = p.plan.slice_length;
  Workspace workspace(x);
  const int64_t shares = workspace.reserve(d.n * d.s * acc_size(d));
  const int64_t shifts = workspace.reserve(d.n * d.s * acc_size(d));
  prepare_backward_passes(op, x, dense_mean, dense_rstd, w, b, gradients, &workspace, &p);
  p.shares = workspace.at<void>(shares);
  p.shifts = workspace.at<void>(shifts);
  raise_on_error(op, run_norm_lse_backward(p, stream_of(x)));
  return gradients;
}

std::tuple<Tensor, Tensor, Tensor> norm_lse_backward(Tensor dlse, Tensor x, Tensor mean, Tensor rstd,
                                                     int64_t num_groups, OptTensor weight, OptTensor bias) {
  return norm_lse_gradients("group_norm_tanh_hardswish_residual_logsumexp_backward", dlse, x, mean, rstd, num_groups,
                            weight, bias, false);
}

std::tuple<Tensor, Tensor> norm_lse_backward_in_place(Tensor dlse, Tensor x, Tensor mean, Tensor rstd,
                                                      int64_t num_groups, OptTensor weight, OptTensor bias) {
  const auto [dx, dweight, dbias] = norm_lse_gradients("group_norm_tanh_hardswish_residual_logsumexp_backward_", dlse,
                                                       x, mean, rstd, num_groups, weight, bias, true);
  return {dweight, dbias};
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_tanh_hardswish_residual_logsumexp_backward", TORCH_BOX(&kgopt::norm_lse_backward));
  m.impl("group_norm_tanh_hardswish_residual_logsumexp_backward_", TORCH_BOX(&kgopt::norm_lse_backward_in_place));
}
