// CUDA convolutions: checks, allocation, choice of path.
#include "conv3d/api/autotune.h"
#include "conv3d/api/call.h"
#include "conv3d/few_channels/start.h"
#include "conv3d/implicit_gemm/start.h"
#include "conv3d/wgmma/position_rows/start.h"
#include "conv3d/wgmma/tap_columns/start.h"
#include "groupnorm/api/group_norm_api.h"
#include "pointwise/pointwise_api.h"

namespace kgopt {

using torch::stable::accelerator::DeviceGuard;

Tensor conv_tap_columns(const ConvArgs& a, const ConvShape& shape, const TapColumnsPlan& plan, const ConvTail& tail) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const CallOperands operands(a, shape);
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(plan.packed_bytes);
  const int64_t bias = workspace.reserve(tap_columns_bias_bytes(plan));
  const bool with_moments = !tail.left_moments;
  StatsPartials partials;
  partials.slices = tap_columns_moment_slices(plan);
  partials.rows = shape.c_out;
  const int64_t moments = workspace.reserve(with_moments ? shape.n * partials.slices * partials.rows * 3 * 4 : 0);
  workspace.allocate();
  if (with_moments) partials.data = workspace.at<void>(moments);
  Tensor y = allocate_output(a, shape);
  TapColumnsParams p;
  raise_on_error(a.op, start_tap_columns(operands, plan, workspace.at<void>(packed), workspace.at<float>(bias),
                                         partials, &p, stream));
  set_output(&p, y, a.rank);
  if (!tail.left_rest) {
    p.residual = tail.residual;
    p.scale = static_cast<float>(tail.scale);
    p.act = chain_kind(tail.act);
    p.moments = static_cast<float*>(partials.data);
  }
  raise_on_error(a.op, run_conv_tap_columns(p, stream));
  if (with_moments) channel_moments_cuda(a.op, a.x, partials, *tail.moments);
  return y;
}

Tensor conv_position_rows(const ConvArgs& a, const ConvShape& shape, const PositionRowsPlan& plan, const ConvTail& tail,
                          const PositionRowsNorm& norm) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const CallOperands operands(a, shape);
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(plan.packed_bytes);
  const int64_t bias = workspace.reserve(position_rows_bias_bytes(plan));
  const int64_t copy = workspace.reserve(plan.copy_bytes);
  workspace.allocate();
  Tensor y = allocate_output(a, shape);
  PositionRowsParams p;
  raise_on_error(a.op, start_position_rows(operands, plan, workspace.at<void>(packed), workspace.at<float>(bias),
                                           workspace.at<void>(copy), &p, stream));
  p.y = y.mutable_data_ptr();
  p.y_stride_n = y.stride(0);
  spatial_strides(y, a.rank, p.y_stride);
  if (!tail.left_rest) p.act = chain_kind(tail.act);
  p.norm = norm;
  raise_on_error(a.op, run_conv_position_rows(p, stream));
  return y;
}

namespace {

Tensor conv_implicit_gemm(const ConvArgs& a, const ConvShape& shape, const ImplicitGemmPlan& plan) {
  const auto stream = static_cast<cudaStream_t>(current_stream(a.x));
  const CallOperands operands(a, shape);
  Workspace workspace(a.x);
  const int64_t packed = workspace.reserve(packed_weight_bytes(plan));
  const int64_t bias = workspace.reserve(packed_bias_bytes(operands, plan));
  workspace.allocate();
  Tensor y = allocate_output(a, shape);
  ImplicitGemmParams p = implicit_gemm_params(operands, plan);
  raise_on_error(a.op,
                 pack_implicit_gemm(operands, &p, workspace.at<uint32_t>(packed), workspace.at<float>(bias), stream));
  set_output(&p, y, a.rank);
  raise_on_error(a.op, run_conv3d(p, shape.n, stream));
  return y;
}

Tensor conv_few_channels(const ConvArgs& a, const ConvShape& shape, const FewChannelsPlan& plan) {
  Tensor y = allocate_output(a, shape);
  const CallOperands operands(a, shape);
  FewChannelsParams p = few_channels_params(operands, plan);
  p.stored = y.mutable_data_ptr();
  p.y_stride_n = y.stride(0);
  p.stored_stride_c = y.stride(1);
  spatial_strides(y, a.rank, p.y_stride);
  p.stored_pairs = !shape.out_channels_last && shape.out[2] % 2 == 0;
  p.stored_channel_pairs = shape.out_channels_last && p.c_out % 2 == 0;
  raise_on_error(a.op, run_conv_gather_store(p, shape.n, static_cast<cudaStream_t>(current_stream(a.x))));
  return y;
}

Tensor conv_depthwise(const ConvArgs& a, const ConvShape& shape, const DepthwisePlan& plan) {
  const Tensor x = depthwise_readable(a.x, shape, plan.phases);
  const Tensor bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  const Tensor y = allocate_output(a, shape);
  const void* const bias_data = a.bias ? bias.const_data_ptr() : nullptr;
  run_depthwise_phases(a.op, problem_of(a, shape, ConvEpilogue::kStore), /*of_dx=*/false, plan, x, y, a.weight, shape,
                       bias_data);
  return y;
}

Tensor conv_direct(const ConvArgs& a, const ConvShape& shape) {
  Tensor y = allocate_output(a, shape);
  const CallOperands operands(a, shape);
  ConvDirectParams p{};
  set_input(&p, operands);
  set_weight(&p, operands);
  set_output(&p, y, a.rank);
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

Tensor conv_head(const ConvArgs& a, const ConvShape& shape) {
  const Tensor x = dense_in(a.x, channels_last_format(a.x.dim()));
  const Tensor weight = dense_in(a.weight, MemoryFormat::Contiguous);
  const Tensor bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  Tensor y = allocate_output(a, shape);
  NormConv1x1Params p;
  p.x = x.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.weight = weight.const_data_ptr();
  p.bias = a.bias ? bias.const_data_ptr() : nullptr;
  p.n = shape.n;
  p.s = shape.out[0] * shape.out[1] * shape.out[2];
  p.c = static_cast<int>(shape.c_in);
  p.c_out = static_cast<int>(shape.c_out);
  p.sm_count = check_gpu(a.op, a.x).sm_count;
  p.dtype = shape.dtype;
  raise_on_error(a.op, run_norm_conv1x1(p, stream_of(a.x)));
  return y;
}

// cuDNN, through ATen.
Tensor conv_aten(const ConvArgs& a, const ConvShape& shape) {
  const Tf32Switch precision(a.allow_tf32);
  const Tensor x = with_usual_strides(a.x), weight = weight_for_aten(a.weight, x);
  Tensor y;
  if (&aoti_torch_cuda_convolution != nullptr) {
    AtenTensorHandle bias = a.bias ? a.bias->get() : nullptr, made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution(
        x.get(), weight.get(), a.bias ? &bias : nullptr, a.stride.data(), a.rank, a.padding.data(), a.rank,
        a.dilation.data(), a.rank, a.transposed, a.output_padding.data(), a.rank, a.groups, &made));
    y = Tensor(made);
  } else {
    y = call_aten("aten::convolution", "", x, weight, a.bias, a.stride, a.padding, a.dilation, a.transposed,
                  a.output_padding, a.groups);
  }
  return dense_in(y, shape.out_channels_last ? channels_last_format(a.rank + 2) : MemoryFormat::Contiguous);
}

// Where a choice of a plain convolution becomes launches.
Tensor launch(const ConvArgs& a, const ConvShape& shape, const Choice& choice, const ConvTail& tail) {
  const ConvPath path = choice.path();
  if (path == ConvPath::kTapColumns) return conv_tap_columns(a, shape, choice.as<TapColumnsPlan>(), tail);
  if (path == ConvPath::kPositionRows) return conv_position_rows(a, shape, choice.as<PositionRowsPlan>(), tail);
  if (path == ConvPath::kDepthwise) return conv_depthwise(a, shape, choice.as<DepthwisePlan>());
  // Of those above the first two round it while they pack it, the last one reads it.
  if (a.weight.scalar_type() != a.x.scalar_type()) {
    const Tensor weight = path == ConvPath::kAten ? weight_for_aten(a.weight, a.x) : as_type_of(a.weight, a.x);
    const OptTensor bias = a.bias ? OptTensor(as_type_of(*a.bias, a.x)) : std::nullopt;
    return launch({a.op, a.x, weight, bias, a.stride, a.padding, a.dilation, a.output_padding, a.groups, a.transposed,
                   a.rank, a.backend, a.allow_tf32},
                  shape, choice, tail);
  }
  switch (path) {
    case ConvPath::kImplicitGemm: return conv_implicit_gemm(a, shape, choice.as<ImplicitGemmPlan>());
    case ConvPath::kFewChannels: return conv_few_channels(a, shape, choice.as<FewChannelsPlan>());
    case ConvPath::kHead: return conv_head(a, shape);
    case ConvPath::kDirect: return conv_direct(a, shape);
    default: return conv_aten(a, shape);
  }
}

ConvTailKind tail_kind(const ConvTail* tail) {
  if (!tail) return ConvTailKind::kNone;
  return tail->residual || tail->scale != 1 || tail->moments ? ConvTailKind::kMore : ConvTailKind::kAct;
}

// How a convolution goes.
struct Forward {
  ChoicePtr choice;
  const char* instead = nullptr;  // why by this choice, where it is not the one for the call's backend
};

// `measures`: now, where KGOPT_AUTOTUNE asks for it; else what was measured before counts.
Forward choose_forward(const ConvArgs& a, const ConvShape& shape, ConvTailKind tail, bool measures) {
  const ConvProblem problem = problem_of(a, shape, ConvEpilogue::kStore);
  const DeviceLimits limits = limits_of(a);
  const ConvBackend backend = parse_backend(a.op, a.backend);
  const auto ask = [&](ConvBackend one) { return remembered_choice(problem, limits, one, tail); };
  if (shape.is_empty()) return {ask(ConvBackend::kAten), "a tensor has no elements"};
  Forward to{ask(backend)};
  if (to.choice->cannot) return to;
  const auto has_depthwise = [&] { return ask(ConvBackend::kKgopt)->path() == ConvPath::kDepthwise; };
  if (autotune_is_on() && backend == ConvBackend::kAuto &&
      (has_depthwise() || !ask(ConvBackend::kImplicitGemm)->cannot)) {
    std::optional<ConvPath> tuned;
    if (measures) {
      std::vector<ConvPath> paths;
      for (const ConvBackend one : kTunedBackends) {
        const ChoicePtr able = remembered_choice(problem, limits, one);
        if (!able->cannot) paths.push_back(able->path());
      }
      if (has_depthwise()) paths.push_back(ConvPath::kDepthwise);
      auto run = [&](ConvPath one) {
        launch(a, shape, *remembered_choice(problem, limits, backend_of(one)), ConvTail());
      };
      tuned = tune_path(a.x.get_device_index(), tuning_key(a, shape), paths, current_stream(a.x), run);
    } else {
      tuned = tuned_path(a.x.get_device_index(), tuning_key(a, shape));
    }
    if (tuned) {
      const ChoicePtr measured = ask(backend_of(*tuned));
      if (!measured->cannot) to = {measured, "measured here (KGOPT_AUTOTUNE)"};
    }
  }
  return to;
}

}  // namespace

std::string explain_forward(const ConvArgs& a, const ConvShape& shape) {
  const ChoicePtr named = choose(a, shape, ConvEpilogue::kStore);
  if (named->cannot) return named->explain();
  const Forward to = choose_forward(a, shape, ConvTailKind::kNone, false);
  if (!to.instead) return to.choice->explain();
  Choice choice = *to.choice;
  choice.reason = std::string(to.instead) + ": " + conv_path_name(choice.path());
  return choice.explain();
}

Tensor conv_by(const ConvArgs& a, const ConvShape& shape, const Choice& choice, ConvTail* tail) {
  if (!tail) {
    if (!a.bias || choice.path() != ConvPath::kAten || shape.is_empty()) return launch(a, shape, choice, ConvTail());
    ConvArgs bare = a;
    bare.bias = std::nullopt;
    const Tensor y = launch(bare, shape, choice, ConvTail());
    // ATen adds the bias at half the speed of the memory.
    add_tail(a.op, y, as_type_of(*a.bias, y), shape, ConvTail());
    return y;
  }
  // cuDNN's pass for the bias is one that the caller's may do as well.
  tail->left_bias = a.bias.has_value() && choice.path() == ConvPath::kAten;
  tail->left_rest = !choice.does(tail_kind(tail)) || chain_kind(tail->act) == Chain::kAny ||
                    reinterpret_cast<uintptr_t>(tail->residual) % 16 != 0;
  tail->left_moments = tail->left_rest || !tail->moments;
  if (!tail->left_bias) return launch(a, shape, choice, *tail);
  ConvArgs bare = a;
  bare.bias = std::nullopt;
  return launch(bare, shape, choice, *tail);
}

Tensor conv_forward(const ConvArgs& a, ConvTail* tail) {
  const ConvShape shape = check_conv_args(a);
  const DeviceGuard guard(a.x.get_device_index());
  const Forward to = choose_forward(a, shape, tail_kind(tail), true);
  KGOPT_CHECK(!to.choice->cannot, a.op, ": backend is '", a.backend,
              "', which cannot run this convolution: ", to.choice->cannot);
  return conv_by(a, shape, *to.choice, tail);
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
  ConvArgs a = conv_args(op, static_cast<int>(x.dim()) - 2, x, weight, std::nullopt, stride, padding, dilation,
                         output_padding, groups, transposed, backend, allow_tf32);
  a.wide_weight = true;
  const ConvShape shape = check_conv_args(a);
  KGOPT_CHECK(num_groups >= 0 && (num_groups == 0 || shape.c_out % num_groups == 0), op, ": num_groups is ", num_groups,
              ", expected a divisor of the ", shape.c_out, " output channels, or 0");
  const DeviceGuard guard(x.get_device_index());
  if (epilogue == "store") return explain_forward(a, shape);
  if (epilogue == "backward") {
    std::string text = choose_gradients(a, shape)->explain();
    if (backend == "auto" && !shape.out_channels_last && is_dense(x, MemoryFormat::Contiguous)) {
      const InnermostGradients chosen = innermost_gradients(a, shape, true, true);
      if (chosen.dx || chosen.dweight) text += "; " + chosen.explain();
    }
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
