// Convolutions and the three pipelines on the CPU: oneDNN through ATen, everything after it in one or two passes.
#include "common/cpu/block.h"
#include "conv3d/api/checks.h"
#include "groupnorm/api/checks.h"
#include "groupnorm/api/group_norm_cpu.h"

// ATen's convolution as a C function, which spares the dispatcher's look-up by name and lists in boxes. Null in a
// libtorch without it.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_cpu_convolution(
    AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias, const int64_t* stride, int64_t stride_len,
    const int64_t* padding, int64_t padding_len, const int64_t* dilation, int64_t dilation_len, int32_t transposed,
    const int64_t* output_padding, int64_t output_padding_len, int64_t groups, AtenTensorHandle* y);

namespace kgopt {
namespace {

using namespace cpu;

Tensor convolution(const char* op, const Tensor& x, const Tensor& weight, const OptTensor& bias, const IntArray& stride,
                   const IntArray& padding, const IntArray& dilation, const IntArray& output_padding, int64_t groups,
                   bool transposed, int rank, const std::string& backend) {
  const ConvShape shape =
      check_conv(op, x, weight, bias, stride, padding, dilation, output_padding, groups, transposed, rank, true);
  check_backend(op, backend);
  KGOPT_CHECK(backend == "auto" || backend == "aten", op, ": backend is '", backend,
              "', expected auto or aten for x on the cpu: ", "kgopt has no convolution of its own there");
  const OptTensor narrow_bias = bias ? OptTensor(as_type_of(*bias, x)) : std::nullopt;
  const Tensor narrow = as_type_of(weight, x);
  Tensor y;
  if (&aoti_torch_cpu_convolution != nullptr) {
    AtenTensorHandle given = narrow_bias ? narrow_bias->get() : nullptr, made;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(
        x.get(), narrow.get(), narrow_bias ? &given : nullptr, stride.data(), rank, padding.data(), rank,
        dilation.data(), rank, transposed, output_padding.data(), rank, groups, &made));
    y = Tensor(made);
  } else {
    y = call_aten("aten::convolution", "", x, narrow, narrow_bias, stride, padding, dilation, transposed,
                  output_padding, groups);
  }
  return dense_in(y, shape.out_channels_last ? channels_last_format(rank + 2) : MemoryFormat::Contiguous);
}

template <int kRank>
Tensor conv(Tensor x, Tensor weight, OptTensor bias, IntArray stride, IntArray padding, IntArray dilation,
            int64_t groups, std::string backend, std::optional<bool>) {
  return convolution(kRank == 2 ? "conv2d" : "conv3d", x, weight, bias, stride, padding, dilation, IntArray(kRank, 0),
                     groups, false, kRank, backend);
}

template <int kRank>
Tensor conv_transpose(Tensor x, Tensor weight, OptTensor bias, IntArray stride, IntArray padding,
                      IntArray output_padding, int64_t groups, IntArray dilation, std::string backend,
                      std::optional<bool>) {
  return convolution(kRank == 2 ? "conv_transpose2d" : "conv_transpose3d", x, weight, bias, stride, padding, dilation,
                     output_padding, groups, true, kRank, backend);
}

ConvGradients conv_backward(Tensor dy, Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                            IntArray output_padding, int64_t groups, bool transposed, std::vector<bool> mask,
                            std::string backend, std::optional<bool>) {
  const char* const op = "conv_backward";
  const ConvShape shape = check_conv(op, x, weight, std::nullopt, stride, padding, dilation, output_padding, groups,
                                     transposed, static_cast<int>(stride.size()), true);
  check_conv_gradient(op, dy, x, shape, mask);
  check_backend(op, backend);
  return all_gradients(x, conv_gradients_aten(dy, x, weight, shape, stride, padding, dilation, output_padding,
                                              {mask[0], mask[1], mask[2]}));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv3d_group_norm_mean_fwd(Tensor x, Tensor weight, OptTensor bias,
                                                                      int64_t num_groups, OptTensor gn_weight,
                                                                      OptTensor gn_bias, IntArray stride,
                                                                      IntArray padding, IntArray dilation,
                                                                      int64_t groups, double eps, std::string backend,
                                                                      std::optional<bool>) {
  const char* const op = "conv3d_group_norm_mean";
  const ConvShape shape = check_conv(op, x, weight, bias, stride, padding, dilation, {0, 0, 0}, groups, false, 3);
  check_group_norm_affine(op, x, shape.c_out, num_groups, gn_weight, gn_bias);
  return group_norm_mean_fwd_cpu(
      convolution(op, x, weight, bias, stride, padding, dilation, {0, 0, 0}, groups, false, 3, backend), num_groups,
      gn_weight, gn_bias, eps);
}

// The convolution's output, for the norm that follows.
Tensor transposed_for_norm(const Tensor& x, const Tensor& weight, const OptTensor& bias, int64_t num_groups,
                           const OptTensor& gn_weight, const OptTensor& gn_bias, const IntArray& stride,
                           const IntArray& padding, const IntArray& output_padding, int64_t groups,
                           const IntArray& dilation, const std::string& backend) {
  const char* const op = "conv_transpose3d_relu_group_norm";
  const ConvShape shape = check_conv(op, x, weight, bias, stride, padding, dilation, output_padding, groups, true, 3);
  check_group_norm_affine(op, x, shape.c_out, num_groups, gn_weight, gn_bias);
  return convolution(op, x, weight, bias, stride, padding, dilation, output_padding, groups, true, 3, backend);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> conv_transpose3d_relu_group_norm_fwd(
    Tensor x, Tensor weight, OptTensor bias, int64_t num_groups, OptTensor gn_weight, OptTensor gn_bias,
    IntArray stride, IntArray padding, IntArray output_padding, int64_t groups, IntArray dilation, double eps,
    std::string backend, std::optional<bool>) {
  const Tensor c = transposed_for_norm(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, output_padding,
                                       groups, dilation, backend);
  auto [y, mean, rstd] = group_norm_fwd_cpu(c, num_groups, gn_weight, gn_bias, eps, "none", "relu");
  return {y, c, mean, rstd};
}

// out = logsumexp over channels of c + hardswish(tanh((c - mean) * scale + bias)), a block of positions at a time.
template <typename T>
void residual_logsumexp(const T* c, acc_t<T>* out, const GroupNormDims& d, const std::vector<double>& mean,
                        const std::vector<double>& rstd, const std::vector<double>& weight,
                        const std::vector<double>& bias) {
  using Acc = acc_t<T>;
  // Channels times positions of a block: its values are kept for the second loop and should stay in L2.
  const int64_t per_block = std::max<int64_t>(16, std::min<int64_t>(kBlock, 32768 / d.c));
  const int64_t blocks = (d.s + per_block - 1) / per_block;
  const auto finite_or_zero = [](Acc m) { return std::isinf(m) ? Acc(0) : m; };
  torch::stable::parallel_for(0, d.n * blocks, 1, [&](int64_t first, int64_t last) {
    std::vector<Acc> values(per_block * d.c), row(per_block), maximum(per_block), sum(per_block);
    std::vector<Acc> mu(d.c), scale(d.c), shift(d.c);
    for (int64_t u = first, sample = -1; u < last; ++u) {
      const int64_t n = u / blocks, begin = u % blocks * per_block, count = std::min(per_block, d.s - begin);
      for (int64_t k = 0; n != sample && k < d.c; ++k) {
        const int64_t g = n * d.g + k / d.channels_per_group();
        mu[k] = static_cast<Acc>(mean[g]);
        scale[k] = static_cast<Acc>(rstd[g] * weight[k]);
        shift[k] = static_cast<Acc>(bias[k]);
      }
      sample = n;
      Acc* const to = out + n * d.s + begin;
      if (d.channels_last) {
        const int64_t at = (n * d.s + begin) * d.c;
        const Acc* const from = view_block(c + at, values.data(), count * d.c);
        Loops<Acc>::residual_columns(from, values.data(), count * d.c, d.c, mu.data(), scale.data(), shift.data());
        for (int64_t p = 0; p < count; ++p) {
          const Acc* const r = values.data() + p * d.c;
          maximum[p] = Loops<Acc>::row_maximum(r, d.c, -std::numeric_limits<Acc>::infinity());
          sum[p] = Loops<Acc>::row_exponentials(r, d.c, finite_or_zero(maximum[p]));
        }
      } else {
        std::fill(maximum.begin(), maximum.end(), -std::numeric_limits<Acc>::infinity());
        std::fill(sum.begin(), sum.end(), Acc(0));
        for (int64_t k = 0; k < d.c; ++k) {
          const Acc* const from = view_block(c + (n * d.c + k) * d.s + begin, row.data(), count);
          Loops<Acc>::residual_row(from, values.data() + k * count, maximum.data(), count, mu[k], scale[k], shift[k]);
        }
        for (int64_t p = 0; p < count; ++p) row[p] = finite_or_zero(maximum[p]);
        Loops<Acc>::column_exponentials(values.data(), d.c, count, count, row.data(), sum.data());
      }
      for (int64_t p = 0; p < count; ++p) to[p] = std::log(sum[p]) + finite_or_zero(maximum[p]);
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> conv2d_residual_logsumexp_fwd(Tensor x, Tensor weight, OptTensor bias,
                                                                 int64_t num_groups, OptTensor gn_weight,
                                                                 OptTensor gn_bias, IntArray stride, IntArray padding,
                                                                 IntArray dilation, int64_t groups, double eps,
                                                                 std::string backend, std::optional<bool>) {
  const char* const op = "conv2d_group_norm_tanh_hardswish_residual_logsumexp";
  const ConvShape shape = check_conv(op, x, weight, bias, stride, padding, dilation, {0, 0}, groups, false, 2);
  check_group_norm_affine(op, x, shape.c_out, num_groups, gn_weight, gn_bias);
  const Tensor c = convolution(op, x, weight, bias, stride, padding, dilation, {0, 0}, groups, false, 2, backend);
  const GroupNormDims d = check_group_norm_forward(op, c, num_groups, std::nullopt, std::nullopt);
  auto [mean, rstd] = group_stats_cpu(c, num_groups, eps);
  Tensor out = empty_like_shape(c, {c.size(0), 1, c.size(2), c.size(3)}, stats_type(c));
  if (d.numel() > 0) {
    dispatch_dtype(d.dtype, [&](auto zero) {
      using T = decltype(zero);
      residual_logsumexp(static_cast<const T*>(c.const_data_ptr()), static_cast<acc_t<T>*>(out.mutable_data_ptr()), d,
                         read_all(mean, d.n * d.g), read_all(rstd, d.n * d.g), read_all(gn_weight, d.c, 1.0),
                         read_all(gn_bias, d.c, 0.0));
    });
  }
  return {out, mean, rstd};
}

Tensor conv3d_group_norm_mean(Tensor x, Tensor weight, OptTensor bias, int64_t num_groups, OptTensor gn_weight,
                              OptTensor gn_bias, IntArray stride, IntArray padding, IntArray dilation, int64_t groups,
                              double eps, std::string backend, std::optional<bool> allow_tf32) {
  return as_type_of(std::get<0>(conv3d_group_norm_mean_fwd(x, weight, bias, num_groups, gn_weight, gn_bias, stride,
                                                           padding, dilation, groups, eps, backend, allow_tf32)),
                    x);
}

Tensor conv_transpose3d_relu_group_norm(Tensor x, Tensor weight, OptTensor bias, int64_t num_groups,
                                        OptTensor gn_weight, OptTensor gn_bias, IntArray stride, IntArray padding,
                                        IntArray output_padding, int64_t groups, IntArray dilation, double eps,
                                        std::string backend, std::optional<bool>) {
  const Tensor c = transposed_for_norm(x, weight, bias, num_groups, gn_weight, gn_bias, stride, padding, output_padding,
                                       groups, dilation, backend);
  group_norm_inplace_cpu("conv_transpose3d_relu_group_norm", c, num_groups, gn_weight, gn_bias, eps, "none", "relu");
  return c;
}

Tensor conv2d_residual_logsumexp(Tensor x, Tensor weight, OptTensor bias, int64_t num_groups, OptTensor gn_weight,
                                 OptTensor gn_bias, IntArray stride, IntArray padding, IntArray dilation,
                                 int64_t groups, double eps, std::string backend, std::optional<bool> allow_tf32) {
  return as_type_of(std::get<0>(conv2d_residual_logsumexp_fwd(x, weight, bias, num_groups, gn_weight, gn_bias, stride,
                                                              padding, dilation, groups, eps, backend, allow_tf32)),
                    x);
}

std::string explain_conv(Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                         IntArray output_padding, int64_t groups, bool transposed, std::string, std::string backend,
                         std::optional<bool>, int64_t) {
  const char* const op = "explain_conv";
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  check_backend(op, backend);
  check_conv(op, x, weight, std::nullopt, stride, padding, dilation, output_padding, groups, transposed,
             static_cast<int>(x.dim()) - 2);
  return "aten: oneDNN does convolutions on the CPU";
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("conv2d", TORCH_BOX(&kgopt::conv<2>));
  m.impl("conv3d", TORCH_BOX(&kgopt::conv<3>));
  m.impl("conv_transpose2d", TORCH_BOX(&kgopt::conv_transpose<2>));
  m.impl("conv_transpose3d", TORCH_BOX(&kgopt::conv_transpose<3>));
  m.impl("conv_backward", TORCH_BOX(&kgopt::conv_backward));
  m.impl("conv3d_group_norm_mean", TORCH_BOX(&kgopt::conv3d_group_norm_mean));
  m.impl("conv3d_group_norm_mean_fwd", TORCH_BOX(&kgopt::conv3d_group_norm_mean_fwd));
  m.impl("conv_transpose3d_relu_group_norm", TORCH_BOX(&kgopt::conv_transpose3d_relu_group_norm));
  m.impl("conv_transpose3d_relu_group_norm_fwd", TORCH_BOX(&kgopt::conv_transpose3d_relu_group_norm_fwd));
  m.impl("conv2d_group_norm_tanh_hardswish_residual_logsumexp", TORCH_BOX(&kgopt::conv2d_residual_logsumexp));
  m.impl("conv2d_group_norm_tanh_hardswish_residual_logsumexp_fwd", TORCH_BOX(&kgopt::conv2d_residual_logsumexp_fwd));
  m.impl("explain_conv", TORCH_BOX(&kgopt::explain_conv));
}
