// Reductions on CUDA.
#include "reduce/reduce_api.h"

#include "common/host/workspace.h"
#include "reduce/reduce.h"
#include "reduce/reduce_checks.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

template <typename Params>
void set_rows(const ReduceShape& s, Dtype dtype, Params* p) {
  p->outer = s.outer;
  p->reduced = s.reduced;
  p->inner = s.inner;
  p->dtype = dtype;
}

Tensor reduce(const char* op, const char* arg, const Tensor& x, const IntArray& dims, bool keepdim,
              Status (*run)(const ReduceParams&, cudaStream_t), bool vectors_across) {
  const ReduceShape s = check_reduce(op, arg, x, dims, keepdim);
  const DeviceGuard guard(x.get_device_index());
  const DeviceInfo info = check_gpu(op, x);
  const Tensor dense = reduce_input(x, s);
  Tensor y = empty_like_shape(x, s.out_sizes);
  ReduceParams p;
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  set_rows(s, check_dtype(op, "x", x), &p);
  if (vectors_across || p.inner == 1) p.vector = reduce_vector(p, static_cast<int>(x.element_size()), {p.x, p.y});
  plan_reduce(&p, info.sm_count);
  Workspace workspace(x);
  const int64_t partials =
      p.slices > 1 ? workspace.reserve(p.slices * p.outer * p.inner * 2 * (p.dtype == Dtype::kFloat64 ? 8 : 4)) : 0;
  workspace.allocate();
  p.partials = workspace.at<void>(partials);
  raise_on_error(op, run(p, stream_of(x)));
  return y;
}

Tensor mean(Tensor x, IntArray dims, bool keepdim) { return reduce("mean", "dims", x, dims, keepdim, run_mean, true); }

Tensor logsumexp_backward(Tensor dy, Tensor x, Tensor y, IntArray dim, bool keepdim) {
  const char* const op = "logsumexp_backward";
  const ReduceShape s = check_reduce(op, "dim", x, dim, keepdim);
  check_reduce_gradient(op, "dy", dy, x, s);
  check_reduce_gradient(op, "y", y, x, s);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const Tensor dense = reduce_input(x, s);
  const Tensor dense_dy = dense_in(dy, MemoryFormat::Contiguous), dense_y = dense_in(y, MemoryFormat::Contiguous);
  Tensor dx = reduce_gradient_buffer(x, sizes_of(x), s);
  ReduceBackwardParams p;
  p.dy = dense_dy.const_data_ptr();
  p.x = dense.const_data_ptr();
  p.y = dense_y.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  set_rows(s, check_dtype(op, "x", x), &p);
  raise_on_error(op, run_logsumexp_backward(p, stream_of(x)));
  return reduce_unpermute(dx, s);
}

Tensor mean_backward(Tensor dy, IntArray sizes, IntArray dims, bool keepdim) {
  const char* const op = "mean_backward";
  const Dtype dtype = check_dtype(op, "dy", dy);
  const ReduceShape s = check_mean_gradient(op, dy, sizes, dims, keepdim);
  const DeviceGuard guard(dy.get_device_index());
  check_gpu(op, dy);
  const Tensor dense_dy = dense_in(dy, MemoryFormat::Contiguous);
  Tensor dx = reduce_gradient_buffer(dy, sizes, s);
  ReduceBackwardParams p;
  p.dy = dense_dy.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  set_rows(s, dtype, &p);
  raise_on_error(op, run_mean_backward(p, stream_of(dy)));
  return reduce_unpermute(dx, s);
}

Tensor scaled_softmax(Tensor x, double scale, ScalarType dtype) {
  const char* const op = "scaled_softmax";
  SoftmaxParams p;
  p.to = check_softmax(op, x, dtype);
  p.dtype = check_dtype(op, "x", x);
  const DeviceGuard guard(x.get_device_index());
  check_gpu(op, x);
  const Tensor dense = aligned(dense_in(x, MemoryFormat::Contiguous));
  Tensor y = empty_like_shape(x, sizes_of(x), dtype);
  p.x = dense.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.scale = scale;
  p.columns = x.size(x.dim() - 1);
  p.rows = p.columns ? x.numel() / p.columns : 0;
  raise_on_error(op, run_scaled_softmax(p, stream_of(x)));
  return y;
}

}  // namespace

Tensor rounded_cuda(const char* op, const void* values, const IntArray& sizes, const Tensor& like) {
  const Tensor y = empty_like_shape(like, sizes);
  int64_t count = 1;
  for (const int64_t size : sizes) count *= size;
  raise_on_error(op, run_round(static_cast<const float*>(values), y.mutable_data_ptr(), count,
                               check_dtype(op, "x", like), stream_of(like)));
  return y;
}

Tensor logsumexp_cuda(Tensor x, IntArray dim, bool keepdim) {
  return reduce("logsumexp", "dim", x, dim, keepdim, run_logsumexp, false);
}

}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("logsumexp", TORCH_BOX(&kgopt::logsumexp_cuda));
  m.impl("logsumexp_backward", TORCH_BOX(&kgopt::logsumexp_backward));
  m.impl("mean", TORCH_BOX(&kgopt::mean));
  m.impl("mean_backward", TORCH_BOX(&kgopt::mean_backward));
  m.impl("scaled_softmax", TORCH_BOX(&kgopt::scaled_softmax));
}
