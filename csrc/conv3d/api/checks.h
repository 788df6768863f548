// Argument checks of the convolutions, shared by the CUDA and the CPU files. Every message names the argument, its
// value and what was expected.
#pragma once

#include <algorithm>
#include <array>

#include "common/host/torch_utils.h"
#include "conv3d/shape.h"

#if defined(KGOPT_CUDA)
// ATen's convolutions as C functions, which spare the dispatcher's look-up by name and lists in boxes. Null in a
// CPU-only libtorch.
extern "C" {
__attribute__((weak)) AOTITorchError aoti_torch_cuda_convolution(
    AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t stride_len,
    const int64_t* padding, int64_t padding_len, const int64_t* dilation, int64_t dilation_len, int32_t transposed,
    const int64_t* output_padding, int64_t output_padding_len, int64_t groups, AtenTensorHandle* y);
__attribute__((weak)) AOTITorchError aoti_torch_cuda_convolution_backward(
    AtenTensorHandle dy, AtenTensorHandle input, AtenTensorHandle weight, const int64_t** bias_sizes,
    int64_t bias_sizes_len, const int64_t* stride, int64_t stride_len, const int64_t* padding, int64_t padding_len,
    const int64_t* dilation, int64_t dilation_len, int32_t transposed, const int64_t* output_padding,
    int64_t output_padding_len, int64_t groups, const int32_t* mask, int64_t mask_len, AtenTensorHandle* dx,
    AtenTensorHandle* dweight, AtenTensorHandle* dbias);
}
#endif

namespace kgopt {

// A checked convolution. Spatial arrays are depth, height, width; a 2D convolution has depth 1.
struct ConvShape {
  int64_t n = 0, c_in = 0, c_out = 0, groups = 1;
  int64_t in[3] = {1, 1, 1};
  int64_t out[3] = {1, 1, 1};
  int64_t kernel[3] = {1, 1, 1};
  int64_t stride[3] = {1, 1, 1};
  int64_t padding[3] = {0, 0, 0};
  int64_t dilation[3] = {1, 1, 1};
  int64_t output_padding[3] = {0, 0, 0};
  int rank = 3;  // spatial dims, 2 or 3
  bool transposed = false;
  bool out_channels_last = false;
  Dtype dtype = Dtype::kFloat32;
  IntArray out_sizes;  // of the output tensor

  // Whether x or the output has no elements: ATen knows what PyTorch makes of it.
  bool is_empty() const {
    int64_t least = std::min({n, c_in, c_out});
    for (int i = 0; i < 3; ++i) least = std::min({least, in[i], out[i]});
    return least < 1;
  }
};

inline void check_backend(const char* op, const std::string& backend) {
  for (const char* known : {"auto", "kgopt", "aten", "kgopt:implicit_gemm", "kgopt:tap_columns", "kgopt:position_rows",
                            "kgopt:few_channels", "kgopt:hopper", "kgopt:rows", "kgopt:narrow"}) {
    if (backend == known) return;
  }
  fail(op, ": backend is '", backend, "', expected auto, kgopt or aten");
}

// A norm and a convolution have one more, norm_conv/scaled_half.h: "auto" where that cannot run. Returns the
// convolution's.
inline constexpr const char* kScaledHalfBackend = "kgopt:scaled_half";
inline std::string check_norm_conv_backend(const char* op, const std::string& backend) {
  if (backend == kScaledHalfBackend) return "auto";
  check_backend(op, backend);
  return backend;
}

inline void check_list(const char* op, const char* arg, const IntArray& list, int rank, int64_t least,
                       const char* expected) {
  KGOPT_CHECK(static_cast<int>(list.size()) == rank, op, ": ", arg, " is ", list_string(list), ", expected ", rank,
              " values");
  for (int64_t v : list) KGOPT_CHECK(v >= least, op, ": ", arg, " is ", list_string(list), ", expected ", expected);
}

// wide_weight: weight and bias may be float32 beside a half x.
inline ConvShape check_conv(const char* op, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                            const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                            const IntArray& output_padding, int64_t groups, bool transposed, int rank,
                            bool wide_weight = false) {
  const char* const dims = rank == 2 ? "4 dimensions [N, C, H, W]" : "5 dimensions [N, C, D, H, W]";
  const char* const kernel_names = rank == 2 ? "kH, kW" : "kD, kH, kW";
  KGOPT_CHECK(x.dim() == rank + 2, op, ": x has shape ", shape_string(x), ", expected ", dims);
  ConvShape s;
  s.rank = rank;
  s.transposed = transposed;
  s.groups = groups;
  s.dtype = check_dtype(op, "x", x);
  check_same_device(op, "weight", weight, x);
  if (wide_weight) {
    check_weight_dtype(op, "weight", weight, x);
  } else {
    check_same_dtype(op, "weight", weight, x);
  }
  check_list(op, "stride", stride, rank, 1, "positive values");
  check_list(op, "padding", padding, rank, 0, "non-negative values");
  check_list(op, "dilation", dilation, rank, 1, "positive values");
  if (transposed) check_list(op, "output_padding", output_padding, rank, 0, "non-negative values");

  s.n = x.size(0);
  s.c_in = x.size(1);
  const char* const weight_layout = transposed ? "[C, out_channels / groups, " : "[out_channels, C / groups, ";
  KGOPT_CHECK(weight.dim() == rank + 2, op, ": weight has shape ", shape_string(weight), ", expected ", weight_layout,
              kernel_names, "]");
  KGOPT_CHECK(groups >= 1 && s.c_in % groups == 0 && (transposed || weight.size(0) % groups == 0), op, ": groups is ",
              groups, ", expected a positive divisor of C = ", s.c_in,
              transposed ? std::string() : " and of weight.size(0) = " + std::to_string(weight.size(0)));
  if (transposed) {
    KGOPT_CHECK(weight.size(0) == s.c_in, op, ": weight has shape ", shape_string(weight), ", expected ", weight_layout,
                kernel_names, "] with C = ", s.c_in);
    s.c_out = weight.size(1) * groups;
  } else {
    KGOPT_CHECK(weight.size(1) == s.c_in / groups, op, ": weight has shape ", shape_string(weight), ", expected ",
                weight_layout, kernel_names, "] with C / groups = ", s.c_in / groups);
    s.c_out = weight.size(0);
  }
  KGOPT_CHECK(s.c_out >= 1, op, ": weight has shape ", shape_string(weight), ", expected at least one output channel");
  if (bias) {
    check_same_device(op, "bias", *bias, x);
    check_same_dtype(op, "bias", *bias, wide_weight ? weight : x);
    KGOPT_CHECK(bias->dim() == 1 && bias->size(0) == s.c_out, op, ": bias has shape ", shape_string(*bias),
                ", expected [", s.c_out, "]");
  }

  s.out_sizes = {s.n, s.c_in == 0 && !transposed ? 0 : s.c_out};  // no channels give none, in PyTorch
  for (int i = 0; i < rank; ++i) {
    const int at = 3 - rank + i;
    s.in[at] = x.size(2 + i);
    s.kernel[at] = weight.size(2 + i);
    s.stride[at] = stride[i];
    s.padding[at] = padding[i];
    s.dilation[at] = dilation[i];
    KGOPT_CHECK(s.kernel[at] >= 1, op, ": weight has shape ", shape_string(weight),
                ", expected a kernel of at least 1");
    if (transposed) {
      s.output_padding[at] = output_padding[i];
      KGOPT_CHECK(output_padding[i] < std::max(stride[i], dilation[i]), op, ": output_padding is ",
                  list_string(output_padding), ", expected smaller than stride ", list_string(stride), " or dilation ",
                  list_string(dilation));
    }
    s.out[at] = conv_out_size(s.in[at], s.kernel[at], s.stride[at], s.padding[at], s.dilation[at], transposed,
                              s.output_padding[at]);
    s.out_sizes.push_back(s.out[at]);
  }
  // As in PyTorch, whose transposed convolutions may give nothing.
  const int64_t least = transposed ? 0 : 1;
  for (int i = 0; i < 3; ++i) {
    KGOPT_CHECK(s.out[i] >= least, op, ": the output would have size ", list_string(s.out_sizes),
                ", expected at least ", least, " along each dim; x has shape ", shape_string(x), ", weight ",
                shape_string(weight), ", padding is ", list_string(padding), ", dilation ", list_string(dilation));
  }
  s.out_channels_last = is_channels_last(x) || is_channels_last(weight);
  return s;
}

// A gradient of the output and which of dx, dweight and dbias are wanted.
inline void check_conv_gradient(const char* op, const Tensor& dy, const Tensor& x, const ConvShape& s,
                                const std::vector<bool>& mask) {
  check_same_device(op, "dy", dy, x);
  check_same_dtype(op, "dy", dy, x);
  KGOPT_CHECK(sizes_of(dy) == s.out_sizes, op, ": dy has shape ", shape_string(dy), ", expected ",
              list_string(s.out_sizes));
  KGOPT_CHECK(mask.size() == 3, op, ": mask has ", mask.size(), " values, expected 3");
}

using ConvGradients = std::tuple<Tensor, Tensor, Tensor>;
using SomeConvGradients = std::array<OptTensor, 3>;  // dx, dweight, dbias

// As an op returns them: empty tensors for those that are missing, each its own.
inline ConvGradients all_gradients(const Tensor& x, const SomeConvGradients& g) {
  auto one = [&](int i) { return g[i] ? *g[i] : empty_like_shape(x, {0}); };
  return {one(0), one(1), one(2)};
}

// A dense tensor's memory under the strides of a new tensor in this format, whatever lies where.
inline Tensor with_strides_of(const Tensor& t, MemoryFormat format) {
  const int64_t rank = t.dim(), last = format == MemoryFormat::Contiguous ? 1 : 2;
  const IntArray sizes = sizes_of(t);
  IntArray strides(rank);
  int64_t next = 1;
  if (last == 2) strides[1] = 1, next = sizes[1];
  for (int64_t d = rank - 1; d >= last; --d) strides[d] = next, next *= sizes[d];
  strides[0] = next;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(t.get(), rank, sizes.data(), strides.data(), /*offset_increment=*/0, &made));
  return Tensor(made);
}

inline Tensor with_channels_last_strides(const Tensor& t) { return with_strides_of(t, channels_last_format(t.dim())); }

// Sizes of 1 may have any stride. PyTorch's depthwise kernels of volumes step by it, out of x's memory.
inline Tensor with_usual_strides(const Tensor& t) {
  if (t.dim() != 5 || is_channels_last(t) || !is_dense(t, MemoryFormat::Contiguous)) return t;
  int64_t next = 1;
  for (int64_t d = t.dim() - 1; d >= 0; next *= t.size(d--)) {
    if (t.stride(d) != next) return with_strides_of(t, MemoryFormat::Contiguous);
  }
  return t;
}

// PyTorch keeps cuDNN's plans by the layout of one operand, and one channel's or one position's is contiguous to it
// whatever that of the other. So that the plan of two contiguous tensors is not taken for one of these, nor left to be
// taken: channels_last strides beside a channels_last tensor.
inline Tensor laid_like(const Tensor& t, const Tensor& other) {
  if (!is_channels_last(other) || is_channels_last(t) || !is_dense(t, channels_last_format(t.dim()))) return t;
  return with_channels_last_strides(t);
}

// Those of `mask` from ATen, in the layouts of x and of the weight.
inline SomeConvGradients conv_gradients_aten(const Tensor& given_dy, const Tensor& given_x, const Tensor& weight,
                                             const ConvShape& s, const IntArray& stride, const IntArray& padding,
                                             const IntArray& dilation, const IntArray& output_padding,
                                             const std::array<bool, 3>& mask) {
  if (!mask[0] && !mask[1] && !mask[2]) return {};
  Tensor dy = given_dy, x = given_x, narrow = mask[0] ? weight_for_aten(weight, x) : as_type_of(weight, x);
  if (x.is_cuda()) {
    // cuDNN has kernels of gradients that fail where an address is no multiple of 16, and with them the CUDA context.
    dy = aligned(laid_like(with_usual_strides(dy), given_x)), x = aligned(laid_like(with_usual_strides(x), given_dy));
    narrow = aligned(narrow);
  }
  Tensor dx, dweight, dbias;
  auto results = [&] {
    SomeConvGradients result;
    if (mask[0]) result[0] = dense_in(dx, memory_format_of(x));
    if (mask[1]) result[1] = dense_as_type_of(dweight, memory_format_of(weight), weight);
    if (mask[2]) result[2] = dbias;
    return result;
  };
#if defined(KGOPT_CUDA)
  // Of empty tensors torch's C function reads bias_sizes after its end (2.11).
  if (x.is_cuda() && !s.is_empty() && &aoti_torch_cuda_convolution_backward != nullptr) {
    const int64_t* bias_sizes = &s.c_out;
    const int32_t wanted[3] = {mask[0], mask[1], mask[2]};
    AtenTensorHandle made[3];
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution_backward(
        dy.get(), x.get(), narrow.get(), &bias_sizes, 1, stride.data(), s.rank, padding.data(), s.rank, dilation.data(),
        s.rank, s.transposed, output_padding.data(), s.rank, s.groups, wanted, 3, made, made + 1, made + 2));
    dx = Tensor(made[0]), dweight = Tensor(made[1]), dbias = Tensor(made[2]);
    return results();
  }
#endif
  const std::optional<IntArray> bias_sizes = IntArray{s.c_out};
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  std::array<StableIValue, 11> stack{from(dy),
                                     from(x),
                                     from(narrow),
                                     from(bias_sizes),
                                     from(stride),
                                     from(padding),
                                     from(dilation),
                                     from(s.transposed),
                                     from(output_padding),
                                     from(s.groups),
                                     from(torch::headeronly::HeaderOnlyArrayRef<bool>(mask.data(), 3))};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::convolution_backward", "", stack.data(), TORCH_ABI_VERSION));
  dx = to<Tensor>(stack[0]), dweight = to<Tensor>(stack[1]), dbias = to<Tensor>(stack[2]);
  return results();
}

}  // namespace kgopt
