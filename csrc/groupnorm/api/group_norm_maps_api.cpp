// GroupNorm times a map plus a map, both perhaps of lower resolution, on CUDA.
#include "groupnorm/api/statistics.h"
#include "groupnorm/passes/maps.h"

namespace kgopt {
namespace {

// A map whose positions stand for as many of x each: of x's rank, its sizes divide those of x behind the channels.
void check_map(const char* op, const char* arg, const Tensor& map, const Tensor& x) {
  check_same_device(op, arg, map, x);
  check_same_dtype(op, arg, map, x);
  bool fits = map.dim() == x.dim() && map.size(0) == x.size(0) && map.size(1) == x.size(1);
  for (int64_t i = 2; fits && i < x.dim(); ++i) fits = map.size(i) > 0 && x.size(i) % map.size(i) == 0;
  KGOPT_CHECK(fits, op, ": ", arg, " has shape ", shape_string(map), ", expected that of x, ", shape_string(x),
              ", or divisors of its sizes behind the channels");
}

Tensor group_norm_maps(Tensor x, OptTensor moments, Tensor scale, Tensor shift, int64_t num_groups, OptTensor weight,
                       OptTensor bias, double eps, std::string act) {
  const char* const op = "group_norm_maps";
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  if (moments) check_statistics(op, "moments", *moments, x, {d.n, d.c, 2});
  check_map(op, "scale", scale, x);
  check_map(op, "shift", shift, x);
  KGOPT_CHECK(sizes_of(scale) == sizes_of(shift), op, ": shift has shape ", shape_string(shift),
              ", expected that of scale, ", shape_string(scale));
  MapsParams p;
  p.act = check_act(op, act);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() == 0) return y;
  const Tensor dense = dense_in(x, format), scales = dense_in(scale, format), shifts = dense_in(shift, format);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  Workspace workspace(x);
  void* table = nullptr;
  if (moments) {
    const int64_t at = workspace.reserve(d.n * d.c * 4 * acc_size(d));
    workspace.allocate();
    table = workspace.at<void>(at);
    moments_table_cuda(op, *moments, num_groups, w, b, eps, table);
  } else {
    Statistics statistics;
    compute_statistics(op, dense, d, ActChain(), eps, w, b, true, false, &statistics, &workspace, &table);
  }
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.table = table;
  p.scale = scales.const_data_ptr();
  p.shift = shifts.const_data_ptr();
  p.dims = d;
  const int rank = static_cast<int>(x.dim()) - 2;
  for (int i = 0; i < rank; ++i) {
    p.out[3 - rank + i] = x.size(2 + i);
    p.in[3 - rank + i] = scale.size(2 + i);
  }
  raise_on_error(op, run_group_norm_maps(p, stream_of(x)));
  return y;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) { m.impl("group_norm_maps", TORCH_BOX(&kgopt::group_norm_maps)); }
