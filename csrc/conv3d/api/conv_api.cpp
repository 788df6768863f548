// CUDA convolutions: checks, allocation, choice of path.
#include "conv3d/api/autotune.h"
#include "conv3d/api/call.h"
#include "groupnorm/api/group_norm_api.h"

namespace kgopt {

using torch::stable::accelerator::DeviceGuard;

Tensor conv_hopper(const ConvArgs& a, const ConvShape& shape, const HopperPlan& plan, const ConvTail& tail) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  Workspace workspace(a.x);
  const HopperSpace space(&workspace, plan);
  const bool with_moments = !tail.left_moments;
  StatsPartials partials;
  partials.slices = hopper_moment_slices(plan);
  partials.rows = shape.c_out;
  const int64_t moments = workspace.reserve(with_moments ? shape.n * partials.slices * partials.rows * 3 * 4 : 0);
  workspace.allocate();
  if (with_moments) partials.data = workspace.at<void>(moments);
  Tensor y = allocate_output(a, shape);
  HopperParams p = start_hopper(a, shape, plan, space, workspace, stream, partials);
  set_output(&p, y, a.rank);
  if (!tail.left_rest) {
    p.residual = tail.residual;
    p.scale = static_cast<float>(tail.scale);
    p.act = chain_kind(tail.act);
    p.moments = static_cast<float*>(partials.data);
  }
  raise_on_error(a.op, run_conv_hopper(p, stream));
  if (with_moments) channel_moments_cuda(a.op, a.x, partials, *tail.moments);
  return y;
}

Tensor conv_rows(const ConvArgs& a, const ConvShape& shape, const RowsPlan& plan, const ConvTail& tail,
                 const RowsNorm& norm) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(plan.packed_bytes);
  const int64_t bias = workspace.reserve(int64_t(plan.m_tiles) * plan.segments * 64 * 4);
  const int64_t copy = workspace.reserve(plan.copy_bytes);
  workspace.allocate();
  Tensor y = allocate_output(a, shape);
  RowsParams p = start_rows(a, shape, plan, workspace.at<void>(packed), workspace.at<float>(bias),
                            workspace.at<void>(copy), stream);
  p.y = y.mutable_data_ptr();
  p.y_stride_n = y.stride(0);
  spatial_strides(y, a.rank, p.y_stride);
  if (!tail.left_rest) p.act = chain_kind(tail.act);
  p.norm = norm;
  raise_on_error(a.op, run_conv_rows(p, stream));
  return y;
}

namespace {

Tensor conv_implicit_gemm(const ConvArgs& a, const ConvShape& shape, const ConvPlan& plan) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(packed_weight_bytes(plan));
  const int64_t bias = workspace.reserve(packed_bias_bytes(shape, plan));
  workspace.allocate();
  Tensor y = allocate_output(a, shape);
  ConvKernelParams p = make_kernel_params(a, shape, plan);
  pack_weights(a, shape, &p, workspace.at<uint32_t>(packed), workspace.at<float>(bias), stream);
  set_output(&p, y, a.rank);
  raise_on_error(a.op, shape.transposed ? run_conv_transpose3d(p, shape.n, stream) : run_conv3d(p, shape.n, stream));
  return y;
}

Tensor conv_narrow(const ConvArgs& a, const ConvShape& shape, const NarrowPlan& plan) {
  Tensor y = allocate_output(a, shape), dense_bias;
  NarrowParams p = make_narrow_params(a, shape, plan, &dense_bias);
  p.stored = y.mutable_data_ptr();
  p.y_stride_n = y.stride(0);
  p.stored_stride_c = y.stride(1);
  spatial_strides(y, a.rank, p.y_stride);
  p.stored_pairs = shape.out[2] % 2 == 0;
  raise_on_error(a.op, run_conv_narrow_store(p, shape.n, static_cast<cudaStream_t>(current_stream(a.x))));
  return y;
}

Tensor conv_direct(const ConvArgs& a, const ConvShape& shape) {
  Tensor y = allocate_output(a, shape);
  const Tensor bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  ConvDirectParams p{};
  set_input(&p, a, shape);
  set_weight(&p, a, shape);
  p.bias = a.bias ? bias.const_data_ptr() : nullptr;
  p.y = y.mutable_data_ptr();
  p.y_stride_n = y.stride(0);
  p.y_stride_c = y.stride(1);
  spatial_strides(y, a.rank, p.y_stride);
  p.dtype = shape.dtype;
  p.n = shape.n;
  p.transposed = shape.transposed;
  for (int i = 0; i < 3; ++i) {
    p.kernel[i] = static_cast<int>(shape.kernel[i]);
    p.stride[i] = static_cast<int>(shape.stride[i]);
    p.padding[i] = static_cast<int>(shape.padding[i]);
    p.dilation[i] = static_cast<int>(shape.dilation[i]);
  }
  raise_on_error(a.op, run_conv_direct(p, static_cast<cudaStream_t>(current_stream(a.x))));
  return y;
}

// cuDNN, through ATen.
Tensor conv_aten(const ConvArgs& a, const ConvShape& shape) {
  Tensor y;
  if (&aoti_torch_cuda_convolution != nullptr) {
    AtenTensorHandle bias = a.bias ? a.bias->get() : nullptr, made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution(
        a.x.get(), a.weight.get(), a.bias ? &bias : nullptr, a.stride.data(), a.rank, a.padding.data(), a.rank,
        a.dilation.data(), a.rank, a.transposed, a.output_padding.data(), a.rank, a.groups, &made));
    y = Tensor(made);
  } else {
    y = call_aten("aten::convolution", "", a.x, a.weight, a.bias, a.stride, a.padding, a.dilation, a.transposed,
                  a.output_padding, a.groups);
  }
  return dense_in(y, shape.out_channels_last ? channels_last_format(a.rank + 2) : MemoryFormat::Contiguous);
}

// ATen follows the global switch only: a call that forbids TF32 while the switch allows it must not go there.
bool aten_would_use_tf32(const ConvArgs& a, const ConvShape& shape) {
  return shape.dtype == Dtype::kFloat32 && a.allow_tf32 && !*a.allow_tf32 && tf32_allowed_by_default();
}

Tensor run_path(const ConvArgs& a, const ConvShape& shape, const ConvChoice& choice, ConvPath path,
                const ConvTail& tail) {
  if (path == ConvPath::kHopper) return conv_hopper(a, shape, choice.hopper, tail);
  if (path == ConvPath::kRows) return conv_rows(a, shape, choice.rows, tail);
  if (a.weight.scalar_type() != a.x.scalar_type()) {  // the two above round it while they pack it
    const Tensor weight = as_type_of(a.weight, a.x);
    const OptTensor bias = a.bias ? OptTensor(as_type_of(*a.bias, a.x)) : std::nullopt;
    return run_path({a.op, a.x, weight, bias, a.stride, a.padding, a.dilation, a.output_padding, a.groups, a.transposed,
                     a.rank, a.backend, a.allow_tf32},
                    shape, choice, path, tail);
  }
  switch (path) {
    case ConvPath::kImplicitGemm: return conv_implicit_gemm(a, shape, choice.plan);
    case ConvPath::kNarrow: return conv_narrow(a, shape, choice.narrow);
    case ConvPath::kDirect: return conv_direct(a, shape);
    default: return conv_aten(a, shape);
  }
}

// How a convolution goes: by `path` of `choice`.
struct ForwardPath {
  const ConvChoice* choice;
  ConvPath path;
  const char* instead = nullptr;  // why by that one, where it is not the choice's
};

// `measures`: now, where KGOPT_AUTOTUNE asks for it; else what was measured before counts.
ForwardPath forward_path(const ConvArgs& a, const ConvShape& shape, bool measures) {
  const ConvChoice* const choice = &choose(a, shape, ConvEpilogue::kStore);
  ForwardPath to{choice, choice->path};
  if (shape.is_empty()) return {choice, ConvPath::kAten, "a tensor has no elements"};
  if (choice->cannot) return to;
  const bool no_aten = aten_would_use_tf32(a, shape);
  if (autotune_is_on() && a.backend == "auto" && !choice->plan.refusal) {
    std::optional<ConvPath> tuned;
    if (measures) {
      std::vector<ConvPath> paths;
      for (const ConvPath one :
           {ConvPath::kAten, ConvPath::kImplicitGemm, ConvPath::kHopper, ConvPath::kRows, ConvPath::kNarrow}) {
        if (!conv_refusal(*choice, one) && !(no_aten && one == ConvPath::kAten)) paths.push_back(one);
      }
      auto run = [&](ConvPath one) { run_path(a, shape, *choice, one, ConvTail()); };
      tuned = tune_path(a.x.get_device_index(), tuning_key(a, shape), paths, current_stream(a.x), run);
    } else {
      tuned = tuned_path(a.x.get_device_index(), tuning_key(a, shape));
    }
    if (tuned && !conv_refusal(*choice, *tuned)) to = {choice, *tuned, "measured here (KGOPT_AUTOTUNE)"};
  }
  if (to.path == ConvPath::kAten && no_aten) {
    to.choice =
        &choose_cached(problem_of(a, shape, ConvEpilogue::kStore), limits_of(a), ConvBackend::kKgopt, &choose_conv);
    to.path = to.choice->path;
    to.instead = "TF32 is forbidden, and allowed by the switch that cuDNN follows";
  }
  return to;
}

}  // namespace

std::string explain_forward(const ConvArgs& a, const ConvShape& shape) {
  const ForwardPath to = forward_path(a, shape, false);
  if (!to.instead) return to.choice->explain();
  ConvChoice choice = *to.choice;
  choice.path = to.path;
  choice.reason = std::string(to.instead) + ": " + conv_path_name(to.path);
  return choice.explain();
}

Tensor conv_forward(const ConvArgs& a, ConvTail* tail) {
  const ConvShape shape = check_conv_args(a);
  const DeviceGuard guard(a.x.get_device_index());
  const ForwardPath to = forward_path(a, shape, true);
  const ConvChoice* const choice = to.choice;
  ConvPath path = to.path;
  KGOPT_CHECK(!choice->cannot || to.instead, a.op, ": backend is '", a.backend,
              "', which cannot run this convolution: ", choice->cannot);
  if (!tail) return run_path(a, shape, *choice, path, ConvTail());
  tail->left_bias = a.bias.has_value() && path == ConvPath::kAten;
  // The kernel by rows does an activation and no more; where more is wanted, the other Hopper kernel makes up for it.
  const bool act_only = !tail->residual && tail->scale == 1 && !tail->moments;
  const bool hopper_has_tail = !choice->hopper.refusal && !choice->hopper.wide;
  if (path == ConvPath::kRows && !act_only && hopper_has_tail) path = ConvPath::kHopper;
  const bool has_tail = path == ConvPath::kRows ? act_only : path == ConvPath::kHopper && hopper_has_tail;
  tail->left_rest =
      !has_tail || chain_kind(tail->act) == Chain::kAny || reinterpret_cast<uintptr_t>(tail->residual) % 16 != 0;
  tail->left_moments = tail->left_rest || !tail->moments;
  if (!tail->left_bias) return run_path(a, shape, *choice, path, *tail);
  ConvArgs bare = a;
  bare.bias = std::nullopt;
  return run_path(bare, shape, *choice, path, *tail);
}

namespace {

template <int kRank>
Tensor conv_cuda(Tensor x, Tensor weight, OptTensor bias, IntArray stride, IntArray padding, IntArray dilation,
                 int64_t groups, std::string backend, std::optional<bool> allow_tf32) {
  return conv_forward({kRank == 2 ? "conv2d" : "conv3d", x, weight, bias, stride, padding, dilation, IntArray(kRank, 0),
                       groups, false, kRank, backend, allow_tf32, true});
}

template <int kRank>
Tensor conv_transpose_cuda(Tensor x, Tensor weight, OptTensor bias, IntArray stride, IntArray padding,
                           IntArray output_padding, int64_t groups, IntArray dilation, std::string backend,
                           std::optional<bool> allow_tf32) {
  return conv_forward({kRank == 2 ? "conv_transpose2d" : "conv_transpose3d", x, weight, bias, stride, padding, dilation,
                       output_padding, groups, true, kRank, backend, allow_tf32, true});
}

std::string explain_conv(Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                         IntArray output_padding, int64_t groups, bool transposed, std::string epilogue,
                         std::string backend, std::optional<bool> allow_tf32, int64_t num_groups) {
  const char* const op = "explain_conv";
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  KGOPT_CHECK(epilogue == "store" || epilogue == "stats" || epilogue == "relu_norm" || epilogue == "logsumexp" ||
                  epilogue == "backward",
              op, ": epilogue is '", epilogue, "', expected store, stats, relu_norm, logsumexp or backward");
  const ConvArgs a{op,
                   x,
                   weight,
                   std::nullopt,
                   stride,
                   padding,
                   dilation,
                   output_padding,
                   groups,
                   transposed,
                   static_cast<int>(x.dim()) - 2,
                   backend,
                   allow_tf32,
                   true};
  const ConvShape shape = check_conv_args(a);
  KGOPT_CHECK(num_groups >= 0 && (num_groups == 0 || shape.c_out % num_groups == 0), op, ": num_groups is ", num_groups,
              ", expected a divisor of the ", shape.c_out, " output channels, or 0");
  const DeviceGuard guard(x.get_device_index());
  if (epilogue == "store") return explain_forward(a, shape);
  if (epilogue == "backward") {
    std::string text = choose_gradients(a, shape).explain();
    if (backend != "auto" || !autotune_is_on()) return text;
    for (const auto& [what, name] :
         {std::pair(ConvTuned::kInputGradient, "; dx"), std::pair(ConvTuned::kWeightGradient, "; dweight")}) {
      const auto path = tuned_path(x.get_device_index(), tuning_key(a, shape, what));
      if (path) text += std::string(name) + " measured here (KGOPT_AUTOTUNE): " + conv_path_name(*path);
    }
    return text;
  }
  const ConvEpilogue which = epilogue == "stats"       ? ConvEpilogue::kStats
                             : epilogue == "relu_norm" ? ConvEpilogue::kStoreStats
                                                       : ConvEpilogue::kResidualLse;
  return explain_pipeline(a, shape, which, num_groups);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("conv2d", TORCH_BOX(&kgopt::conv_cuda<2>));
  m.impl("conv3d", TORCH_BOX(&kgopt::conv_cuda<3>));
  m.impl("conv_transpose2d", TORCH_BOX(&kgopt::conv_transpose_cuda<2>));
  m.impl("conv_transpose3d", TORCH_BOX(&kgopt::conv_transpose_cuda<3>));
  m.impl("explain_conv", TORCH_BOX(&kgopt::explain_conv));
}
