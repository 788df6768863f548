// What stands between norms and convolutions, on the CPU: ATen, and one pass for what is added.
#include "../common/cpu_block.h"
#include "../groupnorm/groupnorm_cpu.h"
#include "pointwise_checks.h"

namespace kgopt {
namespace {

using namespace cpu;

// y = (y + residual) * scale.
// y = act((y + residual) * scale)
void add_residual(const Tensor& y, const OptTensor& residual, MemoryFormat format, double scale,
                  const ActChain& act = ActChain()) {
  if (!residual && scale == 1 && act.empty()) return;
  const Tensor dense = residual ? dense_in(*residual, format) : y;
  const int64_t total = y.numel();
  dispatch_dtype(dtype_of(y), [&](auto zero) {
    using T = decltype(zero);
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    const acc_t<T> factor = static_cast<acc_t<T>>(scale);
    parallel((total + kBlock - 1) / kBlock, kBlock, [&](int64_t i) {
      alignas(64) acc_t<T> buffer[kBlock], more[kBlock];
      const int64_t at = i * kBlock, n = std::min(kBlock, total - at);
      const acc_t<T>* const a = view_block(to + at, buffer, n);
      const acc_t<T>* const b = view_block(from + at, more, n);
      acc_t<T>* const out = target_block(to + at, buffer);
      if (residual) {
        for (int64_t j = 0; j < n; ++j) out[j] = (a[j] + b[j]) * factor;
      } else {
        for (int64_t j = 0; j < n; ++j) out[j] = a[j] * factor;
      }
      store_block(activate_chain(act, out, out, n), to + at, n);
    });
  });
}

Tensor conv_add(Tensor x, Tensor weight, OptTensor bias, OptTensor residual, IntArray stride, IntArray padding,
                IntArray dilation, IntArray output_padding, int64_t groups, bool transposed, double divisor,
                std::string act, std::string backend) {
  check_backend("conv_add", backend);
  const ActChain chain = check_act("conv_add", act);
  const ConvShape shape = check_conv_add("conv_add", x, weight, bias, residual, stride, padding, dilation,
                                         output_padding, groups, transposed);
  const MemoryFormat format = shape.out_channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
  Tensor y = dense_in(call_aten("aten::convolution", "", x, weight, bias, stride, padding, dilation, transposed,
                                output_padding, groups),
                      format);
  add_residual(y, residual, format, 1 / divisor, chain);
  return y;
}

std::tuple<Tensor, Tensor> conv_add_moments(Tensor x, Tensor weight, OptTensor bias, OptTensor residual,
                                            IntArray stride, IntArray padding, IntArray dilation,
                                            IntArray output_padding, int64_t groups, bool transposed, double divisor,
                                            std::string act, std::string backend) {
  const Tensor y = conv_add(x, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed,
                            divisor, act, backend);
  const int64_t c = y.size(1);
  const auto [mean, rstd] = group_stats_cpu(y, c, 0);
  Tensor moments = empty_like_shape(y, {y.size(0), c, 2}, stats_type(y));
  dispatch_dtype(dtype_of(mean), [&](auto zero) {
    using T = decltype(zero);
    const T *const m = static_cast<const T*>(mean.const_data_ptr()), *const r =
                                                                         static_cast<const T*>(rstd.const_data_ptr());
    T* const to = static_cast<T*>(moments.mutable_data_ptr());
    for (int64_t i = 0; i < y.size(0) * c; ++i) {
      to[2 * i] = m[i];
      to[2 * i + 1] = T(1) / (r[i] * r[i]);
    }
  });
  return {y, moments};
}

Tensor group_norm_conv1x1(Tensor x, OptTensor moments, int64_t num_groups, OptTensor gn_weight, OptTensor gn_bias,
                          double eps, std::string act, Tensor weight, OptTensor bias) {
  const IntArray sizes = check_group_norm_conv1x1("group_norm_conv1x1", x, moments, num_groups, gn_weight, gn_bias, eps,
                                                  act, weight, bias);
  const int64_t rank = x.dim() - 2;
  const IntArray ones(rank, 1), zeros(rank, 0);
  const Tensor z =
      num_groups > 0 ? std::get<0>(group_norm_fwd_cpu(x, num_groups, gn_weight, gn_bias, eps, act, "none")) : x;
  return dense_in(call_aten("aten::convolution", "", z, weight, bias, ones, zeros, ones, false, zeros, int64_t(1)),
                  memory_format_of(x));
}

Tensor upsample_linear(Tensor x, OptTensor residual) {
  const IntArray sizes = check_upsample_linear("upsample_linear", x, residual);
  const MemoryFormat format = memory_format_of(x);
  const bool deep = x.dim() == 5;
  const std::optional<IntArray> no_sizes;  // a list of SymInt does not reach ATen's CPU kernel through the stable ABI
  const std::optional<std::vector<double>> factors = std::vector<double>(deep ? 3 : 2, 2.0);
  Tensor y = x.numel() == 0 ? empty_like_shape(x, sizes, std::nullopt, format)
                            : call_aten(deep ? "aten::upsample_trilinear3d" : "aten::upsample_bilinear2d", "vec",
                                        dense_in(x, format), no_sizes, false, factors);
  y = dense_in(y, format);
  add_residual(y, residual, format, 1);
  return y;
}

Tensor max_pool(Tensor x, IntArray kernel, IntArray stride, IntArray padding) {
  const IntArray sizes = check_max_pool("max_pool", x, kernel, stride, padding);
  const MemoryFormat format = memory_format_of(x);
  if (x.numel() == 0) return empty_like_shape(x, sizes, std::nullopt, format);
  const IntArray dilation(kernel.size(), 1);
  return dense_in(call_aten(x.dim() == 5 ? "aten::max_pool3d" : "aten::max_pool2d", "", dense_in(x, format), kernel,
                            stride, padding, dilation, false),
                  format);
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("conv_add", TORCH_BOX(&kgopt::conv_add));
  m.impl("conv_add_moments", TORCH_BOX(&kgopt::conv_add_moments));
  m.impl("group_norm_conv1x1", TORCH_BOX(&kgopt::group_norm_conv1x1));
  m.impl("upsample_linear", TORCH_BOX(&kgopt::upsample_linear));
  m.impl("max_pool", TORCH_BOX(&kgopt::max_pool));
}
