// One convolution call on the torch side: its arguments, its choice, and its tensors as kernels take them. Shared by
// the api files.
#pragma once

#include <algorithm>

#include "common/host/tf32.h"
#include "common/host/torch_utils.h"
#include "common/host/workspace.h"
#include "conv3d/api/checks.h"
#include "conv3d/choice/choice.h"
#include "conv3d/choice/gradients.h"
#include "conv3d/depthwise/start.h"
#include "conv3d/operands.h"
#include "conv3d/wgmma/position_rows/params.h"
#include "groupnorm/groupnorm.h"

namespace kgopt {

// Everything a convolution op was called with.
struct __attribute__((visibility("hidden"))) ConvArgs {
  const char* op;
  const Tensor& x;
  const Tensor& weight;
  OptTensor bias;
  IntArray stride, padding, dilation, output_padding;
  int64_t groups;
  bool transposed;
  int rank;
  const std::string& backend;
  std::optional<bool> allow_tf32;
  bool wide_weight = false;  // may weight and bias be float32 beside a half x?
  mutable std::optional<bool> known_tf32 = std::nullopt;

  // The switch is Python's, and asking for it takes longer than planning: once a call.
  bool tf32() const {
    if (!known_tf32) known_tf32 = resolve_allow_tf32(allow_tf32);
    return *known_tf32;
  }
};

// Of a call that has these arguments one by one, as the schemas do. It refers to x, weight and backend.
inline ConvArgs conv_args(const char* op, int rank, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                          const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                          const IntArray& output_padding, int64_t groups, bool transposed, const std::string& backend,
                          std::optional<bool> allow_tf32 = std::nullopt) {
  return {op,     x,          weight, bias,    stride,    padding, dilation, output_padding,
          groups, transposed, rank,   backend, allow_tf32};
}

// The names of families have a second spelling, of the first versions.
inline ConvBackend parse_backend(const char* op, const std::string& backend) {
  check_backend(op, backend);
  return backend == "auto"                                             ? ConvBackend::kAuto
         : backend == "kgopt"                                          ? ConvBackend::kKgopt
         : backend == "aten"                                           ? ConvBackend::kAten
         : backend == "kgopt:implicit_gemm"                            ? ConvBackend::kImplicitGemm
         : backend == "kgopt:tap_columns" || backend == "kgopt:hopper" ? ConvBackend::kTapColumns
         : backend == "kgopt:position_rows" || backend == "kgopt:rows" ? ConvBackend::kPositionRows
                                                                       : ConvBackend::kFewChannels;
}

inline ConvProblem make_problem(const ConvShape& shape, ConvEpilogue epilogue, bool allow_tf32,
                                bool channels_innermost) {
  ConvProblem p;
  p.n = shape.n;
  p.c_in = shape.c_in;
  p.c_out = shape.c_out;
  p.groups = shape.groups;
  for (int i = 0; i < 3; ++i) {
    p.in[i] = shape.in[i];
    p.out[i] = shape.out[i];
    p.kernel[i] = shape.kernel[i];
    p.stride[i] = shape.stride[i];
    p.padding[i] = shape.padding[i];
    p.dilation[i] = shape.dilation[i];
  }
  p.transposed = shape.transposed;
  p.dtype = shape.dtype;
  p.allow_tf32 = allow_tf32;
  p.epilogue = epilogue;
  p.channels_innermost = channels_innermost;
  p.planar = !shape.out_channels_last;
  return p;
}

inline ConvShape check_conv_args(const ConvArgs& a) {
  return check_conv(a.op, a.x, a.weight, a.bias, a.stride, a.padding, a.dilation, a.output_padding, a.groups,
                    a.transposed, a.rank, a.wide_weight);
}

// Whether the tensor copies can read x as it lies and y will lie likewise.
inline bool has_channels_innermost(const Tensor& x, const ConvShape& shape) {
  if (!shape.out_channels_last || (x.stride(1) != 1 && shape.c_in > 1)) return false;
  const int64_t bytes = dtype_size(shape.dtype);
  auto is_step = [&](int dim, int64_t size) {  // of whole pieces; a dim of size 1 may have any stride
    const int64_t stride = x.stride(dim) * bytes;
    return size == 1 || (stride > 0 && stride % 16 == 0 && stride < int64_t(1) << 40);
  };
  const int last = shape.rank + 1;
  const int64_t stride_w = shape.in[2] > 1 ? x.stride(last) : x.stride(last - 1);
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 && is_step(0, shape.n) &&
         (shape.rank == 2 || is_step(2, shape.in[0])) && is_step(last - 1, shape.in[1]) && is_step(last, shape.in[2]) &&
         (shape.in[1] == 1 || shape.in[2] == 1 || x.stride(last - 1) == shape.in[2] * stride_w);
}

inline DeviceLimits limits_of(const ConvArgs& a) {
  const DeviceInfo info = check_gpu(a.op, a.x);
  const int cluster_blocks = info.has_wgmma ? max_cluster_blocks(a.x.get_device_index()) : 0;
  return {info.sm_count, info.smem_per_block, info.smem_per_sm, info.has_wgmma, cluster_blocks};
}

inline ConvProblem problem_of(const ConvArgs& a, const ConvShape& shape, ConvEpilogue epilogue) {
  const bool allow_tf32 = shape.dtype != Dtype::kFloat32 || a.tf32();
  return make_problem(shape, epilogue, allow_tf32, has_channels_innermost(a.x, shape));
}

using ChoicePtr = std::shared_ptr<const Choice>;

// norm_groups: of the GroupNorm behind a pipeline's convolution, where that is to be part of it.
inline ChoicePtr choose(const ConvArgs& a, const ConvShape& shape, ConvEpilogue epilogue, int64_t norm_groups = 0) {
  ConvProblem problem = problem_of(a, shape, epilogue);
  problem.norm_groups = norm_groups;
  return remembered_choice(problem, limits_of(a), parse_backend(a.op, a.backend));
}

// What KGOPT_AUTOTUNE measures of a convolution.
enum class ConvTuned { kForward, kInputGradient, kWeightGradient };

// And remembers it by: all that `choose` looks at. The gradients' are told apart where the epilogue stands.
inline ConvKey tuning_key(const ConvArgs& a, const ConvShape& shape, ConvTuned what = ConvTuned::kForward) {
  ConvKey key = conv_key(problem_of(a, shape, ConvEpilogue::kStore), limits_of(a), ConvBackend::kAuto);
  if (what != ConvTuned::kForward) key[12] = what == ConvTuned::kInputGradient ? 100 : 101;
  return key;
}

// dy is taken for channels innermost: where it is not, ATen would copy it, too. `copies`: a kernel of our own would
// have to copy both tensors first.
inline std::shared_ptr<const ConvGradientsChoice> choose_gradients(const ConvArgs& a, const ConvShape& shape,
                                                                   bool copies = false) {
  const ConvProblem problem = problem_of(a, shape, ConvEpilogue::kStore);
  const DeviceLimits limits = limits_of(a);
  const ConvBackend backend = parse_backend(a.op, a.backend);
  ConvKey key = conv_key(problem, limits, backend);
  key[11] += 16 * int64_t(copies);
  return remembered(key, [&] { return choose_conv_gradients(problem, limits, backend, copies); });
}

// Of contiguous x and dy, the gradients that are computed from copies in channels_last.
inline InnermostGradients innermost_gradients(const ConvArgs& a, const ConvShape& shape, bool dx, bool dweight) {
  const ConvProblem problem = problem_of(a, shape, ConvEpilogue::kStore);
  const DeviceLimits limits = limits_of(a);
  ConvKey key = conv_key(problem, limits, ConvBackend::kAuto);
  key[11] += 32 * (1 + int64_t(dx) + 2 * int64_t(dweight));
  return *remembered(key, [&] { return choose_innermost_gradients(problem, limits, dx, dweight); });
}

// Strides of a tensor's spatial dims as depth, height, width.
inline void spatial_strides(const Tensor& t, int rank, int64_t (&strides)[3]) {
  strides[0] = 0;
  for (int i = 0; i < rank; ++i) strides[3 - rank + i] = t.stride(2 + i);
}

// The call's tensors without torch. Keeps a dense copy of the bias alive, and must outlive the launches.
struct __attribute__((visibility("hidden"))) CallOperands : ConvOperands {
  CallOperands(const ConvArgs& a, const ConvShape& shape) {
    x = a.x.const_data_ptr();
    x_stride_n = a.x.stride(0);
    x_stride_c = a.x.stride(1);
    spatial_strides(a.x, a.rank, x_stride);
    // A regular weight is [C_out, C_in / groups, k...], a transposed one [C_in, C_out / groups, k...].
    weight = a.weight.const_data_ptr();
    w_stride_out = a.weight.stride(shape.transposed ? 1 : 0);
    w_stride_in = a.weight.stride(shape.transposed ? 0 : 1);
    w_stride_group = a.weight.stride(0) * ((shape.transposed ? shape.c_in : shape.c_out) / shape.groups);
    spatial_strides(a.weight, a.rank, w_stride_k);
    if (a.bias) {
      dense_bias_ = dense_in(*a.bias, MemoryFormat::Contiguous);
      bias = dense_bias_.const_data_ptr();
    }
    dtype = shape.dtype;
    weight_dtype = check_dtype(a.op, "weight", a.weight);
    n = shape.n;
    c_in = shape.c_in;
    c_out = shape.c_out;
    groups = shape.groups;
    std::copy(shape.in, shape.in + 3, in);
    std::copy(shape.out, shape.out + 3, out);
    std::copy(shape.kernel, shape.kernel + 3, kernel);
    std::copy(shape.stride, shape.stride + 3, stride);
    std::copy(shape.padding, shape.padding + 3, padding);
    std::copy(shape.dilation, shape.dilation + 3, dilation);
  }

 private:
  Tensor dense_bias_;
};

template <typename Params>
void set_output(Params* p, const Tensor& y, int rank) {
  p->y = y.mutable_data_ptr();
  p->y_stride_n = y.stride(0);
  p->y_stride_c = y.stride(1);
  spatial_strides(y, rank, p->y_stride);
}

inline Tensor allocate_output(const ConvArgs& a, const ConvShape& shape) {
  return empty_like_shape(a.x, shape.out_sizes, std::nullopt,
                          shape.out_channels_last ? channels_last_format(a.rank + 2) : MemoryFormat::Contiguous);
}

// A depthwise convolution's tensors. `t` may be written where it is a result.
inline DepthwiseTensor depthwise_tensor(const Tensor& t, int rank) {
  DepthwiseTensor of;
  of.data = const_cast<void*>(t.const_data_ptr());
  of.stride_n = t.stride(0);
  of.stride_c = t.stride(1);
  spatial_strides(t, rank, of.stride);
  return of;
}
inline DepthwiseWeight depthwise_weight(const char* op, const Tensor& w, const ConvShape& shape) {
  DepthwiseWeight of;
  of.data = const_cast<void*>(w.const_data_ptr());
  of.stride_c = w.stride(0);
  spatial_strides(w, shape.rank, of.stride_k);
  of.dtype = check_dtype(op, "weight", w);
  return of;
}

// As the kernels of depthwise convolutions read it well: neighbours in memory are neighbours of the problem's innermost
// dim. `phases`: of the plan.
inline Tensor depthwise_readable(const Tensor& t, const ConvShape& shape, const int (&phases)[3]) {
  const int innermost = shape.out_channels_last ? 1 : shape.rank + 1;
  const bool is_dense = t.stride(innermost) == 1 || t.size(innermost) == 1;
  if (is_dense && depthwise_reads(depthwise_tensor(t, shape.rank), phases)) return t;
  return dense_in(t, shape.out_channels_last ? channels_last_format(shape.rank + 2) : MemoryFormat::Contiguous);
}

// Every phase of a depthwise pass, from x to y, or from dy to dx.
inline void run_depthwise_phases(const char* op, const ConvProblem& problem, bool of_dx, const DepthwisePlan& plan,
                                 const Tensor& from, const Tensor& to, const Tensor& weight, const ConvShape& shape,
                                 const void* bias) {
  for (int i = 0; i < depthwise_phase_count(plan.phases); ++i) {
    const DepthwiseParams p =
        depthwise_params(problem, of_dx, plan, i, depthwise_tensor(from, shape.rank), depthwise_tensor(to, shape.rank),
                         depthwise_weight(op, weight, shape), bias);
    if (p.plan.blocks > 0) raise_on_error(op, run_conv_depthwise(p, stream_of(from)));  // else it has no outputs
  }
}

// What a caller wants of a convolution's output beside the convolution: act((output + bias + residual) * scale).
struct __attribute__((visibility("hidden"))) ConvTail {
  const void* residual = nullptr;  // dense, in the output's layout
  double scale = 1;
  ActChain act;
  // Set by conv_forward: what it left to the caller. ATen would add the bias in a pass of its own.
  bool left_bias = false, left_rest = true, left_moments = true;
  const Tensor* moments = nullptr;  // where channel_moments_cuda is to put the output's; null: nobody wants them
};

// The convolution by the two kernels for channels-innermost tensors.
Tensor conv_tap_columns(const ConvArgs& a, const ConvShape& shape, const TapColumnsPlan& plan,
                        const ConvTail& tail = ConvTail());

// `norm`: in front of it, where the plan normalizes.
Tensor conv_position_rows(const ConvArgs& a, const ConvShape& shape, const PositionRowsPlan& plan,
                          const ConvTail& tail = ConvTail(), const PositionRowsNorm& norm = PositionRowsNorm());

// The convolution as it was chosen for the storing epilogue, and as much of the tail as its kernel can do to what it
// stores: by `choice`, or by the one that choose() makes, unless KGOPT_AUTOTUNE measures a faster one.
Tensor conv_by(const ConvArgs& a, const ConvShape& shape, const Choice& choice, ConvTail* tail);
Tensor conv_forward(const ConvArgs& a, ConvTail* tail = nullptr);

// By which path conv_forward goes and why, and the same of a fused pipeline, whose epilogue it is named by. num_groups:
// of its norm; 0: unknown, and no chain in one launch.
std::string explain_forward(const ConvArgs& a, const ConvShape& shape);
std::string explain_pipeline(const ConvArgs& a, const ConvShape& shape, ConvEpilogue epilogue, int64_t num_groups);

}  // namespace kgopt
