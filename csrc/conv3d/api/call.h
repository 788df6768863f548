// One convolution call on the torch side: its arguments, the choice of path, and the kernels' parameters. Shared by
// conv3d/api/conv_api.cpp and conv3d/api/pipelines_api.cpp.
#pragma once

#include <algorithm>

#include "common/tf32.h"
#include "common/torch_utils.h"
#include "common/workspace.h"
#include "conv3d/api/checks.h"
#include "conv3d/choice/choice.h"
#include "conv3d/choice/gradients.h"
#include "conv3d/few_channels/autocorrelation/autocorrelation.h"
#include "conv3d/few_channels/few_channels.h"
#include "conv3d/implicit_gemm/implicit_gemm.h"
#include "conv3d/small_chain/small_chain.h"
#include "conv3d/wgmma/position_rows/position_rows.h"
#include "conv3d/wgmma/tap_columns/tap_columns.h"
#include "conv3d/wgmma/transposed_norm/transposed_norm.h"
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

inline ConvBackend parse_backend(const char* op, const std::string& backend) {
  check_backend(op, backend);
  return backend == "auto"                  ? ConvBackend::kAuto
         : backend == "aten"                ? ConvBackend::kAten
         : backend == "kgopt:implicit_gemm" ? ConvBackend::kImplicitGemm
         : backend == "kgopt:hopper"        ? ConvBackend::kHopper
         : backend == "kgopt:rows"          ? ConvBackend::kRows
         : backend == "kgopt:narrow"        ? ConvBackend::kNarrow
                                            : ConvBackend::kKgopt;
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

// Valid until the thread's next choice. norm_groups: of the GroupNorm behind it, where that is to be part of it.
inline const ConvChoice& choose(const ConvArgs& a, const ConvShape& shape, ConvEpilogue epilogue,
                                int64_t norm_groups = 0) {
  ConvProblem problem = problem_of(a, shape, epilogue);
  problem.norm_groups = norm_groups;
  return choose_cached(problem, limits_of(a), parse_backend(a.op, a.backend), &choose_conv);
}

// What KGOPT_AUTOTUNE measures of a convolution.
enum class ConvTuned { kForward, kInputGradient, kWeightGradient };

// And remembers it by: all that `choose` looks at. The gradients' are told apart where the epilogue stands.
inline ConvKey tuning_key(const ConvArgs& a, const ConvShape& shape, ConvTuned what = ConvTuned::kForward) {
  ConvKey key = conv_key(problem_of(a, shape, ConvEpilogue::kStore), limits_of(a), ConvBackend::kAuto);
  if (what != ConvTuned::kForward) key[12] = what == ConvTuned::kInputGradient ? 100 : 101;
  return key;
}

// dy is taken for channels innermost: where it is not, ATen would copy it, too.
inline const ConvGradientsChoice& choose_gradients(const ConvArgs& a, const ConvShape& shape) {
  return choose_cached(problem_of(a, shape, ConvEpilogue::kStore), limits_of(a), parse_backend(a.op, a.backend),
                       &choose_conv_gradients);
}

// Strides of a tensor's spatial dims as depth, height, width.
inline void spatial_strides(const Tensor& t, int rank, int64_t (&strides)[3]) {
  strides[0] = 0;
  for (int i = 0; i < rank; ++i) strides[3 - rank + i] = t.stride(2 + i);
}

// x, channels and sizes, which all parameter structs hold under the same names.
template <typename Params>
void set_input(Params* p, const ConvArgs& a, const ConvShape& shape) {
  p->x = a.x.const_data_ptr();
  p->x_stride_n = a.x.stride(0);
  p->x_stride_c = a.x.stride(1);
  spatial_strides(a.x, a.rank, p->x_stride);
  p->c_in = static_cast<int>(shape.c_in / shape.groups);
  p->c_out = static_cast<int>(shape.c_out / shape.groups);
  p->groups = static_cast<int>(shape.groups);
  for (int i = 0; i < 3; ++i) {
    p->in[i] = static_cast<int>(shape.in[i]);
    p->out[i] = static_cast<int>(shape.out[i]);
  }
}

// Strides of the weight. A regular one is [C_out, C_in / groups, k...], a transposed one [C_in, C_out / groups, k...].
struct WeightStrides {
  int64_t out, in, group, k[3];
};
inline WeightStrides weight_strides(const ConvArgs& a, const ConvShape& shape) {
  WeightStrides w;
  w.out = a.weight.stride(shape.transposed ? 1 : 0);
  w.in = a.weight.stride(shape.transposed ? 0 : 1);
  w.group = a.weight.stride(0) * ((shape.transposed ? shape.c_in : shape.c_out) / shape.groups);
  spatial_strides(a.weight, a.rank, w.k);
  return w;
}

// The weight as it lies, for the kernels that read it so.
template <typename Params>
void set_weight(Params* p, const ConvArgs& a, const ConvShape& shape) {
  const WeightStrides w = weight_strides(a, shape);
  p->weight = a.weight.const_data_ptr();
  p->w_stride_out = w.out;
  p->w_stride_in = w.in;
  p->w_stride_group = w.group;
  std::copy(w.k, w.k + 3, p->w_stride_k);
}

inline ConvPackParams make_pack_params(const ConvArgs& a, const ConvShape& shape, const ConvPlan& plan) {
  const WeightStrides w = weight_strides(a, shape);
  ConvPackParams p{};
  p.weight = a.weight.const_data_ptr();
  p.c_in = static_cast<int>(shape.c_in / shape.groups);
  p.c_out = static_cast<int>(shape.c_out / shape.groups);
  p.groups = static_cast<int>(shape.groups);
  p.stride_out = w.out;
  p.stride_in = w.in;
  p.stride_group = w.group;
  std::copy(w.k, w.k + 3, p.stride_k);
  p.dtype = shape.dtype;
  p.plan = plan;
  return p;
}

// Half types: whether two neighbouring channels can be read as one aligned word.
template <typename Params>
bool has_channel_pairs(const Params& p, const ConvShape& shape) {
  return dtype_size(shape.dtype) == 2 && p.x_stride_c == 1 && p.c_in % 2 == 0 && p.x_stride_n % 2 == 0 &&
         p.x_stride[0] % 2 == 0 && p.x_stride[1] % 2 == 0 && p.x_stride[2] % 2 == 0 &&
         reinterpret_cast<uintptr_t>(p.x) % 4 == 0;
}

inline ConvKernelParams make_kernel_params(const ConvArgs& a, const ConvShape& shape, const ConvPlan& plan) {
  ConvKernelParams p{};
  set_input(&p, a, shape);
  p.c_out_total = static_cast<int>(shape.c_out);
  p.x_pair_load = has_channel_pairs(p, shape);
  p.plan = plan;
  return p;
}

// Whether `vector` neighbours along the width can be read at once, from every multiple of it on.
inline bool rows_in_vectors(const ConvArgs& a, const ConvShape& shape, int64_t vector = 4) {
  int64_t strides[3];
  spatial_strides(a.x, a.rank, strides);
  return strides[2] == 1 && shape.in[2] % vector == 0 && a.x.stride(0) % vector == 0 && a.x.stride(1) % vector == 0 &&
         strides[0] % vector == 0 && strides[1] % vector == 0 &&
         reinterpret_cast<uintptr_t>(a.x.const_data_ptr()) % (vector * dtype_size(shape.dtype)) == 0;
}

// `bias` keeps a dense copy of the bias alive until the launch.
inline NarrowParams make_narrow_params(const ConvArgs& a, const ConvShape& shape, const NarrowPlan& plan,
                                       Tensor* bias) {
  NarrowParams p{};
  set_input(&p, a, shape);
  set_weight(&p, a, shape);
  if (a.bias) {
    *bias = dense_in(*a.bias, MemoryFormat::Contiguous);
    p.bias = bias->const_data_ptr();
  }
  p.n = shape.n;
  p.c_out_total = static_cast<int>(shape.c_out);
  p.plan = plan;
  p.load = rows_in_vectors(a, shape)                                     ? NarrowLoad::kVectors
           : dtype_size(shape.dtype) == 4 || has_channel_pairs(p, shape) ? NarrowLoad::kWords
                                                                         : NarrowLoad::kHalves;
  return p;
}

// The same for statistics from the input's autocorrelation.
inline AutocorrelationParams make_autocorrelation_params(const ConvArgs& a, const ConvShape& shape,
                                                         const AutocorrelationPlan& plan, Tensor* bias) {
  AutocorrelationParams p{};
  set_input(&p, a, shape);
  set_weight(&p, a, shape);
  if (a.bias) {
    *bias = dense_in(*a.bias, MemoryFormat::Contiguous);
    p.bias = bias->const_data_ptr();
  }
  p.vectors = rows_in_vectors(a, shape, 16 / dtype_size(shape.dtype));
  p.plan = plan;
  return p;
}

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

// Packs weights and bias into the workspace pieces; the caller reserves them with these two sizes.
inline int64_t packed_weight_bytes(const ConvPlan& plan) { return plan.packed_words * 4; }
inline int64_t packed_bias_bytes(const ConvShape& shape, const ConvPlan& plan) {
  return shape.groups * plan.n_tiles * plan.nb * 8 * 4;
}

inline void pack_weights(const ConvArgs& a, const ConvShape& shape, ConvKernelParams* p, uint32_t* packed, float* bias,
                         cudaStream_t stream) {
  ConvPackParams pack = make_pack_params(a, shape, p->plan);
  const Tensor dense_bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  pack.bias = a.bias ? dense_bias.const_data_ptr() : nullptr;
  pack.packed = packed;
  pack.packed_bias = bias;
  raise_on_error(a.op, run_conv_pack(pack, stream));
  p->packed_weight = packed;
  p->bias = bias;
}

// What a call of the Hopper kernel keeps in the workspace.
struct HopperSpace {
  int64_t packed, bias;
  HopperSpace(Workspace* workspace, const HopperPlan& plan)
      : packed(workspace->reserve(plan.packed_bytes)),
        bias(workspace->reserve(int64_t(plan.n_tiles) * plan.c_tile * 4)) {}
};

// Packs the weights, and sets `moments`, with slices and rows, to zero. y and what is done to it are left to the
// caller.
inline HopperParams start_hopper(const ConvArgs& a, const ConvShape& shape, const HopperPlan& plan,
                                 const HopperSpace& space, const Workspace& workspace, cudaStream_t stream,
                                 const StatsPartials& moments = StatsPartials()) {
  const WeightStrides w = weight_strides(a, shape);
  const Tensor dense_bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  HopperPackParams pack{};
  pack.weight = a.weight.const_data_ptr();
  pack.stride_out = w.out;
  pack.stride_in = w.in;
  std::copy(w.k, w.k + 3, pack.stride_k);
  pack.bias = a.bias ? dense_bias.const_data_ptr() : nullptr;
  pack.packed = workspace.at<void>(space.packed);
  pack.packed_bias = workspace.at<float>(space.bias);
  pack.c_in = static_cast<int>(shape.c_in);
  pack.c_out = static_cast<int>(shape.c_out);
  pack.dtype = check_dtype(a.op, "weight", a.weight);
  pack.plan = plan;
  pack.moments = static_cast<float*>(moments.data);
  pack.moment_values = moments.data ? shape.n * moments.slices * moments.rows * 3 : 0;
  raise_on_error(a.op, run_conv_hopper_pack(pack, stream));

  HopperParams p{};
  p.packed = pack.packed;
  p.bias = pack.packed_bias;
  p.c_out = pack.c_out;
  for (int i = 0; i < 3; ++i) {
    p.in[i] = static_cast<int>(shape.in[i]);
    p.out[i] = static_cast<int>(shape.out[i]);
  }
  p.plan = plan;
  const int last = shape.rank + 1;
  const Tensor& x = a.x;
  const int64_t stride_w = shape.in[2] > 1 ? x.stride(last) : shape.in[1] > 1 ? x.stride(last - 1) : shape.c_in;
  raise_on_error(a.op, set_hopper_input(&p, x.const_data_ptr(), shape.n, shape.c_in, stride_w,
                                        shape.rank == 3 ? x.stride(2) : 0, x.stride(0)));
  return p;
}

// The same for the kernel by rows, whose workspace pieces are `packed`, `bias` and, with two parts, `copy`.
inline RowsParams start_rows(const ConvArgs& a, const ConvShape& shape, const RowsPlan& plan, void* packed, float* bias,
                             void* copy, cudaStream_t stream) {
  const int last = shape.rank + 1;
  const Tensor& x = a.x;
  if (plan.parts == 2) {
    RowsSplitParams split{};
    split.x = x.const_data_ptr();
    split.stride_n = x.stride(0);
    split.stride_d = shape.rank == 3 ? x.stride(2) : 0;
    split.stride_w = shape.in[2] > 1 ? x.stride(last) : x.stride(last - 1);
    split.copy = copy;
    split.n = shape.n;
    split.c_in = static_cast<int>(shape.c_in);
    for (int i = 0; i < 3; ++i) split.in[i] = static_cast<int>(shape.in[i]);
    split.plan = plan;
    raise_on_error(a.op, run_conv_rows_split(split, stream));
  }
  const WeightStrides w = weight_strides(a, shape);
  const Tensor dense_bias = a.bias ? dense_in(*a.bias, MemoryFormat::Contiguous) : Tensor();
  RowsPackParams pack{};
  pack.weight = a.weight.const_data_ptr();
  pack.stride_out = w.out;
  pack.stride_in = w.in;
  std::copy(w.k, w.k + 3, pack.stride_k);
  pack.bias = a.bias ? dense_bias.const_data_ptr() : nullptr;
  pack.packed = packed;
  pack.packed_bias = bias;
  pack.c_in = static_cast<int>(shape.c_in);
  pack.c_out = static_cast<int>(shape.c_out);
  pack.dtype = check_dtype(a.op, "weight", a.weight);
  pack.plan = plan;
  raise_on_error(a.op, run_conv_rows_pack(pack, stream));

  RowsParams p{};
  p.packed = packed;
  p.bias = bias;
  p.c_out = pack.c_out;
  for (int i = 0; i < 3; ++i) {
    p.in[i] = static_cast<int>(shape.in[i]);
    p.out[i] = static_cast<int>(shape.out[i]);
  }
  p.plan = plan;
  if (plan.parts == 2) {
    const int64_t channels = 2 * rows_part_channels(plan), row = shape.in[2] * channels, plane = shape.in[1] * row;
    const int64_t strides[4] = {channels, row, plane, shape.in[0] * plane};
    raise_on_error(a.op, set_rows_input(&p, copy, shape.n, channels, strides));
    return p;
  }
  const int64_t strides[4] = {x.stride(last), x.stride(last - 1), shape.rank == 3 ? x.stride(2) : 0, x.stride(0)};
  raise_on_error(a.op, set_rows_input(&p, x.const_data_ptr(), shape.n, shape.c_in, strides));
  return p;
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
Tensor conv_hopper(const ConvArgs& a, const ConvShape& shape, const HopperPlan& plan,
                   const ConvTail& tail = ConvTail());

// `norm`: in front of it, where the plan normalizes.
Tensor conv_rows(const ConvArgs& a, const ConvShape& shape, const RowsPlan& plan, const ConvTail& tail = ConvTail(),
                 const RowsNorm& norm = RowsNorm());

// The convolution, by whichever path `choose` takes for the storing epilogue, and as much of the tail as its kernel can
// do to what it stores.
Tensor conv_forward(const ConvArgs& a, ConvTail* tail = nullptr);

// By which path conv_forward goes and why, and the same of a fused pipeline, whose epilogue it is named by. num_groups:
// of its norm; 0: unknown, and no chain in one launch.
std::string explain_forward(const ConvArgs& a, const ConvShape& shape);
std::string explain_pipeline(const ConvArgs& a, const ConvShape& shape, ConvEpilogue epilogue, int64_t num_groups);

}  // namespace kgopt
