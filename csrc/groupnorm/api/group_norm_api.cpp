// GroupNorm on CUDA: checks, allocation, the order of the passes.
#include "groupnorm/api/group_norm_api.h"

#include "groupnorm/choice.h"

#include "groupnorm/api/checks.h"
#include "reduce/reduce.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Where a call's statistics go. Tensors where somebody is given them; else they lie in the workspace, for an allocation
// takes the host a third of a launch.
struct Statistics {
  Tensor mean, rstd, channel_mean;
  void* mean_data = nullptr;
  void* rstd_data = nullptr;
  void* channel_mean_data = nullptr;
};

// A place for statistics that are not given away, in a workspace that is allocated between the two steps.
struct StatisticsSpace {
  int64_t mean, rstd, channel_mean;

  StatisticsSpace(Workspace* workspace, const GroupNormDims& d, bool with_channel_mean)
      : mean(workspace->reserve(d.n * d.g * acc_size(d))),
        rstd(workspace->reserve(d.n * d.g * acc_size(d))),
        channel_mean(with_channel_mean ? workspace->reserve(d.n * d.c * acc_size(d)) : 0) {}
  void set(const Workspace& workspace, bool with_channel_mean, Statistics* stats) const {
    stats->mean_data = workspace.at<void>(mean);
    stats->rstd_data = workspace.at<void>(rstd);
    if (with_channel_mean) stats->channel_mean_data = workspace.at<void>(channel_mean);
  }
};

// Partial statistics of x, merged. With a table in the workspace the merge also fills it for a normalize pass; `shift`,
// [C], is what x would have had added to every channel.
void compute_statistics(const char* op, const Tensor& x, const GroupNormDims& d, const ActChain& pre_act, double eps,
                        const OptTensor& weight, const OptTensor& bias, bool with_table, bool with_channel_mean,
                        Statistics* stats, Workspace* workspace, void** table, const OptTensor& shift = std::nullopt) {
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

uintptr_t address_of(const void* p) { return reinterpret_cast<uintptr_t>(p); }

// What the plans for groups on chip must know of dense tensors of x's sizes, the first of them x.
ClusterPlanInput cluster_input(const char* op, const Tensor& x, std::initializer_list<const void*> tensors,
                               const GroupNormDims& d, int on_chip, const ActChain& pre_act, const ActChain& act) {
  const DeviceInfo info = check_gpu(op, x);
  const uintptr_t first = address_of(*tensors.begin());
  ClusterPlanInput in;
  in.dims = d;
  in.tensors = on_chip;
  for (const void* other : tensors) in.aligned = in.aligned && (first - address_of(other)) % 16 == 0;
  in.long_chain = !is_compiled_in(pre_act, act);
  in.plain = chain_kind(pre_act) == Chain::kNone && chain_kind(act) != Chain::kAny;
  in.x_offset = static_cast<uint32_t>(first % 128);
  in.max_blocks = info.compute_capability >= 90 ? max_cluster_blocks(x.get_device_index()) : 0;
  in.sm_count = info.sm_count;
  in.smem_bytes = info.smem_per_block;
  in.smem_per_sm = info.smem_per_sm;
  return in;
}

// The way of a forward or, with dy among the dense tensors of x's sizes, a backward.
NormChoice choose_way(const char* op, const Tensor& x, std::initializer_list<const void*> tensors,
                      const GroupNormDims& d, int on_chip, const ActChain& pre_act, const ActChain& act) {
  const DeviceInfo info = check_gpu(op, x);
  const ClusterPlanInput cluster = cluster_input(op, x, tensors, d, on_chip, pre_act, act);
  TilesPlanInput tiles;
  tiles.dims = d;
  tiles.tensors = on_chip;
  for (const void* t : tensors) tiles.aligned = tiles.aligned && address_of(t) % 16 == 0;
  tiles.long_chain = cluster.long_chain;
  tiles.x_line = static_cast<uint32_t>(address_of(*tensors.begin()) / 16 % 8);
  tiles.has_bulk_copy = info.compute_capability >= 90 && has_bulk_copy();
  tiles.smem_bytes = info.smem_per_block;
  tiles.sm_count = info.sm_count;
  ColumnPlanInput columns;
  columns.dims = d;
  columns.tensors = on_chip;
  columns.aligned = tiles.aligned;
  columns.long_chain = cluster.long_chain;
  const Chain pre_kind = chain_kind(pre_act), kind = chain_kind(act);
  columns.holds = pre_kind != Chain::kAny && kind != Chain::kAny && (on_chip == 1 || kind != Chain::kSilu);
  columns.max_blocks = cluster.max_blocks;
  columns.sm_count = info.sm_count;
  columns.smem_bytes = info.smem_per_block;
  return choose_group_norm(cluster, tiles, columns);
}

// A tensor so large that its start has left L2 when its end is written.
bool exceeds_l2(const char* op, const Tensor& x, const GroupNormDims& d) {
  return d.numel() * dtype_size(d.dtype) > check_gpu(op, x).l2_bytes / 2;
}

// Statistics of dense x, then y = act(GroupNorm(pre_act(x))) (+ x) in the same layout; y may be x. Without `given`, the
// statistics serve this call alone and are not returned.
Statistics normalize_into(const char* op, const Tensor& x, const Tensor& y, const GroupNormDims& d,
                          const OptTensor& weight, const OptTensor& bias, double eps, const ActChain& act,
                          const ActChain& pre_act, bool add_input = false, bool given = true) {
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  Statistics s;
  if (given) s = allocate_statistics(x, d, false);
  const NormChoice choice = choose_way(op, x, {x.const_data_ptr(), y.const_data_ptr()}, d, 1, pre_act, act);
  GroupNormFwdArgs a;
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.weight = data_or_null(w);
  a.bias = data_or_null(b);
  a.affine_dtype = affine_dtype(op, w, b);
  a.dtype = d.dtype;
  a.pre_act = pre_act;
  a.act = act;
  a.add_input = add_input;
  a.streaming_stores = exceeds_l2(op, x, d);
  a.eps = static_cast<float>(eps);
  if (choice.way != NormWay::kPasses) {
    Workspace workspace(x);
    const int64_t count = choice.way == NormWay::kOneRead   ? choice.one_read.words
                          : choice.way == NormWay::kRows    ? choice.rows.words
                          : choice.way == NormWay::kColumns ? choice.columns.words
                                                            : 0;
    const int64_t words = workspace.reserve(count * sizeof(uint64_t));
    std::optional<StatisticsSpace> space;
    if (!given) space.emplace(&workspace, d, false);
    workspace.allocate();
    Statistics here = s;
    if (space) space->set(workspace, false, &here);
    a.mean = static_cast<float*>(here.mean_data);
    a.rstd = static_cast<float*>(here.rstd_data);
    uint64_t* const at = count > 0 ? workspace.at<uint64_t>(words) : nullptr;  // clusters need none, and look here
    Status status;
    switch (choice.way) {
      case NormWay::kSmall:
        status = run_group_norm_small_fwd({a, choice.small.shares}, choice.small, stream_of(x));
        break;
      case NormWay::kSlabs:
        status = run_group_norm_slab_fwd({a, choice.slabs.shares}, choice.slabs, stream_of(x));
        break;
      case NormWay::kOnChip:
        status = run_group_norm_cluster_fwd({a, choice.on_chip.shares}, choice.on_chip, stream_of(x));
        break;
      case NormWay::kOneRead:
        status = run_group_norm_fwd({a, choice.one_read.shares, at}, choice.one_read, stream_of(x));
        break;
      case NormWay::kRows:
        status = run_group_norm_rows_fwd({a, choice.rows.shares, at}, choice.rows, stream_of(x));
        break;
      default: status = run_group_norm_columns_fwd({a, choice.columns.shares, at}, choice.columns, stream_of(x));
    }
    // Not all blocks can run at a time: nothing was launched.
    if (status.code != StatusCode::kUnsupported) {
      raise_on_error(op, status);
      return s;
    }
  }
  Workspace workspace(x);
  void* table = nullptr;
  compute_statistics(op, x, d, pre_act, eps, w, b, true, false, &s, &workspace, &table);
  NormalizeParams p;
  p.x = x.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.table = table;
  p.dims = d;
  p.pre_act = pre_act;
  p.act = act;
  p.add_input = add_input;
  raise_on_error(op, run_normalize(p, stream_of(x)));
  return s;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_fwd_cuda(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       double eps, std::string act, std::string pre_act) {
  const char* const op = "group_norm";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act);
  const DeviceGuard guard(x.get_device_index());
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() == 0) {
    Statistics s = empty_statistics(x, d, false);
    return {y, s.mean, s.rstd};
  }
  const Statistics s = normalize_into(op, dense_in(x, format), y, d, weight, bias, eps, act_chain, pre_chain);
  return {y, s.mean, s.rstd};
}

std::tuple<Tensor, Tensor> group_norm_inplace_cuda(const char* op, const Tensor& x, int64_t num_groups,
                                                   const OptTensor& weight, const OptTensor& bias, double eps,
                                                   const std::string& act, const std::string& pre_act, bool add_input,
                                                   bool given) {
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const Statistics s =
      normalize_into(op, x, x, d, weight, bias, eps, check_act(op, act), check_act(op, pre_act), add_input, given);
  return {s.mean, s.rstd};
}

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

std::tuple<Tensor, Tensor> allocate_affine_gradients(const Tensor& x, const GroupNormDims& d, const OptTensor& weight,
                                                     const OptTensor& bias) {
  const ScalarType type = affine_type(x, weight, bias);
  Tensor dweight = empty_like_shape(x, {d.c}, type), dbias = empty_like_shape(x, {d.c}, type);
  if (d.numel() == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
  }
  return {dweight, dbias};
}

std::tuple<Tensor, Tensor, Tensor> allocate_gradients(const Tensor& x, const GroupNormDims& d, const OptTensor& weight,
                                                      const OptTensor& bias) {
  return std::tuple_cat(std::make_tuple(empty_like_shape(x, sizes_of(x), std::nullopt, format_of(x, d))),
                        allocate_affine_gradients(x, d, weight, bias));
}

void prepare_backward_passes(const char* op, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                             const OptTensor& weight, const OptTensor& bias,
                             const std::tuple<Tensor, Tensor, Tensor>& gradients, Workspace* workspace,
                             GroupNormBackwardParams* p) {
  const GroupNormDims& d = p->dims;
  const int64_t rows = workspace->reserve(d.n * d.c * 8 * acc_size(d));
  const int64_t partials = workspace->reserve(d.n * p->slices * d.c * 2 * acc_size(d));
  workspace->allocate();
  AffineSource& t = p->affine;
  t.mean = mean.const_data_ptr();
  t.rstd = rstd.const_data_ptr();
  t.weight = data_or_null(weight);
  t.bias = data_or_null(bias);
  t.affine_dtype = affine_dtype(op, weight, bias);
  t.c = d.c;
  t.g = d.g;
  const auto& [dx, dweight, dbias] = gradients;
  p->partial_sums = workspace->at<void>(partials);
  p->rows = workspace->at<void>(rows);
  p->dx = dx.mutable_data_ptr();
  p->dweight = dweight.mutable_data_ptr();
  p->dbias = dbias.mutable_data_ptr();
  p->affine_dtype = check_dtype(op, "weight", dweight);
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
  const GroupNormDims d = check_group_norm(op, x, num_groups);
  const IntArray shape{d.n, d.g};
  check_statistics(op, "dmean", dmean, x, shape);
  check_statistics(op, "drstd", drstd, x, shape);
  check_statistics(op, "mean", mean, x, shape);
  check_statistics(op, "rstd", rstd, x, shape);
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

Tensor group_norm(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps, std::string act) {
  const char* const op = "group_norm";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const ActChain chain = check_act(op, act);
  const DeviceGuard guard(x.get_device_index());
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() > 0) {
    normalize_into(op, dense_in(x, format), y, d, weight, bias, eps, chain, ActChain(), false, false);
  }
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group_norm_mean_fwd(Tensor x, int64_t num_groups, OptTensor weight,
                                                               OptTensor bias, double eps) {
  return group_norm_mean_cuda(x, num_groups, weight, bias, eps);
}

Tensor group_norm_mean(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps) {
  return std::get<0>(group_norm_mean_cuda(x, num_groups, weight, bias, eps, std::nullopt, /*given=*/false));
}

std::string explain_group_norm(Tensor x, int64_t num_groups, std::string act, std::string pre_act, bool backward,
                               std::optional<bool> channels_last) {
  const char* const op = "explain_group_norm";
  GroupNormDims d = check_group_norm(op, x, num_groups);
  if (channels_last) d.channels_last = *channels_last && x.dim() > 2;
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act);
  if (d.numel() == 0) return "nothing: x has no elements";
  const DeviceGuard guard(x.get_device_index());
  const void* const data = x.const_data_ptr();
  const NormChoice choice = choose_way(op, x, {data, data}, d, backward ? 2 : 1, pre_chain, act_chain);
  const std::string once = backward ? "one read of x and dy: " : "one read of x: ";
  const auto& c = choice.on_chip.shares;
  switch (choice.way) {
    case NormWay::kSmall: return once + "a group in the registers of a team of threads, one launch";
    case NormWay::kOnChip:
      if (c.blocks == 0) return once + "a group in the registers of a few lanes, one launch";
      if (c.blocks == 1) return once + "a group in the shared memory of a block, one launch";
      return once + "a group in the shared memory of a cluster of " + std::to_string(c.blocks) + " blocks, one launch";
    case NormWay::kOneRead:
      if (choice.one_read.shares.parts == 1) return once + "a group in the shared memory of a block, then the next one";
      return once + "tiles of a group in the shared memory of the whole GPU";
    case NormWay::kRows:
      return once + "channels_last samples, shared by teams of " + std::to_string(choice.rows.shares.blocks) +
             " blocks" + (choice.rows.shares.rereads > 0 ? ", in part read again from L2" : "");
    case NormWay::kColumns:
      return once + "channels_last samples in the shared memory of teams of " +
             std::to_string(choice.columns.shares.blocks) + " blocks";
    case NormWay::kSlabs: return "slabs of a channels_last sample, read twice, the second time from L2, one launch";
    default: break;
  }
  const char* const why = d.dtype == Dtype::kFloat64 ? choice.on_chip.refusal
                          : d.channels_last          ? (backward ? choice.rows.refusal : choice.columns.refusal)
                                                     : choice.one_read.refusal;
  return std::string("passes over memory: ") + (why ? why : "no way on chip takes it");
}

// dx, and dweight and dbias as returned, with one read of x and dy; nothing, and nothing launched, where passes over
// them must do it. What the second step writes is allocated behind the launch of the first, which then starts earlier.
std::optional<std::tuple<Tensor, Tensor>> backward_on_chip(const char* op, const Tensor& x, const GroupNormDims& d,
                                                           const NormChoice& choice, const GroupNormBwdArgs& a,
                                                           const OptTensor& weight, const OptTensor& bias) {
  if (choice.way == NormWay::kPasses) return std::nullopt;
  const GroupTiles& tiles = choice.one_read.shares;
  int64_t words = 0, rows = d.n, sums = 0;  // rows: sets of channel sums that remain to be added up
  if (choice.way == NormWay::kOneRead) {
    words = choice.one_read.words;
    rows = 0;
    sums = int64_t(tiles.tiles) * 4;
  } else {
    if (choice.way == NormWay::kRows) {
      words = choice.rows.words;
      rows = int64_t(choice.rows.shares.teams) * choice.rows.shares.blocks;
    } else if (choice.way == NormWay::kSmall) {
      rows = choice.small.shares.owner ? 0 : d.n << choice.small.shares.blocks_log2;
    } else if (choice.way == NormWay::kOnChip) {
      rows = d.n > 1 ? d.n : 0;
    }
    sums = rows * d.c * 2;
  }
  Workspace workspace(x);
  const int64_t words_at = workspace.reserve(words * sizeof(uint64_t));
  const int64_t sums_at = workspace.reserve(sums * sizeof(float));
  workspace.allocate();
  AffineGradientParams g;
  g.channel_sums = workspace.at<float>(sums_at);
  g.n = rows;
  g.c = d.c;
  std::tuple<Tensor, Tensor> gradients;
  const auto allocate = [&] {
    gradients = allocate_affine_gradients(x, d, weight, bias);
    const auto& [dweight, dbias] = gradients;
    g.dweight = dweight.mutable_data_ptr();
    g.dbias = dbias.mutable_data_ptr();
    g.affine_dtype = check_dtype(op, "weight", dweight);
  };
  const bool is_one_step = choice.way != NormWay::kOneRead && rows == 0;
  if (is_one_step) allocate();
  uint64_t* const at = workspace.at<uint64_t>(words_at);
  float* const channel_sums = workspace.at<float>(sums_at);
  GroupNormBwdParams by_tiles{a, tiles, at, channel_sums};
  Status status;
  switch (choice.way) {
    case NormWay::kSmall:
      status = run_group_norm_small_bwd({a, choice.small.shares, channel_sums, g.dweight, g.dbias, g.affine_dtype},
                                        choice.small, stream_of(x));
      break;
    case NormWay::kSlabs:
      status = run_group_norm_slab_bwd({a, choice.slabs.shares, channel_sums}, choice.slabs, stream_of(x));
      break;
    case NormWay::kOnChip:
      status = run_group_norm_cluster_bwd({a, choice.on_chip.shares, channel_sums, g.dweight, g.dbias, g.affine_dtype},
                                          choice.on_chip, stream_of(x));
      break;
    case NormWay::kOneRead: status = run_group_norm_bwd(by_tiles, choice.one_read, stream_of(x)); break;
    default: status = run_group_norm_rows_bwd({a, choice.rows.shares, at, channel_sums}, choice.rows, stream_of(x));
  }
  if (status.code == StatusCode::kUnsupported) return std::nullopt;  // not all blocks can run at a time
  raise_on_error(op, status);
  if (is_one_step) return gradients;
  allocate();
  if (choice.way == NormWay::kOneRead) {
    by_tiles.dweight = g.dweight;
    by_tiles.dbias = g.dbias;
    by_tiles.gradient_dtype = g.affine_dtype;
    raise_on_error(op, run_tile_gradient(by_tiles, stream_of(x)));
  } else {
    raise_on_error(op, run_affine_gradient(g, stream_of(x)));
  }
  return gradients;
}

// Shared by both backward ops: tables and sums in the workspace, dx, dweight and dbias as outputs.
std::tuple<Tensor, Tensor, Tensor> run_backward(const char* op, const Tensor& x, const GroupNormDims& d,
                                                const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                const Tensor& rstd, GroupNormBackwardParams p) {
  const DeviceInfo info = check_gpu(op, x);
  if (d.numel() == 0) return allocate_gradients(x, d, weight, bias);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format_of(x, d));
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  if (p.dy) {
    const NormChoice choice = choose_way(op, x, {p.x, p.dy, dx.const_data_ptr()}, d, 2, p.pre_act, p.act);
    GroupNormBwdArgs a;
    a.x = p.x;
    a.dy = p.dy;
    a.dx = dx.mutable_data_ptr();
    a.weight = data_or_null(w);
    a.bias = data_or_null(b);
    a.affine_dtype = affine_dtype(op, w, b);
    a.dtype = d.dtype;
    a.pre_act = p.pre_act;
    a.act = p.act;
    a.streaming_stores = exceeds_l2(op, x, d);
    a.mean = static_cast<const float*>(dense_mean.const_data_ptr());
    a.rstd = static_cast<const float*>(dense_rstd.const_data_ptr());
    const auto affine = backward_on_chip(op, x, d, choice, a, weight, bias);
    if (affine) return std::tuple_cat(std::make_tuple(dx), *affine);
  }
  const auto gradients = std::tuple_cat(std::make_tuple(dx), allocate_affine_gradients(x, d, weight, bias));
  p.dims = d;
  plan_group_norm_backward(&p, info.sm_count);
  Workspace workspace(x);
  prepare_backward_passes(op, x, dense_mean, dense_rstd, w, b, gradients, &workspace, &p);
  raise_on_error(op, run_group_norm_backward(p, stream_of(x)));
  return gradients;
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                       int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       std::string act, std::string pre_act) {
  const char* const op = "group_norm_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  GroupNormBackwardParams p;
  p.act = check_act(op, act);
  p.pre_act = check_act(op, pre_act);
  check_gradient(op, "dy", dy, x);
  check_statistics(op, "mean", mean, x, {d.n, d.g});
  check_statistics(op, "rstd", rstd, x, {d.n, d.g});
  const DeviceGuard guard(x.get_device_index());
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  p.x = dense.const_data_ptr();
  p.dy = dense_dy.const_data_ptr();
  return run_backward(op, x, d, weight, bias, mean, rstd, p);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_mean_backward(Tensor dout, Tensor x, Tensor channel_mean, Tensor mean,
                                                            Tensor rstd, int64_t num_groups, OptTensor weight) {
  const char* const op = "group_norm_mean_backward";
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight);
  check_same_device(op, "dout", dout, x);
  check_shape(op, "dout", dout, {d.n});
  check_dtype(op, "dout", dout);
  check_statistics(op, "channel_mean", channel_mean, x, {d.n, d.c});
  check_statistics(op, "mean", mean, x, {d.n, d.g});
  check_statistics(op, "rstd", rstd, x, {d.n, d.g});
  const DeviceGuard guard(x.get_device_index());
  const Tensor dense = dense_in(x, format_of(x, d));
  const Tensor dense_dout = dense_in(
      dout.scalar_type() == stats_type(x) ? dout : torch::stable::to(dout, stats_type(x)), MemoryFormat::Contiguous);
  const Tensor dense_channel_mean = dense_in(channel_mean, MemoryFormat::Contiguous);
  GroupNormBackwardParams p;
  p.x = dense.const_data_ptr();
  p.dout = dense_dout.const_data_ptr();
  p.channel_mean = dense_channel_mean.const_data_ptr();
  return run_backward(op, x, d, weight, std::nullopt, mean, rstd, p);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_stats", TORCH_BOX(&kgopt::group_stats));
  m.impl("group_stats_backward", TORCH_BOX(&kgopt::group_stats_backward));
  m.impl("group_norm", TORCH_BOX(&kgopt::group_norm));
  m.impl("group_norm_moments", TORCH_BOX(&kgopt::group_norm_moments_cuda));
  m.impl("group_norm_fwd", TORCH_BOX(&kgopt::group_norm_fwd_cuda));
  m.impl("group_norm_backward", TORCH_BOX(&kgopt::group_norm_backward));
  m.impl("explain_group_norm", TORCH_BOX(&kgopt::explain_group_norm));
  m.impl("group_norm_mean", TORCH_BOX(&kgopt::group_norm_mean));
  m.impl("group_norm_mean_fwd", TORCH_BOX(&kgopt::group_norm_mean_fwd));
  m.impl("group_norm_mean_backward", TORCH_BOX(&kgopt::group_norm_mean_backward));
}
