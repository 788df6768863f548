// Norms over channels on CUDA.
#include "channel_norm/channel_norm.h"
#include "channel_norm/channel_norm_checks.h"
#include "common/host/workspace.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

OptTensor dense_parameter(const OptTensor& t) {
  return t ? OptTensor(dense_in(*t, MemoryFormat::Contiguous)) : std::nullopt;
}
const void* pointer(const OptTensor& t) { return t ? t->const_data_ptr() : nullptr; }
bool starts_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// What one block's shared memory has no room for.
int64_t table_bytes(const ChannelNormParams& p) {
  return p.c > kChannelNormTable ? 2 * p.c * (p.dtype == Dtype::kFloat64 ? 8 : 4) : 0;
}

Tensor channel_norm(Tensor x, OptTensor weight, OptTensor bias, std::string kind, double eps, std::string act) {
  const char* const op = "channel_norm";
  ChannelNormParams p = check_channel_norm(op, x, weight, bias, kind, eps, act);
  const DeviceGuard guard(x.get_device_index());
  const DeviceInfo info = check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  const OptTensor w = dense_parameter(weight), b = dense_parameter(bias);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (x.numel() == 0) return y;
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.weight = pointer(w);
  p.bias = pointer(b);
  const ChannelNormPlan plan =
      plan_channel_norm(p, false, starts_aligned(p.x) && starts_aligned(p.y), info.sm_count, info.smem_per_sm);
  Workspace workspace(x);
  if (const int64_t bytes = table_bytes(p)) {
    const int64_t table = workspace.reserve(bytes);
    workspace.allocate();
    p.table = workspace.at<void>(table);
    raise_on_error(op, run_channel_norm_table(p, stream_of(x)));
  }
  raise_on_error(op, run_channel_norm(p, plan, stream_of(x)));
  return y;
}

std::tuple<Tensor, Tensor, Tensor> channel_norm_backward(Tensor dy, Tensor x, OptTensor weight, OptTensor bias,
                                                         std::string kind, double eps, std::string act) {
  const char* const op = "channel_norm_backward";
  ChannelNormParams p = check_channel_norm_backward(op, dy, x, weight, bias, kind, eps, act);
  const DeviceGuard guard(x.get_device_index());
  const DeviceInfo info = check_gpu(op, x);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  const OptTensor w = dense_parameter(weight), b = dense_parameter(bias);
  const ScalarType type = affine_type(x, weight, bias);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  Tensor dweight = empty_like_shape(x, {p.c}, type), dbias = empty_like_shape(x, {p.c}, type);
  if (x.numel() == 0) {
    torch::stable::zero_(dweight);
    torch::stable::zero_(dbias);
    return {dx, dweight, dbias};
  }
  p.x = dense.const_data_ptr();
  p.dy = dense_dy.const_data_ptr();
  p.y = dx.mutable_data_ptr();
  p.weight = pointer(w);
  p.bias = pointer(b);
  const bool aligned = starts_aligned(p.x) && starts_aligned(p.dy) && starts_aligned(p.y);
  const ChannelNormPlan plan = plan_channel_norm(p, true, aligned, info.sm_count, info.smem_per_sm);
  Workspace workspace(x);
  const bool is_double = p.dtype == Dtype::kFloat64;
  const int64_t sums = workspace.reserve(2 * plan.rows * p.c * (is_double ? 8 : 4));
  const int64_t table = workspace.reserve(table_bytes(p));
  workspace.allocate();
  p.sums = workspace.at<void>(sums);
  if (table_bytes(p) > 0) {
    p.table = workspace.at<void>(table);
    raise_on_error(op, run_channel_norm_table(p, stream_of(x)));
  }
  raise_on_error(op, run_channel_norm_backward(p, plan, stream_of(x)));
  ChannelNormGradientParams g;
  g.sums = p.sums;
  g.rows = plan.rows;
  g.c = p.c;
  g.is_double = is_double;
  g.dweight = dweight.mutable_data_ptr();
  g.dbias = dbias.mutable_data_ptr();
  g.affine_dtype = check_dtype(op, "weight", dweight);
  raise_on_error(op, run_channel_norm_gradient(g, stream_of(x)));
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("channel_norm", TORCH_BOX(&kgopt::channel_norm));
  m.impl("channel_norm_backward", TORCH_BOX(&kgopt::channel_norm_backward));
}
