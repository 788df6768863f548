// The backward of the third pipeline behind its convolution, on CUDA.
#include "norm_lse_backward.h"

#include "../common/workspace.h"
#include "groupnorm_api.h"

namespace kgopt {
namespace {

// [N, 1, *] of the statistics' dtype, as the forward gives it.
void check_reduced(const char* op, const char* arg, const Tensor& t, const Tensor& x) {
  IntArray shape = sizes_of(x);
  shape[1] = 1;
  check_same_device(op, arg, t, x);
  check_shape(op, arg, t, shape);
  KGOPT_CHECK(t.scalar_type() == stats_type(x), op, ": ", arg, " has dtype ", scalar_type_name(t.scalar_type()),
              ", expected the dtype of statistics, ", scalar_type_name(stats_type(x)));
}

std::tuple<Tensor, Tensor, Tensor> norm_lse_backward(Tensor dlse, Tensor x, Tensor lse, Tensor mean, Tensor rstd,
                                                     int64_t num_groups, OptTensor weight, OptTensor bias) {
  const char* const op = "group_norm_tanh_hardswish_residual_logsumexp_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  check_reduced(op, "dlse", dlse, x);
  check_reduced(op, "lse", lse, x);
  check_statistics(op, "mean", mean, x, {d.n, d.g});
  check_statistics(op, "rstd", rstd, x, {d.n, d.g});
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const DeviceInfo info = check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  const ScalarType type = affine_type(x, weight, bias);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  Tensor dweight = empty_like_shape(x, {d.c}, type), dbias = empty_like_shape(x, {d.c}, type);
  if (d.numel() == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  const Tensor dense = dense_in(x, format);
  const Tensor dense_dlse = dense_in(dlse, MemoryFormat::Contiguous);
  const Tensor dense_lse = dense_in(lse, MemoryFormat::Contiguous);
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  NormLseBackwardParams p;
  p.dims = d;
  p.x = dense.const_data_ptr();
  p.dlse = dense_dlse.const_data_ptr();
  p.lse = dense_lse.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  p.dweight = dweight.mutable_data_ptr();
  p.dbias = dbias.mutable_data_ptr();
  p.affine_dtype = check_dtype(op, "weight", dweight);
  plan_norm_lse_backward(&p, info.sm_count);
  Workspace workspace(x);
  const int64_t table = workspace.reserve(d.n * d.c * 4 * acc_size(d));
  const int64_t partials = workspace.reserve(d.n * p.slices * d.c * 2 * acc_size(d));
  const int64_t sums = workspace.reserve(d.n * d.c * 2 * acc_size(d));
  const int64_t terms = workspace.reserve(d.n * d.g * 2 * acc_size(d));
  workspace.allocate();
  AffineTableParams t;
  t.mean = dense_mean.const_data_ptr();
  t.rstd = dense_rstd.const_data_ptr();
  t.weight = data_or_null(w);
  t.bias = data_or_null(b);
  t.affine_dtype = affine_dtype(op, w, b);
  t.is_double = d.dtype == Dtype::kFloat64;
  t.n = d.n;
  t.c = d.c;
  t.g = d.g;
  t.table = workspace.at<void>(table);
  raise_on_error(op, run_affine_table(t, stream_of(x)));
  p.table = t.table;
  p.partial_sums = workspace.at<void>(partials);
  p.channel_sums = workspace.at<void>(sums);
  p.group_terms = workspace.at<void>(terms);
  raise_on_error(op, run_norm_lse_backward(p, stream_of(x)));
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_tanh_hardswish_residual_logsumexp_backward", TORCH_BOX(&kgopt::norm_lse_backward));
}
