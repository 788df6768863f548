// CUDA gradients of convolutions: dx by the Hopper convolution, dweight by its own kernel, each where it is the faster
// one; ATen for the rest.
#include "conv3d_wgrad.h"
#include "conv_call.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

// Dense so, and where the tensor copies can read it.
Tensor channels_innermost(const Tensor& t) {
  const Tensor dense = dense_in(t, channels_last_format(t.dim()));
  return reinterpret_cast<uintptr_t>(dense.const_data_ptr()) % 16 == 0 ? dense : torch::stable::clone(dense);
}

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

Tensor conv_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight, const ConvShape& shape,
                  const WgradPlan& plan) {
  const auto stream = static_cast<cudaStream_t>(current_stream(x));
  Workspace workspace(x);
  const int64_t partials = workspace.reserve(plan.partial_floats * 4);
  workspace.allocate();
  Tensor dweight = empty_like_shape(weight, sizes_of(weight), std::nullopt, memory_format_of(weight));

  WgradParams p{};
  p.plan = plan;
  p.partials = workspace.at<float>(partials);
  const WgradTensor dy_part = wgrad_tensor(dy, shape.rank), x_part = wgrad_tensor(x, shape.rank);
  raise_on_error(op, set_wgrad_tensors(&p, shape.transposed ? x_part : dy_part, shape.transposed ? dy_part : x_part));
  raise_on_error(op, run_conv_wgrad(p, stream));

  WgradSumParams sum{};
  sum.partials = p.partials;
  sum.dw = dweight.mutable_data_ptr();
  sum.a = static_cast<int>(weight.size(0));
  sum.b = static_cast<int>(weight.size(1));
  sum.stride_a = dweight.stride(0);
  sum.stride_b = dweight.stride(1);
  spatial_strides(dweight, shape.rank, sum.stride_k);
  sum.dtype = check_dtype(op, "weight", weight);
  sum.plan = plan;
  raise_on_error(op, run_conv_wgrad_sum(sum, stream));
  return dweight;
}

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
  std::optional<Tensor> dx, dweight;
  if (x.numel() > 0 && (mask[0] || mask[1])) {
    const ConvGradientsChoice choice = choose_gradients({op, x, weight, std::nullopt, stride, padding, dilation,
                                                         output_padding, groups, transposed, rank, backend, allow_tf32},
                                                        shape);
    // A kernel that makes copies of both tensors first is none to choose by itself.
    const bool copies = backend == "auto" && !is_channels_last(dy) && !is_channels_last(x);
    const bool own[2] = {mask[0] && !choice.why_not_dgrad && !copies, mask[1] && !choice.why_not_wgrad && !copies};
    if (own[0] || own[1]) dy = channels_innermost(dy);
    if (own[0]) {
      const ConvArgs adjoint{
          op,     dy,          weight, std::nullopt, stride,     padding, dilation, IntArray(rank, 0),
          groups, !transposed, rank,   backend,      allow_tf32, true};
      dx = conv_hopper(adjoint, check_conv_args(adjoint), choice.dgrad);
    }
    if (own[1]) dweight = conv_wgrad(op, dy, choice.wgrad.few ? channels_innermost(x) : x, weight, shape, choice.wgrad);
    for (int i = 0; i < 2; ++i) from_aten[i] = mask[i] && !own[i];
  }
  SomeConvGradients result =
      conv_gradients_aten(dy, x, weight, shape, stride, padding, dilation, output_padding, from_aten);
  if (dx) result[0] = dx;
  if (dweight) result[1] = dweight;
  return all_gradients(x, result);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) { m.impl("conv_backward", TORCH_BOX(&kgopt::conv_backward)); }
