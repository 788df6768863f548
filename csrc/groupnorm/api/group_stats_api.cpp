// Statistics on CUDA: of groups, and of channels for norms that share them.
#include "groupnorm/api/statistics.h"

namespace kgopt {
using torch::stable::accelerator::DeviceGuard;

void compute_statistics(const char* op, const Tensor& x, const GroupNormDims& d, const ActChain& pre_act, double eps,
                        const OptTensor& weight, const OptTensor& bias, bool with_table, bool with_channel_mean,
                        Statistics* stats, Workspace* workspace, void** table, const OptTensor& shift) {
  const DeviceInfo info = check_gpu(op, x);
  GroupStatsParams p;
  p.x = x.const_data_ptr();
  p.dims = d;
  p.pre_act = pre_act;
  plan_group_stats(&p, with_channel_mean, info.sm_count);
  const int64_t partials = workspace->reserve(d.n * p.partials.slices * p.partials.rows * 3 * acc_size(d));
  const int64_t table_at = with_table ? workspace->reserve(d.n * d.c * 4 * acc_size(d)) : 0;
  std::optional<StatisticsSpace> space;
  if (!stats->mean_data) space.emplace(workspace, d, with_channel_mean);
  workspace->allocate();
  if (space) space->set(*workspace, with_channel_mean, stats);
  p.partials.data = workspace->at<void>(partials);
  raise_on_error(op, run_group_stats(p, stream_of(x)));

  GroupStatsFinalizeParams f;
  f.partials = p.partials;
  f.n = d.n;
  f.c = d.c;
  f.g = d.g;
  f.eps = eps;
  f.is_double = d.dtype == Dtype::kFloat64;
  f.mean = stats->mean_data;
  f.rstd = stats->rstd_data;
  f.channel_mean = stats->channel_mean_data;
  f.table = with_table ? workspace->at<void>(table_at) : nullptr;
  f.weight = data_or_null(weight);
  f.bias = data_or_null(bias);
  f.affine_stride = d.affine_stride();
  f.affine_dtype = affine_dtype(op, weight, bias);
  raise_on_error(op, run_group_stats_finalize(f, stream_of(x), data_or_null(shift),
                                              shift ? check_dtype(op, "bias", *shift) : Dtype::kFloat32));
  if (table) *table = f.table;
}

Statistics allocate_statistics(const Tensor& x, const GroupNormDims& d, bool with_channel_mean) {
  Statistics s;
  s.mean = empty_like_shape(x, {d.n, d.g}, stats_type(x));
  s.rstd = empty_like_shape(x, {d.n, d.g}, stats_type(x));
  s.mean_data = s.mean.mutable_data_ptr();
  s.rstd_data = s.rstd.mutable_data_ptr();
  if (with_channel_mean) {
    s.channel_mean = empty_like_shape(x, {d.n, d.c}, stats_type(x));
    s.channel_mean_data = s.channel_mean.mutable_data_ptr();
  }
  return s;
}

// Nothing to reduce: PyTorch's statistics of an empty group are NaN.
Statistics empty_statistics(const Tensor& x, const GroupNormDims& d, bool with_channel_mean) {
  Statistics s = allocate_statistics(x, d, with_channel_mean);
  torch::stable::fill_(s.mean, std::nan(""));
  torch::stable::fill_(s.rstd, std::nan(""));
  if (with_channel_mean) torch::stable::fill_(s.channel_mean, std::nan(""));
  return s;
}

Tensor allocate_moments(const Tensor& x, int64_t c) { return empty_like_shape(x, {x.size(0), c, 2}, stats_type(x)); }

void channel_moments_cuda(const char* op, const Tensor& x, const StatsPartials& partials, const Tensor& moments) {
  ChannelMomentsParams p;
  p.partials = partials;
  p.n = moments.size(0);
  p.c = moments.size(1);
  p.is_double = x.scalar_type() == ScalarType::Double;
  p.moments = moments.mutable_data_ptr();
  raise_on_error(op, run_channel_moments(p, stream_of(x)));
}

void channel_moments_cuda(const char* op, const Tensor& x, const Tensor& moments) {
  const GroupNormDims d = check_group_norm(op, x, x.size(1));
  if (d.numel() == 0) {
    torch::stable::fill_(moments, std::nan(""));
    return;
  }
  GroupStatsParams p;
  p.x = x.const_data_ptr();
  p.dims = d;
  plan_group_stats(&p, true, check_gpu(op, x).sm_count);
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(d.n * p.partials.slices * d.c * 3 * acc_size(d));
  workspace.allocate();
  p.partials.data = workspace.at<void>(partials);
  raise_on_error(op, run_group_stats(p, stream_of(x)));
  channel_moments_cuda(op, x, p.partials, moments);
}

void moments_table_cuda(const char* op, const Tensor& moments, int64_t num_groups, const OptTensor& weight,
                        const OptTensor& bias, double eps, void* table) {
  const Tensor dense = dense_in(moments, MemoryFormat::Contiguous);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  MomentsTableParams t;
  t.moments = dense.const_data_ptr();
  t.weight = data_or_null(w);
  t.bias = data_or_null(b);
  t.affine_dtype = affine_dtype(op, w, b);
  t.is_double = moments.scalar_type() == ScalarType::Double;
  t.n = moments.size(0);
  t.c = moments.size(1);
  t.g = num_groups;
  t.eps = eps;
  t.table = table;
  raise_on_error(op, run_moments_table(t, stream_of(moments)));
}

Tensor group_norm_moments_cuda(Tensor x, Tensor moments, int64_t num_groups, OptTensor weight, OptTensor bias,
                               double eps, std::string act) {
  const char* const op = "group_norm_moments";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  check_statistics(op, "moments", moments, x, {d.n, d.c, 2});
  const ActChain chain = check_act(op, act);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() == 0) return y;
  const Tensor dense = dense_in(x, format);
  Workspace workspace(x);
  const int64_t table = workspace.reserve(d.n * d.c * 4 * acc_size(d));
  workspace.allocate();
  moments_table_cuda(op, moments, num_groups, weight, bias, eps, workspace.at<void>(table));
  NormalizeParams p;
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.table = workspace.at<void>(table);
  p.dims = d;
  p.act = chain;
  raise_on_error(op, run_normalize(p, stream_of(x)));
  return y;
}

namespace {

std::tuple<Tensor, Tensor> group_stats(Tensor x, int64_t num_groups, double eps) {
  const char* const op = "group_stats";
  const GroupNormDims d = check_group_norm(op, x, num_groups);
  const DeviceGuard guard(x.get_device_index());
  if (d.numel() == 0) {
    Statistics s = empty_statistics(x, d, false);
    return {s.mean, s.rstd};
  }
  Statistics s = allocate_statistics(x, d, false);
  Workspace workspace(x);
  compute_statistics(op, dense_in(x, format_of(x, d)), d, ActChain(), eps, std::nullopt, std::nullopt, false, false, &s,
                     &workspace, nullptr);
  return {s.mean, s.rstd};
}

Tensor group_stats_backward(Tensor dmean, Tensor drstd, Tensor x, Tensor mean, Tensor rstd, int64_t num_groups) {
  const char* const op = "group_stats_backward";
  const GroupNormDims d = check_group_stats_backward(op, dmean, drstd, x, mean, rstd, num_groups);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format);
  const Tensor dense_dmean = dense_in(dmean, MemoryFormat::Contiguous);
  const Tensor dense_drstd = dense_in(drstd, MemoryFormat::Contiguous);
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  Workspace workspace(x);
  const int64_t table = workspace.reserve(d.n * d.c * 4 * acc_size(d));
  workspace.allocate();
  GroupStatsBackwardParams p;
  p.x = dense.const_data_ptr();
  p.mean = dense_mean.const_data_ptr();
  p.rstd = dense_rstd.const_data_ptr();
  p.dmean = dense_dmean.const_data_ptr();
  p.drstd = dense_drstd.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  p.table = workspace.at<void>(table);
  p.dims = d;
  raise_on_error(op, run_group_stats_backward(p, stream_of(x)));
  return dx;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_stats", TORCH_BOX(&kgopt::group_stats));
  m.impl("group_stats_backward", TORCH_BOX(&kgopt::group_stats_backward));
  m.impl("group_norm_moments", TORCH_BOX(&kgopt::group_norm_moments_cuda));
}
