// CUDA gradients of convolutions: for channels_last tensors dx by the convolutions on wgmma and dweight by its own
// kernel, for contiguous tensors of few channels by kernels that read them as they lie; each where it is the faster
// one, ATen for the rest. Contiguous tensors of more channels are copied to channels_last where that pays.
#include <algorithm>

#include "conv3d/api/autotune.h"
#include "conv3d/api/call.h"
#include "conv3d/api/gradients.h"
#include "conv3d/few_channels/start.h"
#include "conv3d/gradients/few_dgrad/few_dgrad.h"
#include "conv3d/gradients/few_march/few_march.h"
#include "conv3d/gradients/few_wgrad/few_wgrad.h"
#include "conv3d/gradients/head/head.h"
#include "conv3d/gradients/norm_lse/norm_lse.h"
#include "conv3d/gradients/wgrad/wgrad.h"
#include "groupnorm/api/group_norm_api.h"
#include "groupnorm/lse_backward/lse_backward.h"
#include "layout/layout_api.h"
#include "reduce/reduce.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Dense so, with strides that say it, and where copies of 16 bytes can read it.
Tensor channels_innermost(const Tensor& t) {
  const MemoryFormat format = channels_last_format(t.dim());
  const Tensor dense = dense_in(t, format);
  // Of one position the two formats differ in strides alone, and the gradient of x would lie as dy's say.
  const bool is_said = t.size(1) == 1 || is_channels_last(dense);
  return aligned(is_said ? dense : copied_in(dense, format));
}
Tensor planar(const Tensor& t) { return aligned(dense_in(t, MemoryFormat::Contiguous)); }

WgradTensor wgrad_tensor(const Tensor& t, int rank) {
  WgradTensor w{};
  w.data = t.const_data_ptr();
  w.n = t.size(0);
  w.c = t.size(1);
  w.size[0] = 1;
  w.stride_n = t.stride(0);
  for (int i = 0; i < rank; ++i) w.size[3 - rank + i] = t.size(2 + i);
  spatial_strides(t, rank, w.stride);
  return w;
}

// Into dweight. `sum`: what is to be done to the sums.
void run_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& dweight, const ConvShape& shape,
               const WgradPlan& plan, WgradSumParams sum) {
  const auto stream = static_cast<cudaStream_t>(current_stream(x));
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(plan.partial_floats * 4);
  workspace.allocate();

  WgradParams p{};
  p.plan = plan;
  p.partials = workspace.at<float>(partials);
  const WgradTensor dy_part = wgrad_tensor(dy, shape.rank), x_part = wgrad_tensor(x, shape.rank);
  raise_on_error(op, set_wgrad_tensors(&p, shape.transposed ? x_part : dy_part, shape.transposed ? dy_part : x_part));
  raise_on_error(op, run_conv_wgrad(p, stream));

  sum.partials = p.partials;
  sum.dw = dweight.mutable_data_ptr();
  sum.a = static_cast<int>(dweight.size(0));
  sum.b = static_cast<int>(dweight.size(1));
  sum.stride_a = dweight.stride(0);
  sum.stride_b = dweight.stride(1);
  spatial_strides(dweight, shape.rank, sum.stride_k);
  sum.dtype = check_dtype(op, "weight", dweight);
  sum.plan = plan;
  raise_on_error(op, run_conv_wgrad_sum(sum, stream));
}

}  // namespace

constexpr int kFewSums = 4;

Tensor conv_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight, const ConvShape& shape,
                  const WgradPlan& plan, const WgradSumParams& sum) {
  // Sums come with channels innermost. Where they are few for many weights, writing these takes longer than reading,
  // and a pass that transposes them less than to write single elements.
  const MemoryFormat format = memory_format_of(weight);
  const bool is_written_apart = plan.slots < kFewSums && !plan.few;
  const Tensor dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt,
                                          is_written_apart ? channels_last_format(weight.dim()) : format);
  run_wgrad(op, dy, x, dweight, shape, plan, sum);
  return dense_in(dweight, format);
}

namespace {

// fp32 tensors as they lie, contiguous or channels_last; the terms are channels_last.
struct __attribute__((visibility("hidden"))) SplitTerms {
  Tensor high, low;

  SplitTerms(const char* op, const Tensor& t, uint32_t* largest) {
    const MemoryFormat format = channels_last_format(t.dim());
    const bool lies_so = is_dense(t, format);
    high = empty_like_shape(t, sizes_of(t), ScalarType::Half, format);
    low = empty_like_shape(t, sizes_of(t), ScalarType::Half, format);
    SplitHalfParams p;
    p.x = static_cast<const float*>(t.const_data_ptr());
    p.high = high.mutable_data_ptr();
    p.low = low.mutable_data_ptr();
    p.n = lies_so ? 1 : t.size(0);
    p.rows = lies_so ? 1 : t.size(1);
    p.columns = lies_so ? t.numel() : positions_of(t);
    p.largest = largest;
    raise_on_error(op, run_split_half(p, stream_of(t)));
  }
};

Tensor conv_split_wgrad(const char* op, const Tensor& given_dy, const Tensor& given_x, const Tensor& weight,
                        const ConvProblem& problem, const DeviceLimits& limits, const ConvShape& shape,
                        const SplitWgradPlan& plan) {
  const auto as_it_lies = [](const Tensor& t) {
    const bool innermost = is_dense(t, channels_last_format(t.dim()));
    return aligned(innermost ? t : dense_in(t, MemoryFormat::Contiguous));
  };
  const Tensor dy = as_it_lies(given_dy), x = as_it_lies(given_x);
  Workspace workspace(x);
  const int64_t of_x = workspace.reserve(sizeof(uint32_t)), of_dy = workspace.reserve(sizeof(uint32_t));
  workspace.allocate();
  uint32_t *const largest_x = workspace.at<uint32_t>(of_x), *const largest_dy = workspace.at<uint32_t>(of_dy);
  const auto measure = [&](const Tensor& t, uint32_t* largest) {
    raise_on_error(op, run_largest_magnitude(static_cast<const float*>(t.const_data_ptr()), t.numel(), largest,
                                             limits.sm_count, stream_of(t)));
  };
  measure(x, largest_x);
  measure(dy, largest_dy);
  Tensor dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));
  for (int64_t first = 0; first < shape.n; first += plan.samples) {
    const int64_t count = std::min(plan.samples, shape.n - first);
    const WgradPlan main = plan_wgrad_terms(problem, limits, count, kSplitChain);
    const WgradPlan rest = plan_wgrad_terms(problem, limits, count);
    Tensor some_x = x, some_dy = dy;
    const SplitTerms xs(op, torch::stable::narrow(some_x, 0, first, count), largest_x);
    const SplitTerms dys(op, torch::stable::narrow(some_dy, 0, first, count), largest_dy);
    WgradSumParams sum{};
    sum.largest[0] = largest_x;
    sum.largest[1] = largest_dy;
    sum.adds = first > 0;
    const int64_t portions = wgrad_portions(main);
    for (int64_t i = 0; i < portions; ++i) {
      run_wgrad(op, dys.high, xs.high, dweight, shape, wgrad_portion(main, i, portions), sum);
      sum.adds = true;
    }
    sum.shift = kSplitBits;
    run_wgrad(op, dys.low, xs.high, dweight, shape, rest, sum);
    run_wgrad(op, dys.high, xs.low, dweight, shape, rest, sum);
  }
  return dweight;
}

// Of a gradient that is made from x and stored for dx.
constexpr int64_t kMadeGradientBytes = int64_t(128) << 20;

// Strides of a contiguous tensor but for the width's.
template <int kDims>
void planar_strides(const Tensor& t, int rank, int64_t* n, int64_t* c, int64_t (&strides)[kDims]) {
  int64_t spatial[3];
  spatial_strides(t, rank, spatial);
  *n = t.stride(0), *c = t.stride(1);
  std::copy(spatial, spatial + kDims, strides);
}

// `weight` is of dy's type.
FewDgradParams few_dgrad_params(const Tensor& dy, const Tensor& dx, const Tensor& weight, const ConvShape& shape,
                                const FewDgradPlan& plan) {
  FewDgradParams p{};
  p.dy = dy.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.dx = dx.mutable_data_ptr();
  planar_strides(dy, shape.rank, &p.dy_stride_n, &p.dy_stride_c, p.dy_stride);
  planar_strides(dx, shape.rank, &p.dx_stride_n, &p.dx_stride_c, p.dx_stride);
  p.w_stride_out = weight.stride(0);
  p.w_stride_in = weight.stride(1);
  spatial_strides(weight, shape.rank, p.w_stride_k);
  p.c_in = static_cast<int>(shape.c_in);
  p.c_out = static_cast<int>(shape.c_out);
  std::copy(shape.in, shape.in + 3, p.in);
  std::copy(shape.out, shape.out + 3, p.out);
  p.plan = plan;
  return p;
}

Tensor conv_few_dgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight, const ConvShape& shape,
                      const FewDgradPlan& plan) {
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, MemoryFormat::Contiguous);
  const Tensor narrow = as_type_of(weight, x);
  raise_on_error(op, run_conv_few_dgrad(few_dgrad_params(dy, dx, narrow, shape, plan), stream_of(x)));
  return dx;
}

// Fields of FewWgradParams and of FewMarchParams: what they read of x, and where dweight and dbias go.
template <typename Params>
void set_x_and_dweight(Params* p, const Tensor& x, const Tensor& dweight, const std::optional<Tensor>& dbias,
                       const ConvShape& shape) {
  p->x = x.const_data_ptr();
  planar_strides(x, shape.rank, &p->x_stride_n, &p->x_stride_c, p->x_stride);
  p->c_in = static_cast<int>(shape.c_in);
  p->c_out = static_cast<int>(shape.c_out);
  std::copy(shape.in, shape.in + 3, p->in);
  std::copy(shape.out, shape.out + 3, p->out);
  p->dw = dweight.mutable_data_ptr();
  p->dw_stride_out = dweight.stride(0);
  p->dw_stride_in = dweight.stride(1);
  spatial_strides(dweight, shape.rank, p->dw_stride_k);
  p->dbias = dbias ? dbias->mutable_data_ptr() : nullptr;
}
// And those of the convolution that is computed again. `weight` is of x's type.
template <typename Params>
void set_weight(const char* op, Params* p, const Tensor& weight, const OptTensor& bias, const ConvShape& shape) {
  p->weight = weight.const_data_ptr();
  p->w_stride_out = weight.stride(0);
  p->w_stride_in = weight.stride(1);
  spatial_strides(weight, shape.rank, p->w_stride_k);
  p->bias = data_or_null(bias);
  p->bias_dtype = bias ? check_dtype(op, "bias", *bias) : Dtype::kFloat32;
}

// But for dy and the partial sums.
FewWgradParams few_wgrad_params(const char* op, const Tensor& x, const Tensor& dweight,
                                const std::optional<Tensor>& dbias, const ConvShape& shape, const FewWgradPlan& plan) {
  FewWgradParams p{};
  set_x_and_dweight(&p, x, dweight, dbias, shape);
  p.dtype = check_dtype(op, "weight", dweight);
  p.plan = plan;
  return p;
}

// dweight, and dbias where it is wanted.
std::pair<Tensor, std::optional<Tensor>> conv_few_wgrad(const char* op, const Tensor& dy, const Tensor& x,
                                                        const Tensor& weight, const ConvShape& shape,
                                                        const FewWgradPlan& plan, bool wants_bias) {
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(plan.partial_floats * 4);
  workspace.allocate();
  Tensor dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));
  std::optional<Tensor> dbias;
  if (wants_bias) dbias = empty_like_shape(weight, {shape.c_out});
  FewWgradParams p = few_wgrad_params(op, x, dweight, dbias, shape, plan);
  p.dy = dy.const_data_ptr();
  planar_strides(dy, shape.rank, &p.dy_stride_n, &p.dy_stride_c, p.dy_stride);
  p.partials = workspace.at<float>(partials);
  raise_on_error(op, run_conv_few_wgrad(p, stream_of(x)));
  return {dweight, dbias ? std::optional(as_type_of(*dbias, x)) : dbias};
}

HeadParams head_params(const char* op, const Tensor& dy, const Tensor& x, const HeadGradientPlan& plan) {
  HeadParams p;
  p.x = x.const_data_ptr();
  p.dy = dy.const_data_ptr();
  p.dtype = check_dtype(op, "x", x);
  p.plan = plan;
  return p;
}

Tensor conv_head_dgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const HeadGradientPlan& plan) {
  Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, channels_last_format(x.dim()));
  const Tensor narrow = as_type_of(weight, x);
  HeadParams p = head_params(op, dy, x, plan);
  p.weight = narrow.const_data_ptr();
  p.w_stride_out = narrow.stride(0);
  p.w_stride_in = narrow.stride(1);
  p.dx = dx.mutable_data_ptr();
  raise_on_error(op, run_conv_head_dgrad(p, stream_of(x)));
  return dx;
}

Tensor conv_head_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight,
                       const HeadGradientPlan& plan) {
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(plan.partial_floats * 4);
  workspace.allocate();
  Tensor dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));
  HeadParams p = head_params(op, dy, x, plan);
  p.partials = workspace.at<float>(partials);
  p.dw = dweight.mutable_data_ptr();
  p.dw_stride_out = dweight.stride(0);
  p.dw_stride_in = dweight.stride(1);
  p.dw_dtype = check_dtype(op, "weight", weight);
  raise_on_error(op, run_conv_head_wgrad(p, stream_of(x)));
  return dweight;
}

Tensor conv_depthwise_dgrad(const char* op, const Tensor& given, const Tensor& x, const Tensor& weight,
                            const ConvProblem& problem, const ConvShape& shape, const DepthwisePlan& plan) {
  const Tensor dy = depthwise_readable(given, shape, plan.phases);
  const MemoryFormat format = shape.out_channels_last ? channels_last_format(shape.rank + 2) : MemoryFormat::Contiguous;
  const Tensor dx = empty_like_shape(x, sizes_of(x), std::nullopt, format);
  run_depthwise_phases(op, problem, /*of_dx=*/true, plan, dy, dx, weight, shape, nullptr);
  return dense_in(dx, memory_format_of(x));
}

Tensor conv_depthwise_wgrad(const char* op, const Tensor& given_dy, const Tensor& given_x, const Tensor& weight,
                            const ConvProblem& problem, const ConvShape& shape, const DepthwiseWgradPlan& plan) {
  const Tensor dy = depthwise_readable(given_dy, shape, plan.phases);
  const Tensor x = depthwise_readable(given_x, shape, plan.phases);
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(plan.partial_floats * 4);
  workspace.allocate();
  const Tensor dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));
  const auto of_phase = [&](int index) {
    return depthwise_wgrad_params(problem, plan, index, depthwise_tensor(x, shape.rank),
                                  depthwise_tensor(dy, shape.rank), depthwise_weight(op, dweight, shape),
                                  workspace.at<float>(partials));
  };
  for (int i = 0; i < depthwise_phase_count(plan.phases); ++i) {
    raise_on_error(op, run_conv_depthwise_wgrad(of_phase(i), stream_of(x)));
  }
  raise_on_error(op, run_conv_depthwise_sum(of_phase(0), stream_of(x)));
  return dweight;
}

}  // namespace

std::optional<Tensor> conv_bias_gradient(const char* op, const Tensor& dy, const ConvShape& shape) {
  ChannelSumsParams p;
  p.x = dy.const_data_ptr();
  p.rows = dy.numel() / shape.c_out;
  p.c = static_cast<int>(shape.c_out);
  p.dtype = check_dtype(op, "dy", dy);
  if (!plan_channel_sums(&p, check_gpu(op, dy).sm_count)) return std::nullopt;
  Workspace workspace(dy);
  const int64_t partials = workspace.reserve(int64_t(p.blocks) * p.c * 4);
  workspace.allocate();
  p.partials = workspace.at<float>(partials);
  Tensor sums = empty_like_shape(dy, {shape.c_out});
  p.sums = sums.mutable_data_ptr();
  raise_on_error(op, run_channel_sums(p, stream_of(dy)));
  return sums;
}

namespace {

// Of a gradient's plans, the one whose path KGOPT_AUTOTUNE finds the fastest at this shape, known or measured now. ATen
// where that was chosen of others than these, or cannot be told.
template <typename AnyPlan, typename Run>
AnyPlan tuned_gradient(const ConvArgs& a, const ConvShape& shape, ConvTuned what, const AnyPlan& chosen,
                       const std::vector<std::pair<ConvPath, AnyPlan>>& able, const Run& run) {
  std::vector<ConvPath> paths;
  for (const auto& one : able) paths.push_back(one.first);
  const auto plan_of = [&](ConvPath path) {
    return std::find_if(able.begin(), able.end(), [&](const auto& one) { return one.first == path; });
  };
  const auto fastest = tune_path(a.x.get_device_index(), tuning_key(a, shape, what), paths, current_stream(a.x),
                                 [&](ConvPath path) { run(plan_of(path)->second); });
  if (fastest && plan_of(*fastest) != able.end()) return plan_of(*fastest)->second;
  for (const auto& one : able) {
    if (one.second.index() == chosen.index()) return one.second;
  }
  return AtenPlan();
}

// Gradients of contiguous tensors, some of them from copies in channels_last: one of dy, and of x for dweight.
ConvGradients innermost_backward(const ConvArgs& a, const ConvShape& shape, const Tensor& dy,
                                 const InnermostGradients& chosen, const std::vector<bool>& mask) {
  const MemoryFormat format = channels_last_format(a.rank + 2);
  const auto backward = [&](const Tensor& dy_now, const Tensor& x_now, bool dx, bool dweight, bool dbias) {
    return conv_backward(dy_now, x_now, a.weight, a.stride, a.padding, a.dilation, a.output_padding, a.groups,
                         a.transposed, {dx, dweight, dbias}, a.backend, a.allow_tf32);
  };
  SomeConvGradients result;
  bool wants_bias = mask[2];
  if (mask[1] && !chosen.dweight) {  // reads both formats
    auto [dx, dweight, dbias] = backward(dy, a.x, false, true, wants_bias);
    result[1] = dweight;
    if (wants_bias) result[2] = dbias;
    wants_bias = false;
  }
  if (!chosen.dx && !chosen.dweight) return all_gradients(a.x, result);
  // With fp32 accuracy dy is read from a copy of twice its size: of a part of the samples at a time.
  const bool parts = shape.dtype == Dtype::kFloat32 && !a.tf32() && shape.n > 1;
  if (parts) {
    Tensor dx = empty_like_shape(a.x, sizes_of(a.x), std::nullopt, MemoryFormat::Contiguous);
    const int64_t samples = (shape.n + 3) / 4;
    for (int64_t first = 0; first < shape.n; first += samples) {
      const int64_t count = std::min(samples, shape.n - first);
      Tensor all_dy = dy, all_x = a.x;
      const Tensor some_dy = dense_in(torch::stable::narrow(all_dy, 0, first, count), format);
      const Tensor some_x = with_channels_last_strides(torch::stable::narrow(all_x, 0, first, count));
      const Tensor some_dx = std::get<0>(backward(some_dy, some_x, true, false, false));
      const Tensor to = torch::stable::narrow(dx, 0, first, count);
      transpose_into(a.op, dense_in(some_dx, format), to);
    }
    result[0] = dx;
    if (wants_bias) result[2] = std::get<2>(backward(dy, a.x, false, false, true));
    return all_gradients(a.x, result);
  }
  Tensor x_now, dy_now = dense_in(dy, format);
  if (chosen.dweight) {
    x_now = dense_in(a.x, format);
    auto [dx, dweight, dbias] = backward(dy_now, x_now, false, true, wants_bias);
    result[1] = dense_in(dweight, memory_format_of(a.weight));
    if (wants_bias) result[2] = dbias;
    wants_bias = false;
  }
  if (chosen.dx) {
    x_now = with_channels_last_strides(a.x);  // for dx only the sizes and strides of x count
    auto [dx, dweight, dbias] = backward(dy_now, x_now, true, false, wants_bias);
    if (wants_bias) result[2] = dbias;
    x_now = dy_now = Tensor();
    result[0] = dense_in(dx, MemoryFormat::Contiguous);
  }
  return all_gradients(a.x, result);
}

}  // namespace

ConvGradients conv_backward(Tensor dy, Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                            IntArray output_padding, int64_t groups, bool transposed, std::vector<bool> mask,
                            std::string backend, std::optional<bool> allow_tf32) {
  const char* const op = "conv_backward";
  const int rank = static_cast<int>(stride.size());
  KGOPT_CHECK(rank == 2 || rank == 3, op, ": stride is ", list_string(stride), ", expected 2 or 3 values");
  const ConvShape shape = check_conv(op, x, weight, std::nullopt, stride, padding, dilation, output_padding, groups,
                                     transposed, rank, true);
  check_conv_gradient(op, dy, x, shape, mask);
  const DeviceGuard guard(x.get_device_index());
  std::array<bool, 3> from_aten{mask[0], mask[1], mask[2]};
  std::optional<Tensor> dx, dweight, dbias;
  if (!shape.is_empty() && (mask[0] || mask[1])) {
    const ConvArgs args{op,     x,          weight, std::nullopt, stride,    padding, dilation, output_padding,
                        groups, transposed, rank,   backend,      allow_tf32};
    const auto is_planar = [](const Tensor& t) {
      return is_dense(t, MemoryFormat::Contiguous) && !is_channels_last(t);
    };
    if (backend == "auto" && !shape.out_channels_last && is_planar(x) && is_planar(dy)) {
      const InnermostGradients chosen = innermost_gradients(args, shape, mask[0], mask[1]);
      if (chosen.dx || chosen.dweight) return innermost_backward(args, shape, dy, chosen, mask);
    }
    using Dx = decltype(ConvGradientsChoice::dx);
    using Dweight = decltype(ConvGradientsChoice::dweight);
    auto make_dx = [&](const Dx& plan) {
      if (const auto* depthwise = std::get_if<DepthwisePlan>(&plan)) {
        return conv_depthwise_dgrad(op, dy, x, weight, problem_of(args, shape, ConvEpilogue::kStore), shape,
                                    *depthwise);
      }
      if (const auto* few = std::get_if<FewDgradPlan>(&plan)) {
        return conv_few_dgrad(op, planar(dy), x, weight, shape, *few);
      }
      const Tensor innermost = channels_innermost(dy);
      if (const auto* head = std::get_if<HeadGradientPlan>(&plan))
        return conv_head_dgrad(op, innermost, x, weight, *head);
      const ConvArgs adjoint{
          op,     innermost,   weight, std::nullopt, stride,     padding, dilation, IntArray(rank, 0),
          groups, !transposed, rank,   backend,      allow_tf32, true};
      const ConvShape adjoint_shape = check_conv_args(adjoint);
      if (const auto* rows = std::get_if<PositionRowsPlan>(&plan)) {
        return conv_position_rows(adjoint, adjoint_shape, *rows);
      }
      return conv_tap_columns(adjoint, adjoint_shape, std::get<TapColumnsPlan>(plan));
    };
    auto make_dweight = [&](const Dweight& plan, bool wants_bias) -> std::pair<Tensor, std::optional<Tensor>> {
      if (const auto* depthwise = std::get_if<DepthwiseWgradPlan>(&plan)) {
        const ConvProblem problem = problem_of(args, shape, ConvEpilogue::kStore);
        return {conv_depthwise_wgrad(op, dy, x, weight, problem, shape, *depthwise), std::nullopt};
      }
      if (const auto* few = std::get_if<FewWgradPlan>(&plan)) {
        return conv_few_wgrad(op, planar(dy), planar(x), weight, shape, *few, wants_bias);
      }
      if (const auto* head = std::get_if<HeadGradientPlan>(&plan)) {
        return {conv_head_wgrad(op, channels_innermost(dy), channels_innermost(x), weight, *head), std::nullopt};
      }
      if (const auto* split = std::get_if<SplitWgradPlan>(&plan)) {
        return {conv_split_wgrad(op, dy, x, weight, problem_of(args, shape, ConvEpilogue::kStore), limits_of(args),
                                 shape, *split),
                std::nullopt};
      }
      const WgradPlan& wgrad = std::get<WgradPlan>(plan);
      const Tensor given = wgrad.few ? channels_innermost(x) : x;
      return {conv_wgrad(op, channels_innermost(dy), given, weight, shape, wgrad), std::nullopt};
    };

    // A kernel that makes copies of both tensors first is none to choose by itself.
    const bool copies = backend == "auto" && !is_channels_last(dy) && !is_channels_last(x);
    const auto choice = choose_gradients(args, shape, copies);
    Dx dx_plan = choice->dx;
    Dweight dweight_plan = choice->dweight;
    if (autotune_is_on() && backend == "auto") {
      const ConvProblem problem = problem_of(args, shape, ConvEpilogue::kStore);
      const DeviceLimits limits = limits_of(args);
      const auto all = remembered(conv_key(problem, limits, ConvBackend::kAuto),
                                  [&] { return plan_conv_gradients(problem, limits); });
      auto by_aten = [&](int i) {
        const Tf32Switch precision(allow_tf32);
        conv_gradients_aten(dy, x, weight, shape, stride, padding, dilation, output_padding, {i == 0, i == 1, false});
      };
      if (mask[0]) {
        std::vector<std::pair<ConvPath, Dx>> able{{ConvPath::kAten, AtenPlan()}};
        if (!all->dx_tap_columns.refusal) able.push_back({ConvPath::kTapColumns, all->dx_tap_columns});
        if (!all->dx_position_rows.refusal) able.push_back({ConvPath::kPositionRows, all->dx_position_rows});
        if (!all->dx_few.refusal) able.push_back({ConvPath::kFewChannels, all->dx_few});
        if (!all->head.refusal) able.push_back({ConvPath::kHead, all->head});
        if (!all->dx_depthwise.refusal) able.push_back({ConvPath::kDepthwise, all->dx_depthwise});
        auto run = [&](const Dx& plan) { std::holds_alternative<AtenPlan>(plan) ? by_aten(0) : void(make_dx(plan)); };
        dx_plan = tuned_gradient(args, shape, ConvTuned::kInputGradient, dx_plan, able, run);
      }
      if (mask[1] && !std::holds_alternative<SplitWgradPlan>(dweight_plan)) {
        std::vector<std::pair<ConvPath, Dweight>> able{{ConvPath::kAten, AtenPlan()}};
        if (!all->dweight.refusal) able.push_back({ConvPath::kTapColumns, all->dweight});
        if (!all->dweight_few.refusal) able.push_back({ConvPath::kFewChannels, all->dweight_few});
        if (!all->head.refusal) able.push_back({ConvPath::kHead, all->head});
        if (!all->dweight_depthwise.refusal) able.push_back({ConvPath::kDepthwise, all->dweight_depthwise});
        auto run = [&](const Dweight& plan) {
          std::holds_alternative<AtenPlan>(plan) ? by_aten(1) : void(make_dweight(plan, false));
        };
        dweight_plan = tuned_gradient(args, shape, ConvTuned::kWeightGradient, dweight_plan, able, run);
      }
    }

    const bool few[2] = {mask[0] && std::holds_alternative<FewDgradPlan>(dx_plan),
                         mask[1] && std::holds_alternative<FewWgradPlan>(dweight_plan)};
    const bool split = mask[1] && std::holds_alternative<SplitWgradPlan>(dweight_plan);
    // Kernels that read both formats: dy as it lies.
    const bool depthwise[2] = {mask[0] && std::holds_alternative<DepthwisePlan>(dx_plan),
                               mask[1] && std::holds_alternative<DepthwiseWgradPlan>(dweight_plan)};
    if (depthwise[0]) dy = depthwise_readable(dy, shape, std::get<DepthwisePlan>(dx_plan).phases);
    if (depthwise[1]) dy = depthwise_readable(dy, shape, std::get<DepthwiseWgradPlan>(dweight_plan).phases);
    if (depthwise[0]) dx = make_dx(dx_plan);
    if (depthwise[1]) dweight = make_dweight(dweight_plan, false).first;
    const bool own[2] = {
        mask[0] && !few[0] && !depthwise[0] && !std::holds_alternative<AtenPlan>(dx_plan),
        mask[1] && !few[1] && !split && !depthwise[1] && !std::holds_alternative<AtenPlan>(dweight_plan)};
    if (split) dweight = make_dweight(dweight_plan, false).first;
    if (few[0] || few[1]) dy = planar(dy);
    if (few[0]) dx = make_dx(dx_plan);
    if (few[1]) std::tie(dweight, dbias) = make_dweight(dweight_plan, mask[2]);
    if (own[0] || own[1]) dy = channels_innermost(dy);
    if (own[0]) dx = make_dx(dx_plan);
    if (own[1]) dweight = make_dweight(dweight_plan, false).first;
    from_aten[0] = mask[0] && !dx;
    from_aten[1] = mask[1] && !dweight;
  }
  if (mask[2] && !dbias && backend != "aten" && !shape.is_empty() && is_channels_last(dy)) {
    dy = channels_innermost(dy);
    dbias = conv_bias_gradient(op, dy, shape);
  }
  from_aten[2] = mask[2] && !dbias;
  const Tf32Switch precision(allow_tf32);
  SomeConvGradients result =
      conv_gradients_aten(dy, x, weight, shape, stride, padding, dilation, output_padding, from_aten);
  if (dx) result[0] = dx;
  if (dweight) result[1] = dweight;
  if (dbias) result[2] = dbias;
  return all_gradients(x, result);
}

namespace {

// The backward of the first pipeline's norm and mean, up to the rows from which dy is made of the convolution's output.
struct __attribute__((visibility("hidden"))) NormOfMean {
  Tensor dout, channel_mean, mean, rstd;  // dense
  OptTensor weight;
  GroupNormPassesBwdParams p;
  std::tuple<Tensor, Tensor> affine;  // the gradients of weight and bias
  Workspace space;                    // p.rows lie here

  NormOfMean(const char* op, const Tensor& x, const Tensor& given_dout, const Tensor& given_channel_mean,
             const Tensor& given_mean, const Tensor& given_rstd, const OptTensor& given_weight, int64_t num_groups,
             const ConvShape& shape, const DeviceLimits& limits)
      : dout(dense_in(
            given_dout.scalar_type() == stats_type(x) ? given_dout : torch::stable::to(given_dout, stats_type(x)),
            MemoryFormat::Contiguous)),
        channel_mean(dense_in(given_channel_mean, MemoryFormat::Contiguous)),
        mean(dense_in(given_mean, MemoryFormat::Contiguous)),
        rstd(dense_in(given_rstd, MemoryFormat::Contiguous)),
        weight(dense_or_none(given_weight)),
        space(x) {
    p.dims = {shape.n, shape.c_out, shape.out[0] * shape.out[1] * shape.out[2], num_groups, false, shape.dtype};
    p.dout = dout.const_data_ptr();
    p.channel_mean = channel_mean.const_data_ptr();
    plan_group_norm_passes_bwd(&p, limits.sm_count);
    affine = allocate_affine_gradients(x, p.dims, given_weight, std::nullopt);
    prepare_backward_passes(op, x, mean, rstd, weight, std::nullopt, std::tuple_cat(std::make_tuple(x), affine), &space,
                            &p);
    p.dx = nullptr;  // not x: rows alone
    raise_on_error(op, run_group_norm_passes_bwd(p, stream_of(x)));
  }
};

// Operands of the convolution, dense and of x's type but for the bias, and its gradients, of which dx and dbias are
// there if they are asked for.
struct MadeGradients {
  const char* op;
  Tensor x, weight;
  OptTensor bias;
  Tensor dweight;
  std::optional<Tensor> dx, dbias;
};

// One kernel marches through x and gives all gradients.
void made_by_march(const MadeGradients& made, const ConvShape& shape, const FewMarchPlan& plan,
                   const NormOfMean& norm) {
  Workspace space(made.x);
  const int64_t partials = space.reserve(plan.partial_floats * 4);
  space.allocate();
  FewMarchParams p{};
  set_x_and_dweight(&p, made.x, made.dweight, made.dbias, shape);
  set_weight(made.op, &p, made.weight, made.bias, shape);
  p.n = shape.n;
  p.dtype = check_dtype(made.op, "x", made.x);
  p.dw_dtype = check_dtype(made.op, "weight", made.dweight);
  p.dx = made.dx->mutable_data_ptr();
  p.partials = space.at<float>(partials);
  p.gradient_rows = norm.p.rows;
  p.channel_mean = norm.channel_mean.const_data_ptr();
  p.plan = plan;
  raise_on_error(made.op, run_conv_few_march(p, stream_of(made.x)));
}

// The kernel for dweight makes dy tile by tile. It gives dx, too, or stores dy of a few samples at a time, from which
// another kernel makes their dx.
void made_by_tiles(const MadeGradients& made, const ConvShape& shape, const MadeGradientPlans& plans,
                   const NormOfMean& norm) {
  const char* const op = made.op;
  const auto stream = stream_of(made.x);
  const int size = static_cast<int>(dtype_size(shape.dtype));
  Workspace space(made.x);
  const int64_t partials = space.reserve(plans.dweight.partial_floats * 4);
  space.allocate();
  FewWgradParams p = few_wgrad_params(op, made.x, made.dweight, made.dbias, shape, plans.dweight);
  set_weight(op, &p, made.weight, made.bias, shape);
  p.partials = space.at<float>(partials);
  p.gradient_rows = norm.p.rows;
  FewDgradParams q{};
  Tensor dy;
  const bool apart = made.dx && plans.why_apart;
  if (apart) {
    IntArray sizes = shape.out_sizes;
    sizes[0] = plans.samples;
    sizes.back() = made_row_elements(shape.out[2], size);
    dy = empty_like_shape(made.x, sizes, std::nullopt, MemoryFormat::Contiguous);
    q = few_dgrad_params(dy, *made.dx, made.weight, shape, plans.dx);
    planar_strides(dy, shape.rank, &p.dy_stride_n, &p.dy_stride_c, p.dy_stride);
    p.made = dy.mutable_data_ptr();
  } else if (made.dx) {
    p.dx = made.dx->mutable_data_ptr();
  }
  for (int64_t first = 0; first < shape.n; first += plans.samples) {
    const int64_t count = std::min(plans.samples, shape.n - first);
    p.adds = first > 0;
    p.more = first + count < shape.n;
    p.plan.all_tiles = plans.dweight.all_tiles / plans.samples * count;
    raise_on_error(op, run_conv_few_wgrad(p, stream));
    p.early = q.early = true;
    p.x = static_cast<const char*>(p.x) + plans.samples * p.x_stride_n * size;
    p.gradient_rows = static_cast<const char*>(p.gradient_rows) + plans.samples * shape.c_out * 8 * sizeof(float);
    if (!apart) continue;
    q.plan.all_tiles = plans.dx.all_tiles / plans.samples * count;
    raise_on_error(op, run_conv_few_dgrad(q, stream));
    q.dx = static_cast<char*>(q.dx) + plans.samples * q.dx_stride_n * size;
  }
}

// The first pipeline's gradients without its convolution's output: dy, an affine function of that output for each
// sample and channel, is made tile by tile from x by the kernel for dweight, which gives dx, too, where its plan can.
// Elsewhere dy is stored for dx, of a few samples at a time. Where another kernel is the choice for one of both, the
// last result is empty, and nothing has been done.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_group_norm_mean_gradients(
    Tensor dout, Tensor x, Tensor weight, OptTensor bias, OptTensor gn_weight, Tensor channel_mean, Tensor mean,
    Tensor rstd, int64_t num_groups, IntArray stride, IntArray padding, IntArray dilation, int64_t groups,
    std::vector<bool> mask, std::string backend, std::optional<bool> allow_tf32) {
  const char* const op = "conv_group_norm_mean_gradients";
  const int rank = static_cast<int>(stride.size());
  KGOPT_CHECK(rank == 2 || rank == 3, op, ": stride is ", list_string(stride), ", expected 2 or 3 values");
  const ConvArgs args{op,     x,     weight, bias,    stride,     padding, dilation, IntArray(rank, 0),
                      groups, false, rank,   backend, allow_tf32, true};
  const ConvShape shape = check_conv_args(args);
  KGOPT_CHECK(mask.size() == 3, op, ": mask has ", mask.size(), " values, expected 3");
  check_group_norm_affine(op, x, shape.c_out, num_groups, gn_weight, std::nullopt);
  check_same_device(op, "dout", dout, x);
  check_shape(op, "dout", dout, {shape.n});
  check_dtype(op, "dout", dout);
  check_statistics(op, "channel_mean", channel_mean, x, {shape.n, shape.c_out});
  check_statistics(op, "mean", mean, x, {shape.n, num_groups});
  check_statistics(op, "rstd", rstd, x, {shape.n, num_groups});
  const DeviceGuard guard(x.get_device_index());
  const Tensor none = empty_like_shape(x, {0});
  const std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> refused{none, none, none, none, none};
  if (shape.is_empty() || !x.is_contiguous() || backend == "aten") return refused;
  const auto choice = choose_gradients(args, shape);
  const bool few = std::holds_alternative<FewWgradPlan>(choice->dweight) &&
                   (!mask[0] || std::holds_alternative<FewDgradPlan>(choice->dx));
  if (!few) return refused;

  const int size = static_cast<int>(dtype_size(shape.dtype));
  const int64_t sample_bytes = shape.c_out * shape.out[0] * shape.out[1] * made_row_elements(shape.out[2], size) * size;
  const int64_t most = std::max<int64_t>(1, kMadeGradientBytes / sample_bytes);
  const ConvProblem problem = problem_of(args, shape, ConvEpilogue::kStore);
  const DeviceLimits limits = limits_of(args);
  ConvKey key = conv_key(problem, limits, ConvBackend::kAuto);
  key[11] = mask[0] ? most : 0;
  const auto plans = remembered(key, [&] { return plan_made_gradients(problem, limits, mask[0], most); });
  if (plans->refusal(mask[0])) return refused;

  const NormOfMean norm(op, x, dout, channel_mean, mean, rstd, gn_weight, num_groups, shape, limits);
  MadeGradients made{op, planar(x), as_type_of(weight, x), dense_or_none(bias)};
  made.dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));
  if (mask[0]) made.dx = empty_like_shape(x, sizes_of(x), std::nullopt, MemoryFormat::Contiguous);
  if (mask[2]) made.dbias = empty_like_shape(weight, {shape.c_out});
  if (plans->march.refusal) {
    made_by_tiles(made, shape, *plans, norm);
  } else {
    made_by_march(made, shape, plans->march, norm);
  }
  return {made.dx ? *made.dx : none, mask[1] ? made.dweight : none, made.dbias ? as_type_of(*made.dbias, x) : none,
          std::get<0>(norm.affine), std::get<1>(norm.affine)};
}

// The third pipeline's gradients, likewise: the convolution is computed twice from x, in registers, once for the norm's
// sums and once for dy, which is stored only where the same pass does not multiply it. Where another kernel is the
// choice for a gradient, or the passes are not for such a convolution, the last result is empty, and nothing has been
// done.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> conv_group_norm_lse_gradients(
    Tensor dout, Tensor x, Tensor weight, OptTensor bias, OptTensor gn_weight, OptTensor gn_bias, Tensor mean,
    Tensor rstd, int64_t num_groups, IntArray stride, IntArray padding, IntArray dilation, int64_t groups,
    std::vector<bool> mask, std::string backend, std::optional<bool> allow_tf32) {
  const char* const op = "conv_group_norm_lse_gradients";
  const int rank = static_cast<int>(stride.size());
  KGOPT_CHECK(rank == 2 || rank == 3, op, ": stride is ", list_string(stride), ", expected 2 or 3 values");
  const Tensor planes = planar(x), narrow = as_type_of(weight, x);
  const OptTensor narrow_bias = bias ? OptTensor(as_type_of(*bias, x)) : std::nullopt;
  const ConvArgs args{op,     planes, narrow, narrow_bias, stride,     padding, dilation, IntArray(rank, 0),
                      groups, false,  rank,   backend,     allow_tf32, true};
  const ConvShape shape = check_conv_args(args);
  KGOPT_CHECK(mask.size() == 3, op, ": mask has ", mask.size(), " values, expected 3");
  check_group_norm_affine(op, x, shape.c_out, num_groups, gn_weight, gn_bias);
  IntArray dout_sizes = shape.out_sizes;
  dout_sizes[1] = 1;
  check_same_device(op, "dout", dout, x);
  check_shape(op, "dout", dout, dout_sizes);
  check_statistics(op, "mean", mean, x, {shape.n, num_groups});
  check_statistics(op, "rstd", rstd, x, {shape.n, num_groups});
  const DeviceGuard guard(x.get_device_index());
  const Tensor none = empty_like_shape(x, {0});
  Tensor dx = none, dweight = none, dbias = none;
  const std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> refused{none, none, none, none, none};
  if (shape.is_empty() || !x.is_contiguous() || backend == "aten") return refused;
  const auto choice = choose_gradients(args, shape);
  const bool few = (!(mask[1] || mask[2]) || std::holds_alternative<FewWgradPlan>(choice->dweight)) &&
                   (!mask[0] || std::holds_alternative<FewDgradPlan>(choice->dx));
  if (!few) return refused;
  const ConvProblem problem = problem_of(args, shape, ConvEpilogue::kResidualLse);
  const DeviceLimits limits = limits_of(args);
  ConvKey key = conv_key(problem, limits, ConvBackend::kAuto);
  key[12] = 102;
  const auto plans = remembered(key, [&] { return plan_norm_lse(problem, limits); });
  if (plans->refusal(mask)) return refused;

  const auto stream = stream_of(x);
  const int size = static_cast<int>(dtype_size(shape.dtype));
  const CallOperands operands(args, shape);
  ConvNormLseParams p{few_channels_params(operands, plans->norm)};
  p.norm.dims = {shape.n, shape.c_out, shape.out[0] * shape.out[1] * shape.out[2], num_groups, false, shape.dtype};
  p.norm.slices = plans->norm.slices;
  const Tensor dense_dout = dense_in(
      dout.scalar_type() == stats_type(x) ? dout : torch::stable::to(dout, stats_type(x)), MemoryFormat::Contiguous);
  const Tensor dense_mean = dense_in(mean, MemoryFormat::Contiguous);
  const Tensor dense_rstd = dense_in(rstd, MemoryFormat::Contiguous);
  const OptTensor w = dense_or_none(gn_weight), b = dense_or_none(gn_bias);
  const auto affine = allocate_affine_gradients(x, p.norm.dims, gn_weight, gn_bias);
  Workspace space(x);
  prepare_backward_passes(op, x, dense_mean, dense_rstd, w, b, std::tuple_cat(std::make_tuple(none), affine), &space,
                          &p.norm);
  p.dlse = static_cast<const float*>(dense_dout.const_data_ptr());
  Workspace of_positions(x);
  const int64_t shares = of_positions.reserve(p.norm.dims.n * p.norm.dims.s * 8);
  const int64_t sizes = of_positions.reserve(p.norm.dims.n * p.norm.slices * 8);
  of_positions.allocate();
  p.shares = of_positions.at<float>(shares);
  p.sizes = of_positions.at<float>(sizes);
  raise_on_error(op, run_conv_norm_lse_sums(p, stream));
  raise_on_error(op, run_group_norm_passes_bwd_merge(p.norm, stream));
  if (!(mask[0] || mask[1] || mask[2])) return {dx, dweight, dbias, std::get<0>(affine), std::get<1>(affine)};

  if (!plans->fused.refusal) {
    Workspace space_of_products(x);
    p.conv.plan = plans->fused;
    place_norm_lse_frames(p.conv, &p.dx);
    const int64_t frames = space_of_products.reserve(mask[0] ? shape.n * p.dx.frame_n * kNormLseDxChannels * 4 : 0);
    const int64_t partials =
        space_of_products.reserve(shape.n * plans->fused.slices * kNormLseConsumers * kNormLseDweightFloats * 4);
    space_of_products.allocate();
    p.dx.frames = space_of_products.at<float>(frames);
    p.dweight.partials = space_of_products.at<float>(partials);
    if (mask[0]) {
      dx = empty_like_shape(x, sizes_of(x), std::nullopt, MemoryFormat::Contiguous);
      p.dx.dx = dx.mutable_data_ptr();
      int64_t stride_c, strides[2];
      planar_strides(dx, rank, &p.dx.stride_n, &stride_c, strides);
      p.dx.stride_c = static_cast<int>(stride_c);
      std::copy(strides, strides + 2, p.dx.stride);
      p.dx.pairs = shape.in[2] % 2 == 0 && shape.padding[2] % 2 == 0;
    }
    raise_on_error(op, run_conv_norm_lse_gradients(p, stream));
    if (mask[0]) raise_on_error(op, run_norm_lse_dx_borders(p, stream));
    if (mask[1] || mask[2]) {
      dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));
      if (mask[2]) dbias = empty_like_shape(weight, {shape.c_out});
      int64_t strides[3];
      spatial_strides(dweight, rank, strides);
      p.dweight.dw = dweight.mutable_data_ptr();
      p.dweight.dbias = mask[2] ? dbias.mutable_data_ptr() : nullptr;
      p.dweight.stride_out = dweight.stride(0), p.dweight.stride_in = dweight.stride(1);
      std::copy(strides + 1, strides + 3, p.dweight.stride);
      p.dweight.dtype = check_dtype(op, "weight", dweight);
      raise_on_error(op, run_norm_lse_dweight(p, stream));
      if (mask[2]) dbias = as_type_of(dbias, x);
    }
    return {dx, mask[1] ? dweight : none, dbias, std::get<0>(affine), std::get<1>(affine)};
  }

  IntArray dy_sizes = shape.out_sizes;
  p.row = static_cast<int>(made_row_elements(shape.out[2], size));
  dy_sizes.back() = p.row;
  const Tensor dy = empty_like_shape(x, dy_sizes, std::nullopt, MemoryFormat::Contiguous);
  p.conv.stored = dy.mutable_data_ptr();
  p.conv.y_stride_n = dy.stride(0);
  p.conv.stored_stride_c = dy.stride(1);
  spatial_strides(dy, rank, p.conv.y_stride);
  raise_on_error(op, run_conv_norm_lse_store(p, stream));
  if (mask[1] || mask[2]) {
    std::optional<Tensor> sums;
    std::tie(dweight, sums) = conv_few_wgrad(op, dy, planes, weight, shape, plans->dweight, mask[2]);
    if (sums) dbias = *sums;
  }
  if (mask[0]) dx = conv_few_dgrad(op, dy, planes, weight, shape, plans->dx);
  return {dx, mask[1] ? dweight : none, dbias, std::get<0>(affine), std::get<1>(affine)};
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("conv_backward", TORCH_BOX(&kgopt::conv_backward));
  m.impl("conv_group_norm_mean_gradients", TORCH_BOX(&kgopt::conv_group_norm_mean_gradients));
  m.impl("conv_group_norm_lse_gradients", TORCH_BOX(&kgopt::conv_group_norm_lse_gradients));
}
