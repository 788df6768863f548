// GroupNorm's backward on CUDA.
#include "groupnorm/api/norm_call.h"
#include "groupnorm/launch.h"

namespace kgopt {

using torch::stable::accelerator::DeviceGuard;

std::tuple<Tensor, Tensor> allocate_affine_gradients(const Tensor& x, const GroupNormDims& d, const OptTensor& weight,
                                                     const OptTensor& bias) {
  const ScalarType type = affine_type(x, weight, bias);
  const IntArray sizes = d.by_sample ? IntArray{d.n, d.c} : IntArray{d.c};
  Tensor dweight = empty_like_shape(x, sizes, type), dbias = empty_like_shape(x, sizes, type);
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
                             GroupNormPassesBwdParams* p) {
  const GroupNormDims& d = p->dims;
  const int64_t rows = workspace->reserve(d.n * d.c * 8 * acc_size(d));
  const int64_t partials = workspace->reserve(d.n * p->slices * d.c * p->partial_values * acc_size(d));
  workspace->allocate();
  AffineSource& t = p->affine;
  t.mean = mean.const_data_ptr();
  t.rstd = rstd.const_data_ptr();
  t.weight = data_or_null(weight);
  t.bias = data_or_null(bias);
  t.affine_stride = d.affine_stride();
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

namespace {

// dx, and dweight and dbias as returned, with one read of x and dy; nothing, and nothing launched, where passes over
// them must do it. What the second step writes is allocated behind the launch of the first, which then starts earlier.
std::optional<std::tuple<Tensor, Tensor>> backward_on_chip(const char* op, const Tensor& x, const GroupNormDims& d,
                                                           const NormChoice& choice, const GroupNormBwdArgs& a,
                                                           const OptTensor& weight, const OptTensor& bias) {
  if (choice.family() == NormFamily::kPasses) return std::nullopt;
  const NormScratch& scratch = choice.scratch;
  Workspace workspace(x);
  const int64_t words_at = workspace.reserve(scratch.words * sizeof(uint64_t));
  const int64_t sums_at = workspace.reserve(scratch.sums * sizeof(float));
  workspace.allocate();
  NormPlaces places;
  places.words = scratch.words > 0 ? workspace.at<uint64_t>(words_at) : nullptr;
  places.sums = workspace.at<float>(sums_at);
  std::tuple<Tensor, Tensor> gradients;
  const auto allocate = [&] {
    gradients = allocate_affine_gradients(x, d, weight, bias);
    const auto& [dweight, dbias] = gradients;
    places.dweight = dweight.mutable_data_ptr();
    places.dbias = dbias.mutable_data_ptr();
    places.gradient_dtype = check_dtype(op, "weight", dweight);
  };
  const bool is_one_step = scratch.sums == 0;
  if (is_one_step) allocate();
  const Status status = run_norm_bwd(choice, a, places, stream_of(x));
  if (status.code == StatusCode::kUnsupported) return std::nullopt;  // not all blocks can run at a time
  raise_on_error(op, status);
  if (is_one_step) return gradients;
  allocate();
  raise_on_error(op, run_norm_affine_gradient(choice, a, d.c, places, stream_of(x)));
  return gradients;
}

// Shared by both backward ops: tables and sums in the workspace, dx, dweight and dbias as outputs.
std::tuple<Tensor, Tensor, Tensor> run_backward(const char* op, const Tensor& x, const GroupNormDims& d,
                                                const OptTensor& weight, const OptTensor& bias, const Tensor& mean,
                                                const Tensor& rstd, GroupNormPassesBwdParams p) {
  const DeviceInfo info = check_gpu(op, x);
  if (d.numel() == 0) return allocate_gradients(x, d, weight, bias);
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format_of(x, d));
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  if (p.dy) {
    const NormChoice choice = choose_group_norm(
        norm_plan_input(op, x, {p.x, p.dy, dx.const_data_ptr()}, d, /*backward=*/true, p.pre_act, p.act));
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
  plan_group_norm_passes_bwd(&p, info.sm_count);
  Workspace workspace(x);
  prepare_backward_passes(op, x, dense_mean, dense_rstd, w, b, gradients, &workspace, &p);
  raise_on_error(op, run_group_norm_passes_bwd(p, stream_of(x)));
  return gradients;
}

std::tuple<Tensor, Tensor, Tensor> backward_of(const char* op, const Tensor& dy, const Tensor& x, const Tensor& mean,
                                               const Tensor& rstd, int64_t num_groups, const OptTensor& weight,
                                               const OptTensor& bias, const std::string& act,
                                               const std::string& pre_act, bool by_sample) {
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias, by_sample);
  GroupNormPassesBwdParams p;
  p.act = as_relu(check_act(op, act), /*backward=*/true);
  p.pre_act = check_act(op, pre_act, "pre_act");
  check_like(op, "dy", dy, x);
  check_group_statistics(op, mean, rstd, x, d);
  const DeviceGuard guard(x.get_device_index());
  const MemoryFormat format = format_of(x, d);
  const Tensor dense = dense_in(x, format), dense_dy = dense_in(dy, format);
  p.x = dense.const_data_ptr();
  p.dy = dense_dy.const_data_ptr();
  return run_backward(op, x, d, weight, bias, mean, rstd, p);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                       int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       std::string act, std::string pre_act) {
  return backward_of("group_norm_backward", dy, x, mean, rstd, num_groups, weight, bias, act, pre_act, false);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_by_sample_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd,
                                                                 Tensor weight, Tensor bias, int64_t num_groups,
                                                                 std::string act) {
  return backward_of("group_norm_by_sample_backward", dy, x, mean, rstd, num_groups, weight, bias, act, "none", true);
}

std::tuple<Tensor, Tensor, Tensor> group_norm_mean_backward(Tensor dout, Tensor x, Tensor channel_mean, Tensor mean,
                                                            Tensor rstd, int64_t num_groups, OptTensor weight) {
  const char* const op = "group_norm_mean_backward";
  const GroupNormDims d = check_group_norm_mean_backward(op, dout, x, channel_mean, mean, rstd, num_groups, weight);
  const DeviceGuard guard(x.get_device_index());
  const Tensor dense = dense_in(x, format_of(x, d));
  const Tensor dense_dout = dense_in(
      dout.scalar_type() == stats_type(x) ? dout : torch::stable::to(dout, stats_type(x)), MemoryFormat::Contiguous);
  const Tensor dense_channel_mean = dense_in(channel_mean, MemoryFormat::Contiguous);
  GroupNormPassesBwdParams p;
  p.x = dense.const_data_ptr();
  p.dout = dense_dout.const_data_ptr();
  p.channel_mean = dense_channel_mean.const_data_ptr();
  return run_backward(op, x, d, weight, std::nullopt, mean, rstd, p);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_backward", TORCH_BOX(&kgopt::group_norm_backward));
  m.impl("group_norm_by_sample_backward", TORCH_BOX(&kgopt::group_norm_by_sample_backward));
  m.impl("group_norm_mean_backward", TORCH_BOX(&kgopt::group_norm_mean_backward));
}
