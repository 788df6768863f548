// GroupNorm's forward on CUDA.
#include "groupnorm/api/norm_call.h"
#include "groupnorm/api/statistics.h"
#include "groupnorm/launch.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

// With one read of x; false, and nothing launched, where passes over it must do it.
bool normalize_on_chip(const char* op, const Tensor& x, const GroupNormDims& d, const NormChoice& choice,
                       GroupNormFwdArgs a, Statistics here) {
  if (choice.family() == NormFamily::kPasses) return false;
  Workspace workspace(x);
  const int64_t words = workspace.reserve(choice.scratch.words * sizeof(uint64_t));
  std::optional<StatisticsSpace> space;
  if (!here.mean_data) space.emplace(&workspace, d, false);
  workspace.allocate();
  if (space) space->set(workspace, false, &here);
  a.mean = static_cast<float*>(here.mean_data);
  a.rstd = static_cast<float*>(here.rstd_data);
  NormPlaces places;
  places.words = choice.scratch.words > 0 ? workspace.at<uint64_t>(words) : nullptr;
  const Status status = run_norm_fwd(choice, a, places, stream_of(x));
  if (status.code == StatusCode::kUnsupported) return false;  // not all blocks can run at a time
  raise_on_error(op, status);
  return true;
}

// What the choice of a family takes a PReLU for.
ActChain leaky_relu() {
  ActChain chain;
  chain.codes[chain.length++] = static_cast<uint8_t>(Act::kLeakyRelu);
  return chain;
}

// Statistics of dense x, then y = act(PReLU(GroupNorm(pre_act(x)) + residual)) (+ x) in the same layout; y may be x.
// With slopes there is no act. Without `given`, the statistics serve this call alone and are not returned.
Statistics normalize_into(const char* op, const Tensor& x, const Tensor& y, const GroupNormDims& d,
                          const OptTensor& weight, const OptTensor& bias, double eps, const ActChain& given_act,
                          const ActChain& pre_act, bool add_input = false, bool given = true,
                          const void* residual = nullptr, const PReluSlopes& slopes = {}) {
  const ActChain act = as_relu(given_act, /*backward=*/false);
  const OptTensor w = dense_or_none(weight), b = dense_or_none(bias);
  Statistics s;
  if (given) s = allocate_statistics(x, d, false);
  const NormExtras extras = residual ? NormExtras::kResidual : slopes.data ? NormExtras::kPRelu : NormExtras::kNone;
  const NormChoice choice = choose_group_norm(
      norm_plan_input(op, x, {x.const_data_ptr(), y.const_data_ptr(), residual ? residual : x.const_data_ptr()}, d,
                      /*backward=*/false, pre_act, slopes.data ? leaky_relu() : act, extras));
  GroupNormFwdArgs a;
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.residual = residual;
  a.slopes = slopes;
  a.is_extended = extras != NormExtras::kNone;
  a.weight = data_or_null(w);
  a.bias = data_or_null(b);
  a.affine_stride = static_cast<uint32_t>(d.affine_stride());
  a.affine_dtype = affine_dtype(op, w, b);
  a.dtype = d.dtype;
  a.pre_act = pre_act;
  a.act = act;
  a.add_input = add_input;
  a.streaming_stores = exceeds_l2(op, x, d);
  a.eps = static_cast<float>(eps);
  if (normalize_on_chip(op, x, d, choice, a, s)) return s;
  Workspace workspace(x);
  void* table = nullptr;
  compute_statistics(op, x, d, pre_act, eps, w, b, true, false, &s, &workspace, &table);
  NormalizeParams p;
  p.x = x.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.residual = residual;
  p.slopes = slopes;
  p.table = table;
  p.dims = d;
  p.pre_act = pre_act;
  p.act = act;
  p.add_input = add_input;
  raise_on_error(op, run_normalize(p, stream_of(x)));
  return s;
}

// The same into a new tensor: (y, mean, rstd).
std::tuple<Tensor, Tensor, Tensor> normalize_new(const char* op, const Tensor& x, const GroupNormDims& d,
                                                 const OptTensor& weight, const OptTensor& bias, double eps,
                                                 const ActChain& act, const ActChain& pre_act,
                                                 const OptTensor& residual, bool given,
                                                 const OptTensor& slope = std::nullopt) {
  const DeviceGuard guard(x.get_device_index());
  const MemoryFormat format = format_of(x, d);
  Tensor y = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  if (d.numel() == 0) {
    const Statistics s = given ? empty_statistics(x, d, false) : Statistics();
    return {y, s.mean, s.rstd};
  }
  const OptTensor r = residual ? OptTensor(dense_in(*residual, format)) : std::nullopt;
  const OptTensor dense_slope = dense_or_none(slope);
  const Statistics s = normalize_into(op, dense_in(x, format), y, d, weight, bias, eps, act, pre_act, false, given,
                                      data_or_null(r), slope ? slopes_of(op, *dense_slope, d) : PReluSlopes());
  return {y, s.mean, s.rstd};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> group_norm_fwd_cuda(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias,
                                                       double eps, std::string act, std::string pre_act) {
  const char* const op = "group_norm";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const ActChain act_chain = check_act(op, act), pre_chain = check_act(op, pre_act, "pre_act");
  return normalize_new(op, x, d, weight, bias, eps, act_chain, pre_chain, std::nullopt, true);
}

std::tuple<Tensor, Tensor> group_norm_inplace_cuda(const char* op, const Tensor& x, int64_t num_groups,
                                                   const OptTensor& weight, const OptTensor& bias, double eps,
                                                   const std::string& act, const std::string& pre_act, bool add_input,
                                                   bool given) {
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const Statistics s = normalize_into(op, x, x, d, weight, bias, eps, check_act(op, act),
                                      check_act(op, pre_act, "pre_act"), add_input, given);
  return {s.mean, s.rstd};
}

namespace {

Tensor group_norm(Tensor x, int64_t num_groups, OptTensor weight, OptTensor bias, double eps, std::string act) {
  const char* const op = "group_norm";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  const ActChain chain = check_act(op, act);
  return std::get<0>(normalize_new(op, x, d, weight, bias, eps, chain, ActChain(), std::nullopt, false));
}

std::tuple<Tensor, Tensor, Tensor> by_sample(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                             int64_t num_groups, double eps, const std::string& act, bool given) {
  const char* const op = "group_norm_by_sample";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias, true);
  return normalize_new(op, x, d, weight, bias, eps, check_act(op, act), ActChain(), std::nullopt, given);
}

Tensor group_norm_by_sample(Tensor x, Tensor weight, Tensor bias, int64_t num_groups, double eps, std::string act) {
  return std::get<0>(by_sample(x, weight, bias, num_groups, eps, act, false));
}

std::tuple<Tensor, Tensor, Tensor> group_norm_by_sample_fwd(Tensor x, Tensor weight, Tensor bias, int64_t num_groups,
                                                            double eps, std::string act) {
  return by_sample(x, weight, bias, num_groups, eps, act, true);
}

std::tuple<Tensor, Tensor, Tensor> add(const Tensor& x, const Tensor& residual, int64_t num_groups,
                                       const OptTensor& weight, const OptTensor& bias, double eps,
                                       const std::string& act, bool given) {
  const char* const op = "group_norm_add";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  check_like(op, "residual", residual, x);
  return normalize_new(op, x, d, weight, bias, eps, check_act(op, act), ActChain(), residual, given);
}

Tensor group_norm_add(Tensor x, Tensor residual, int64_t num_groups, OptTensor weight, OptTensor bias, double eps,
                      std::string act) {
  return std::get<0>(add(x, residual, num_groups, weight, bias, eps, act, false));
}

std::tuple<Tensor, Tensor, Tensor> group_norm_add_fwd(Tensor x, Tensor residual, int64_t num_groups, OptTensor weight,
                                                      OptTensor bias, double eps, std::string act) {
  return add(x, residual, num_groups, weight, bias, eps, act, true);
}

std::tuple<Tensor, Tensor, Tensor> prelu(const Tensor& x, const Tensor& slope, int64_t num_groups,
                                         const OptTensor& weight, const OptTensor& bias, double eps,
                                         const OptTensor& residual, bool given) {
  const char* const op = "group_norm_prelu";
  const GroupNormDims d = check_group_norm_forward(op, x, num_groups, weight, bias);
  check_slope(op, slope, x, d.c);
  if (residual) check_like(op, "residual", *residual, x);
  return normalize_new(op, x, d, weight, bias, eps, ActChain(), ActChain(), residual, given, slope);
}

Tensor group_norm_prelu(Tensor x, Tensor slope, int64_t num_groups, OptTensor weight, OptTensor bias, double eps,
                        OptTensor residual) {
  return std::get<0>(prelu(x, slope, num_groups, weight, bias, eps, residual, false));
}

std::tuple<Tensor, Tensor, Tensor> group_norm_prelu_fwd(Tensor x, Tensor slope, int64_t num_groups, OptTensor weight,
                                                        OptTensor bias, double eps, OptTensor residual) {
  return prelu(x, slope, num_groups, weight, bias, eps, residual, true);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm", TORCH_BOX(&kgopt::group_norm));
  m.impl("group_norm_fwd", TORCH_BOX(&kgopt::group_norm_fwd_cuda));
  m.impl("group_norm_by_sample", TORCH_BOX(&kgopt::group_norm_by_sample));
  m.impl("group_norm_by_sample_fwd", TORCH_BOX(&kgopt::group_norm_by_sample_fwd));
  m.impl("group_norm_add", TORCH_BOX(&kgopt::group_norm_add));
  m.impl("group_norm_add_fwd", TORCH_BOX(&kgopt::group_norm_add_fwd));
  m.impl("group_norm_prelu", TORCH_BOX(&kgopt::group_norm_prelu));
  m.impl("group_norm_prelu_fwd", TORCH_BOX(&kgopt::group_norm_prelu_fwd));
}
