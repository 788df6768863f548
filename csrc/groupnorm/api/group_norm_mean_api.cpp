// Norms of which only a reduction is wanted, so that the normalized tensor is never stored, on CUDA.
#include "groupnorm/api/statistics.h"
#include "reduce/reduce.h"

namespace kgopt {

using torch::stable::accelerator::DeviceGuard;

std::tuple<Tensor, Tensor, Tensor> norm_residual_logsumexp_cuda(const char* op, const Tensor& any_x, int64_t num_groups,
                                                                const OptTensor& weight, const OptTensor& bias,
                                                                double eps, const OptTensor& shift, bool given) {
  const Tensor x = dense_in(any_x, MemoryFormat::Contiguous);
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias), own_shift = dense_or_none(shift);
  Statistics s;
  if (given) s = allocate_statistics(x, d, shift.has_value());
  IntArray sizes = sizes_of(x);
  sizes[1] = 1;
  Tensor y = empty_like_shape(x, sizes);
  Workspace workspace(x);
  void* table = nullptr;
  compute_statistics(op, x, d, ActChain(), eps, w, b, true, shift.has_value(), &s, &workspace, &table, own_shift);
  ReduceParams p;
  p.x = x.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.outer = d.n;
  p.reduced = d.c;
  p.inner = d.s;
  p.dtype = d.dtype;
  raise_on_error(op,
                 run_norm_residual_logsumexp(p, table, data_or_null(own_shift),
                                             shift ? check_dtype(op, "bias", *shift) : Dtype::kFloat32, stream_of(x)));
  return {y, s.mean, s.rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_cuda(const Tensor& x, int64_t num_groups,
                                                                const OptTensor& weight, const OptTensor& bias,
                                                                double eps, const OptTensor& shift, bool given) {
  const char* const op = "group_norm_mean";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const DeviceGuard guard(x.get_device_index());
  Tensor out = empty_like_shape(x, {d.n}, given ? stats_type(x) : x.scalar_type());
  if (d.numel() == 0) {
    Statistics s;
    if (given) s = empty_statistics(x, d, true);
    torch::stable::fill_(out, std::nan(""));  // the mean of nothing
    return {out, s.channel_mean, s.mean, s.rstd};
  }
  const Tensor dense = dense_in(x, format_of(x, d));
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  Statistics s;
  if (given) s = allocate_statistics(x, d, true);
  Workspace workspace(x);
  compute_statistics(op, dense, d, ActChain(), eps, w, b, false, true, &s, &workspace, nullptr, dense_or_none(shift));
  GroupNormMeanParams p;
  p.channel_mean = s.channel_mean_data;
  p.mean = s.mean_data;
  p.rstd = s.rstd_data;
  p.weight = data_or_null(w);
  p.bias = data_or_null(b);
  p.affine_dtype = affine_dtype(op, w, b);
  p.is_double = d.dtype == Dtype::kFloat64;
  p.n = d.n;
  p.c = d.c;
  p.g = d.g;
  p.out = out.mutable_data_ptr();
  p.out_dtype = check_dtype(op, "x", out);
  raise_on_error(op, run_group_norm_mean(p, stream_of(x)));
  return {out, s.channel_mean, s.mean, s.rstd};
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_fwd(Tensor x, int64_t num_groups, OptTensor weight,
                                                               OptTensor bias, double eps) {
  return group_norm_mean_cuda(x, num_groups, weight, bias, eps);
}

Tensor group_norm_mean(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps) {
  return std::get<0>(group_norm_mean_cuda(x, num_groups, weight, bias, eps, std::nullopt, /*given=*/false));
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_mean", TORCH_BOX(&kgopt::group_norm_mean));
  m.impl("group_norm_mean_fwd", TORCH_BOX(&kgopt::group_norm_mean_fwd));
}
