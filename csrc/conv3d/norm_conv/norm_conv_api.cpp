// Convolutions of act(group_norm(x)) on CUDA: by kernels that normalize what they load, so that x is read once and its
// norm never stored, or in two steps.
#include "conv3d/api/call.h"
#include "conv3d/choice/norm_conv.h"
#include "conv3d/norm_conv/scaled_half_call.h"
#include "groupnorm/api/group_norm_api.h"
#include "groupnorm/passes/normalize_padded.h"
#include "pointwise/pointwise_api.h"
#include "pointwise/pointwise_checks.h"

namespace kgopt {
namespace {

using torch::stable::accelerator::DeviceGuard;

// act(group_norm(x)) as a tensor, with x's moments where they are given; x with 0 groups.
Tensor normalized(const Tensor& x, const OptTensor& moments, int64_t num_groups, const OptTensor& weight,
                  const OptTensor& bias, double eps, const std::string& act) {
  if (num_groups == 0) return x;
  if (moments) return group_norm_moments_cuda(x, *moments, num_groups, weight, bias, eps, act);
  return std::get<0>(group_norm_fwd_cuda(x, num_groups, weight, bias, eps, act, "none"));
}

// A convolution's tensors and arguments, and the norm in front of it.
struct Prologue {
  const OptTensor& moments;
  int64_t num_groups;
  const OptTensor &weight, &bias;
  double eps;
};

// x's norm as kernels read it, [N, C] of (mean, rstd, weight, bias) in fp32; x is read where it has no moments.
Tensor norm_table(const char* op, const Tensor& x, const Prologue& norm) {
  Tensor of_x;
  if (!norm.moments) {
    of_x = allocate_moments(x, x.size(1));
    channel_moments_cuda(op, x, of_x);
  }
  Tensor table = empty_like_shape(x, {x.size(0), x.size(1), 4}, ScalarType::Float);
  moments_table_cuda(op, norm.moments ? *norm.moments : of_x, norm.num_groups, norm.weight, norm.bias, norm.eps,
                     table.mutable_data_ptr());
  return table;
}

PaddedShape padded_shape(const Tensor& x, const IntArray& replicate) {
  PaddedShape pad;
  const int rank = static_cast<int>(x.dim()) - 2;
  for (int i = 0; i < rank; ++i) {
    const int at = 3 - rank + i;
    const int64_t before = replicate[2 * (rank - 1 - i)], after = replicate[2 * (rank - 1 - i) + 1];
    pad.in[at] = static_cast<int32_t>(x.size(2 + i));
    pad.before[at] = static_cast<int32_t>(before);
    pad.out[at] = static_cast<int32_t>(x.size(2 + i) + before + after);
  }
  return pad;
}

// Bytes of x, from which reading it twice, for its moments and to normalize it, costs less than a pass for the padding.
// Below, launches are what takes time.
constexpr int64_t kPaddedNormBytes = 16 << 20;

// act(group_norm(x)) with its outermost positions repeated around it.
Tensor normalized_padded(const char* op, const Tensor& x, const Prologue& norm, const std::string& act,
                         const IntArray& replicate) {
  if (norm.num_groups > 0 && x.numel() > 0) {
    NormalizeParams p;
    p.dims = check_group_norm(op, x, norm.num_groups);
    p.act = check_act(op, act);
    const PaddedShape pad = padded_shape(x, replicate);
    const bool is_large = x.numel() * dtype_size(p.dims.dtype) >= kPaddedNormBytes;
    if (!normalize_padded_refusal(p, pad) && (norm.moments || is_large)) {
      const MemoryFormat format = channels_last_format(x.dim());
      const Tensor dense = aligned(dense_in(x, format)), table = norm_table(op, dense, norm);
      Tensor z = empty_like_shape(x, check_pad_replicate(op, x, replicate), std::nullopt, format);
      p.x = dense.const_data_ptr();
      p.y = z.mutable_data_ptr();
      p.table = table.const_data_ptr();
      raise_on_error(op, run_normalize_padded(p, pad, stream_of(x)));
      return z;
    }
  }
  return pad_replicate_cuda(normalized(x, norm.moments, norm.num_groups, norm.weight, norm.bias, norm.eps, act),
                            replicate);
}

bool all_are(const IntArray& list, int64_t value) {
  return std::all_of(list.begin(), list.end(), [&](int64_t v) { return v == value; });
}

// Few output channels: why the kernel of conv3d/norm_conv/norm_conv_few.cu cannot run it; null when it can, with p's
// sizes set.
const char* few_refusal(const ConvArgs& a, const ConvShape& shape, NormConvFewParams* p) {
  if (memory_format_of(a.x) == MemoryFormat::Contiguous || shape.groups != 1 || a.transposed || !all_are(a.stride, 1)) {
    return "not a plain convolution of a channels_last tensor with stride 1";
  }
  if (shape.kernel[0] != 1 || shape.padding[0] != 0) return "taps along the depth";
  if (shape.dtype == Dtype::kFloat32 && !resolve_allow_tf32(a.allow_tf32)) return "fp32 accuracy";
  const DeviceInfo info = check_gpu(a.op, a.x);
  p->n = shape.n;
  p->depth = shape.in[0];
  if (shape.c_in >= 1 << 20 || shape.c_out > 64) return "too many channels";
  p->c = static_cast<int>(shape.c_in);
  p->c_out = static_cast<int>(shape.c_out);
  for (int i = 0; i < 2; ++i) {
    if (shape.in[1 + i] >= 1 << 20 || shape.padding[1 + i] >= 1 << 20) return "a size is too large";
    p->in[i] = static_cast<int>(shape.in[1 + i]);
    p->out[i] = static_cast<int>(shape.out[1 + i]);
    p->kernel[i] = static_cast<int>(std::min<int64_t>(shape.kernel[1 + i], 1 << 10));
    p->padding[i] = static_cast<int>(shape.padding[1 + i]);
    p->dilation[i] = static_cast<int>(std::min<int64_t>(shape.dilation[1 + i], 1 << 10));
  }
  p->sm_count = info.sm_count;
  p->smem_per_block = info.smem_per_block;
  p->smem_per_sm = info.smem_per_sm;
  p->dtype = shape.dtype;
  return norm_conv_few_refusal(*p);
}

Tensor conv_few(const ConvArgs& a, const ConvShape& shape, NormConvFewParams p, const Prologue& norm,
                const ActChain& act) {
  const MemoryFormat format = channels_last_format(a.rank + 2);
  const Tensor x = dense_in(a.x, format), table = norm.num_groups > 0 ? norm_table(a.op, x, norm) : Tensor();
  Tensor y = allocate_output(a, shape);
  const CallOperands operands(a, shape);
  p.x = x.const_data_ptr();
  p.y = y.mutable_data_ptr();
  p.table = norm.num_groups > 0 ? table.const_data_ptr() : nullptr;
  p.weight = operands.weight;
  p.w_stride_out = operands.w_stride_out;
  p.w_stride_in = operands.w_stride_in;
  p.w_stride_k[0] = operands.w_stride_k[1];
  p.w_stride_k[1] = operands.w_stride_k[2];
  p.bias = operands.bias;
  p.act = act;
  Workspace workspace(x);
  const int64_t packed = workspace.reserve(norm_conv_few_packed_bytes(p));
  workspace.allocate();
  p.packed = workspace.at<void>(packed);
  raise_on_error(a.op, run_norm_conv_few(p, stream_of(x)));
  return y;
}

// Why conv_scaled_half cannot run it; null when it can.
const char* scaled_half_refusal(const ConvArgs& a, const ConvShape& shape, const ActChain& gn_act) {
  if (shape.dtype != Dtype::kFloat32) return "not fp32";
  if (!a.tf32()) return "fp32 accuracy";
  if (memory_format_of(a.x) == MemoryFormat::Contiguous || shape.groups != 1 || a.transposed) {
    return "not a plain convolution of a channels_last tensor";
  }
  if (shape.c_in % 8 != 0 || shape.c_out % 8 != 0) return "channels are no multiple of 8";
  if (shape.n * shape.c_in >= int64_t(1) << 32) return "too many samples and channels";
  if (shape.kernel[0] * shape.kernel[1] * shape.kernel[2] > kScaledMostTaps) return "too many taps";
  return scaled_half_act_refusal(gn_act);
}

// The convolution in fp16 between two passes, which scale by powers of two. x is read once for the range of its
// channels, and for its moments with it. With `replicate` a.x has the sizes of what the convolution reads, and nothing
// in it.
Tensor conv_scaled_half(const ConvArgs& a, const ConvShape& shape, const Tensor& x, const IntArray& replicate,
                        const Prologue& norm, const ActChain& gn_act, const OptTensor& residual, double divisor,
                        const ActChain& act) {
  ScaledSource source;
  source.num_groups = norm.num_groups;
  source.weight = norm.weight;
  source.bias = norm.bias;
  source.eps = norm.eps;
  source.act = gn_act;
  PaddedShape pad;
  if (!replicate.empty()) {
    pad = padded_shape(x, replicate);
    source.pad = &pad;
    source.padded_sizes = sizes_of(a.x);
  }
  return conv_of_scaled(a, shape, scale_half(a.op, x, source), residual, divisor, act);
}

// `few` is the caller's room for the parameters of the kernel for few output channels; `is_bare`: nothing but `act`
// follows the convolution.
NormConvChoice choose_kernel(const ConvArgs& a, const ConvShape& shape, int64_t num_groups, bool has_moments,
                             bool is_bare, const ActChain& gn_act, const ActChain& act, NormConvFewParams* few) {
  NormConvRequest request;
  request.is_empty = shape.is_empty();
  request.has_norm = num_groups > 0;
  request.has_moments = has_moments;
  request.is_bare = is_bare;
  request.norm_act = chain_kind(gn_act);
  request.act = chain_kind(act);
  if (request.is_scaled_half = a.backend == kScaledHalfBackend; request.is_scaled_half) {
    request.scaled_half_refusal = scaled_half_refusal(a, shape, gn_act);
    return choose_norm_conv({}, {}, ConvBackend::kAuto, request);
  }
  const ConvBackend backend = parse_backend(a.op, a.backend);
  // Two ops whatever the shape: what it takes longer to ask for is not asked for.
  if (request.is_empty || backend == ConvBackend::kAten || !is_bare) return choose_norm_conv({}, {}, backend, request);
  request.few_refusal = few_refusal(a, shape, few);
  if (!request.few_refusal && !act.empty()) request.few_refusal = "an activation behind the convolution";
  if (!request.few_refusal && reinterpret_cast<uintptr_t>(a.x.const_data_ptr()) % 16 != 0) {
    request.few_refusal = "x is not aligned";
  }
  return choose_norm_conv(problem_of(a, shape, ConvEpilogue::kStore), limits_of(a), backend, request);
}

Tensor run_group_norm_conv(const char* op, const Tensor& x, const OptTensor& moments, int64_t num_groups,
                           const OptTensor& gn_weight, const OptTensor& gn_bias, double eps, const std::string& gn_act,
                           const Tensor& weight, const OptTensor& bias, const OptTensor& residual,
                           const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                           const IntArray& output_padding, int64_t groups, bool transposed, double divisor,
                           const std::string& act, const IntArray& replicate, const std::string& backend,
                           Tensor* of_result) {
  check_prologue(op, x, moments, num_groups, gn_weight, gn_bias, eps, gn_act);
  const std::string conv_backend = check_norm_conv_backend(op, backend);
  const bool pads = !replicate.empty();
  const Tensor seen = pads ? padded_in_name(op, x, replicate) : x;
  const ConvShape shape =
      check_conv_add(op, seen, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed);
  const ActChain of_norm = check_act(op, gn_act, "gn_act"), of_sum = check_act(op, act);
  const ConvArgs conv = conv_args(op, static_cast<int>(x.dim()) - 2, seen, weight, bias, stride, padding, dilation,
                                  output_padding, groups, transposed, backend);
  {
    const DeviceGuard guard(x.get_device_index());
    NormConvFewParams few;
    const bool bare = !residual && divisor == 1 && !of_result && !pads;
    const NormConvChoice choice =
        choose_kernel(conv, shape, num_groups, moments.has_value(), bare, of_norm, of_sum, &few);
    const Prologue norm{moments, num_groups, gn_weight, gn_bias, eps};
    if (choice.path == NormConvChoice::kScaledHalf) {
      const Tensor y = conv_scaled_half(conv, shape, x, replicate, norm, of_norm, residual, divisor, of_sum);
      if (of_result) {
        *of_result = allocate_moments(y, shape.c_out);
        channel_moments_cuda(op, y, *of_result);
      }
      return y;
    }
    const bool by_few = choice.path == NormConvChoice::kFewChannels;
    // A read for the moments takes longer than what the norm that reads x once writes, and this kernel on that.
    if (by_few && num_groups > 0 && !moments) {
      const Tensor z = normalized(x, moments, num_groups, gn_weight, gn_bias, eps, gn_act);
      ConvArgs of_z{op,     z,          weight,    bias,    stride,      padding, dilation, output_padding,
                    groups, transposed, conv.rank, backend, std::nullopt};
      const OptTensor none;
      return conv_few(of_z, shape, few, {none, 0, none, none, eps}, ActChain());
    }
    if (by_few) return conv_few(conv, shape, few, norm, of_norm);
    if (choice.path == NormConvChoice::kPositionRows) {
      const Tensor table = norm_table(op, x, norm);
      const PositionRowsNorm rows{table.const_data_ptr(), static_cast<int>(shape.c_in), chain_kind(of_norm)};
      ConvTail tail;
      tail.act = of_sum;
      tail.left_rest = false;
      return conv_position_rows(conv, shape, *choice.plan, tail, rows);
    }
  }
  Tensor z;
  {
    const DeviceGuard guard(x.get_device_index());
    const Prologue norm{moments, num_groups, gn_weight, gn_bias, eps};
    z = pads ? normalized_padded(op, x, norm, gn_act, replicate)
             : normalized(x, moments, num_groups, gn_weight, gn_bias, eps, gn_act);
  }
  return run_conv_add(op, z, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed,
                      divisor, act, conv_backend, of_result);
}

Tensor group_norm_conv(Tensor x, OptTensor moments, int64_t num_groups, OptTensor gn_weight, OptTensor gn_bias,
                       double eps, std::string gn_act, Tensor weight, OptTensor bias, OptTensor residual,
                       IntArray stride, IntArray padding, IntArray dilation, IntArray output_padding, int64_t groups,
                       bool transposed, double divisor, std::string act, IntArray replicate, std::string backend) {
  return run_group_norm_conv("group_norm_conv", x, moments, num_groups, gn_weight, gn_bias, eps, gn_act, weight, bias,
                             residual, stride, padding, dilation, output_padding, groups, transposed, divisor, act,
                             replicate, backend, nullptr);
}

std::tuple<Tensor, Tensor> group_norm_conv_moments(Tensor x, OptTensor moments, int64_t num_groups, OptTensor gn_weight,
                                                   OptTensor gn_bias, double eps, std::string gn_act, Tensor weight,
                                                   OptTensor bias, OptTensor residual, IntArray stride,
                                                   IntArray padding, IntArray dilation, IntArray output_padding,
                                                   int64_t groups, bool transposed, double divisor, std::string act,
                                                   IntArray replicate, std::string backend) {
  Tensor of_result;
  const Tensor y = run_group_norm_conv("group_norm_conv_moments", x, moments, num_groups, gn_weight, gn_bias, eps,
                                       gn_act, weight, bias, residual, stride, padding, dilation, output_padding,
                                       groups, transposed, divisor, act, replicate, backend, &of_result);
  return {y, of_result};
}

std::string explain_group_norm_conv(Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                                    IntArray output_padding, int64_t groups, bool transposed, std::string gn_act,
                                    std::string act, bool moments, std::string backend) {
  const char* const op = "explain_group_norm_conv";
  check_norm_conv_backend(op, backend);
  const ConvShape shape = check_conv_add(op, x, weight, std::nullopt, std::nullopt, stride, padding, dilation,
                                         output_padding, groups, transposed);
  const ActChain of_norm = check_act(op, gn_act, "gn_act"), of_sum = check_act(op, act);
  const DeviceGuard guard(x.get_device_index());
  const ConvArgs a = conv_args(op, static_cast<int>(x.dim()) - 2, x, weight, std::nullopt, stride, padding, dilation,
                               output_padding, groups, transposed, backend);
  NormConvFewParams parameters;
  const NormConvChoice choice = choose_kernel(a, shape, 1, moments, true, of_norm, of_sum, &parameters);
  const bool few = choice.path == NormConvChoice::kFewChannels;
  const bool in_one = choice.path == NormConvChoice::kPositionRows || (few && moments);
  if (choice.path == NormConvChoice::kScaledHalf) return "fp16 between two passes: " + choice.reason;
  return (in_one ? "one kernel: " : few ? "two kernels: " : "two ops: ") + choice.reason;
}

Tensor group_norm_conv1x1(Tensor x, OptTensor moments, int64_t num_groups, OptTensor gn_weight, OptTensor gn_bias,
                          double eps, std::string act, Tensor weight, OptTensor bias) {
  const char* const op = "group_norm_conv1x1";
  const IntArray sizes =
      check_group_norm_conv1x1(op, x, moments, num_groups, gn_weight, gn_bias, eps, act, weight, bias);
  const DeviceGuard guard(x.get_device_index());
  const MemoryFormat format = memory_format_of(x);
  NormConv1x1Params p;
  p.n = x.size(0);
  p.c = static_cast<int>(x.size(1));
  p.c_out = static_cast<int>(sizes[1]);
  p.s = 1;
  for (int64_t i = 2; i < x.dim(); ++i) p.s *= x.size(i);
  p.sm_count = check_gpu(op, x).sm_count;
  p.act = check_act(op, act);
  p.dtype = check_dtype(op, "x", x);
  const Tensor dense = dense_in(x, format);
  p.x = dense.const_data_ptr();
  const int rank = static_cast<int>(x.dim()) - 2;
  if (format == MemoryFormat::Contiguous || norm_conv1x1_refusal(p) || reinterpret_cast<uintptr_t>(p.x) % 16 != 0 ||
      x.numel() == 0) {
    const Tensor z = normalized(dense, moments, num_groups, gn_weight, gn_bias, eps, act);
    const IntArray ones(rank, 1), zeros(rank, 0);
    // Behind a norm of a large mean the convolution's terms cancel, which 3xTF32 bears less well than fp32.
    const std::string backend = p.dtype == Dtype::kFloat32 ? "aten" : "auto";
    return conv_forward({op, z, weight, bias, ones, zeros, ones, zeros, 1, false, rank, backend, std::nullopt});
  }
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  const Tensor dense_weight = dense_in(weight, MemoryFormat::Contiguous);
  const Tensor dense_bias = bias ? dense_in(*bias, MemoryFormat::Contiguous) : Tensor();
  p.weight = dense_weight.const_data_ptr();
  p.bias = bias ? dense_bias.const_data_ptr() : nullptr;
  p.y = y.mutable_data_ptr();
  Tensor table;
  if (num_groups > 0) {
    table = norm_table(op, dense, {moments, num_groups, gn_weight, gn_bias, eps});
    p.table = table.const_data_ptr();
  }
  raise_on_error(op, run_norm_conv1x1(p, stream_of(x)));
  return y;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CUDA, m) {
  m.impl("group_norm_conv", TORCH_BOX(&kgopt::group_norm_conv));
  m.impl("group_norm_conv_moments", TORCH_BOX(&kgopt::group_norm_conv_moments));
  m.impl("explain_group_norm_conv", TORCH_BOX(&kgopt::explain_group_norm_conv));
  m.impl("group_norm_conv1x1", TORCH_BOX(&kgopt::group_norm_conv1x1));
}
