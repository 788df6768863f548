// What stands between norms and convolutions, on the CPU: ATen, and one pass for what is added.
#include "common/cpu/block.h"
#include "groupnorm/api/group_norm_cpu.h"
#include "pointwise/pointwise_checks.h"

namespace kgopt {
namespace {

using namespace cpu;

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

Tensor run_conv_add(const char* op, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                    const OptTensor& residual, const IntArray& stride, const IntArray& padding,
                    const IntArray& dilation, const IntArray& output_padding, int64_t groups, bool transposed,
                    double divisor, const std::string& act, const std::string& backend) {
  check_backend(op, backend);
  const ActChain chain = check_act(op, act);
  const ConvShape shape =
      check_conv_add(op, x, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed);
  const MemoryFormat format = shape.out_channels_last ? channels_last_format(x.dim()) : MemoryFormat::Contiguous;
  Tensor y = dense_in(call_aten("aten::convolution", "", x, weight, bias, stride, padding, dilation, transposed,
                                output_padding, groups),
                      format);
  add_residual(y, residual, format, 1 / divisor, chain);
  return y;
}

// Mean and variance of every channel, [N, C, 2].
Tensor channel_moments(const Tensor& y) {
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
  return moments;
}

Tensor conv_add(Tensor x, Tensor weight, OptTensor bias, OptTensor residual, IntArray stride, IntArray padding,
                IntArray dilation, IntArray output_padding, int64_t groups, bool transposed, double divisor,
                std::string act, std::string backend) {
  return run_conv_add("conv_add", x, weight, bias, residual, stride, padding, dilation, output_padding, groups,
                      transposed, divisor, act, backend);
}

std::tuple<Tensor, Tensor> conv_add_moments(Tensor x, Tensor weight, OptTensor bias, OptTensor residual,
                                            IntArray stride, IntArray padding, IntArray dilation,
                                            IntArray output_padding, int64_t groups, bool transposed, double divisor,
                                            std::string act, std::string backend) {
  const Tensor y = run_conv_add("conv_add_moments", x, weight, bias, residual, stride, padding, dilation,
                                output_padding, groups, transposed, divisor, act, backend);
  return {y, channel_moments(y)};
}

// Rows of the result: each is a row of x between its own ends, repeated.
Tensor pad_replicate(Tensor x, IntArray pad) {
  const IntArray sizes = check_pad_replicate("pad_replicate", x, pad);
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  if (y.numel() == 0) return y;
  const bool last = format != MemoryFormat::Contiguous, deep = x.dim() == 5;
  const int64_t rank = x.dim(), c = last ? x.size(1) : 1;
  const int64_t d = deep ? x.size(2) : 1, h = x.size(rank - 2), w = x.size(rank - 1);
  const int64_t out_d = deep ? y.size(2) : 1, out_h = y.size(rank - 2), out_w = y.size(rank - 1);
  dispatch_dtype(dtype_of(x), [&](auto zero) {
    using T = decltype(zero);
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    parallel(y.numel() / (out_w * c), out_w * c, [&](int64_t row) {
      const int64_t plane = row / out_h, sample = plane / out_d;
      const int64_t depth = deep ? std::clamp<int64_t>(plane % out_d - pad[4], 0, d - 1) : 0;
      const int64_t height = std::clamp<int64_t>(row % out_h - pad[2], 0, h - 1);
      const T* const first = from + ((sample * d + depth) * h + height) * w * c;
      T* at = to + row * out_w * c;
      for (int64_t k = 0; k < pad[0]; ++k) at = std::copy_n(first, c, at);
      at = std::copy_n(first, w * c, at);
      for (int64_t k = 0; k < pad[1]; ++k) at = std::copy_n(first + (w - 1) * c, c, at);
    });
  });
  return y;
}

Tensor run_group_norm_conv(const char* op, const Tensor& x, const OptTensor& moments, int64_t num_groups,
                           const OptTensor& gn_weight, const OptTensor& gn_bias, double eps, const std::string& gn_act,
                           const Tensor& weight, const OptTensor& bias, const OptTensor& residual,
                           const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                           const IntArray& output_padding, int64_t groups, bool transposed, double divisor,
                           const std::string& act, const std::string& backend, const IntArray& replicate = {}) {
  check_prologue(op, x, moments, num_groups, gn_weight, gn_bias, eps, gn_act);
  const std::string conv_backend = check_norm_conv_backend(op, backend);
  const Tensor seen = replicate.empty() ? x : padded_in_name(op, x, replicate);
  check_conv_add(op, seen, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed);
  Tensor z =
      num_groups > 0 ? std::get<0>(group_norm_fwd_cpu(x, num_groups, gn_weight, gn_bias, eps, gn_act, "none")) : x;
  if (!replicate.empty()) z = pad_replicate(z, replicate);
  return run_conv_add(op, z, weight, bias, residual, stride, padding, dilation, output_padding, groups, transposed,
                      divisor, act, conv_backend);
}

Tensor group_norm_conv(Tensor x, OptTensor moments, int64_t num_groups, OptTensor gn_weight, OptTensor gn_bias,
                       double eps, std::string gn_act, Tensor weight, OptTensor bias, OptTensor residual,
                       IntArray stride, IntArray padding, IntArray dilation, IntArray output_padding, int64_t groups,
                       bool transposed, double divisor, std::string act, IntArray replicate, std::string backend) {
  return run_group_norm_conv("group_norm_conv", x, moments, num_groups, gn_weight, gn_bias, eps, gn_act, weight, bias,
                             residual, stride, padding, dilation, output_padding, groups, transposed, divisor, act,
                             backend, replicate);
}

std::tuple<Tensor, Tensor> group_norm_conv_moments(Tensor x, OptTensor moments, int64_t num_groups, OptTensor gn_weight,
                                                   OptTensor gn_bias, double eps, std::string gn_act, Tensor weight,
                                                   OptTensor bias, OptTensor residual, IntArray stride,
                                                   IntArray padding, IntArray dilation, IntArray output_padding,
                                                   int64_t groups, bool transposed, double divisor, std::string act,
                                                   IntArray replicate, std::string backend) {
  const Tensor y = run_group_norm_conv("group_norm_conv_moments", x, moments, num_groups, gn_weight, gn_bias, eps,
                                       gn_act, weight, bias, residual, stride, padding, dilation, output_padding,
                                       groups, transposed, divisor, act, backend, replicate);
  return {y, channel_moments(y)};
}

std::string explain_group_norm_conv(Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                                    IntArray output_padding, int64_t groups, bool transposed, std::string gn_act,
                                    std::string act, bool, std::string backend) {
  const char* const op = "explain_group_norm_conv";
  check_norm_conv_backend(op, backend);
  check_act(op, gn_act, "gn_act");
  check_act(op, act);
  check_conv_add(op, x, weight, std::nullopt, std::nullopt, stride, padding, dilation, output_padding, groups,
                 transposed);
  return "two ops: x is on the CPU";
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

// What output 2 i - 1 + t counts for input i; the first and the last output are copies.
double backward_weight(int t, int64_t i, int64_t size) {
  const int64_t out = 2 * i - 1 + t;
  if (out < 0 || out >= 2 * size) return 0;
  const bool edge = (t == 1 && i == 0) || (t == 2 && i == size - 1);
  return edge ? 1 : t == 0 || t == 3 ? 0.25 : 0.75;
}

// Of ATen's backward the sizes do not come through the stable ABI.
Tensor upsample_linear_backward(Tensor dy) {
  const IntArray sizes = check_upsample_linear_backward("upsample_linear_backward", dy);
  const MemoryFormat format = memory_format_of(dy);
  const Tensor dense = dense_in(dy, format);
  Tensor dx = empty_like_shape(dy, sizes, std::nullopt, format);
  if (dx.numel() == 0) return dx;
  const bool last = format != MemoryFormat::Contiguous, deep = dy.dim() == 5;
  const int64_t c = last ? sizes[1] : 1, d = deep ? sizes[2] : 1, h = sizes[sizes.size() - 2], w = sizes.back();
  dispatch_dtype(dtype_of(dy), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(dx.mutable_data_ptr());
    parallel(dx.numel() / (w * c), 64 * w * c, [&](int64_t row) {
      const int64_t y = row % h, z = row / h % d, n = row / h / d;
      std::vector<Acc> sum(w * c, Acc(0)), values(2 * w * c);
      for (int i = 0; i < (deep ? 4 : 1); ++i) {
        const double along_z = deep ? backward_weight(i, z, d) : 1;
        const int64_t plane = deep ? n * 2 * d + 2 * z - 1 + i : n * d + z;
        for (int j = 0; j < 4; ++j) {
          const Acc weight = static_cast<Acc>(along_z * backward_weight(j, y, h));
          if (weight == Acc(0)) continue;
          const T* const line = from + (plane * 2 * h + 2 * y - 1 + j) * 2 * w * c;
          for (int64_t k = 0; k < 2 * w * c; k += kBlock) {
            const int64_t count = std::min(kBlock, 2 * w * c - k);
            alignas(64) Acc buffer[kBlock];
            const Acc* const read = view_block(line + k, buffer, count);
            std::copy(read, read + count, values.data() + k);
          }
          for (int64_t x = 0; x < w; ++x) {
            for (int t = 0; t < 4; ++t) {
              const Acc factor = weight * static_cast<Acc>(backward_weight(t, x, w));
              if (factor == Acc(0)) continue;
              const Acc* const value = values.data() + (2 * x - 1 + t) * c;
              for (int64_t e = 0; e < c; ++e) sum[x * c + e] += factor * value[e];
            }
          }
        }
      }
      for (int64_t k = 0; k < w * c; k += kBlock) {
        const int64_t count = std::min(kBlock, w * c - k);
        alignas(64) Acc buffer[kBlock];
        Acc* const out = target_block(to + row * w * c + k, buffer);
        std::copy(sum.data() + k, sum.data() + k + count, out);
        store_block(out, to + row * w * c + k, count);
      }
    });
  });
  return dx;
}

// Rows of the small tensor: each is a row of the large one whose elements are repeated, or the sum of several.
Tensor repeat_elements(const Tensor& x, const IntArray& sizes, const IntArray& factors, bool backward) {
  const MemoryFormat format = memory_format_of(x);
  const Tensor dense = dense_in(x, format);
  Tensor y = empty_like_shape(x, sizes, std::nullopt, format);
  if (y.numel() == 0) return y;
  const bool last = format != MemoryFormat::Contiguous, deep = x.dim() == 5;
  const Tensor& small = backward ? y : x;
  const int64_t c = last ? small.size(1) : 1, h = small.size(small.dim() - 2), w = small.size(small.dim() - 1);
  const int64_t fd = deep ? factors[0] : 1, fh = factors[factors.size() - 2], fw = factors.back();
  dispatch_dtype(dtype_of(x), [&](auto zero) {
    using T = decltype(zero);
    using Acc = acc_t<T>;
    const T* const from = static_cast<const T*>(dense.const_data_ptr());
    T* const to = static_cast<T*>(y.mutable_data_ptr());
    parallel(small.numel() / (w * c), fd * fh * fw * w * c, [&](int64_t row) {
      const int64_t plane = row / h, first = (plane * fd * h + row % h) * fh;
      const auto large = [&](int64_t i, int64_t j) { return (first + i * h * fh + j) * w * fw * c; };
      if (!backward) {
        for (int64_t i = 0; i < fd * fh; ++i) {
          T* at = to + large(i / fh, i % fh);
          for (int64_t k = 0; k < w * fw; ++k, at += c) std::copy_n(from + (row * w + k / fw) * c, c, at);
        }
        return;
      }
      std::vector<Acc> sum(w * c, Acc(0));
      for (int64_t i = 0; i < fd * fh; ++i) {
        const T* at = from + large(i / fh, i % fh);
        for (int64_t k = 0; k < w * fw; ++k, at += c) {
          for (int64_t e = 0; e < c; ++e) sum[k / fw * c + e] += static_cast<Acc>(at[e]);
        }
      }
      for (int64_t e = 0; e < w * c; ++e) to[row * w * c + e] = static_cast<T>(sum[e]);
    });
  });
  return y;
}

Tensor upsample_nearest(Tensor x, IntArray factors) {
  return repeat_elements(x, check_upsample_nearest("upsample_nearest", "x", x, factors, false), factors, false);
}

Tensor upsample_nearest_backward(Tensor dy, IntArray factors) {
  const IntArray sizes = check_upsample_nearest("upsample_nearest_backward", "dy", dy, factors, true);
  return repeat_elements(dy, sizes, factors, true);
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

// An input channel of the result at a time.
template <typename T>
void sum_taps(const UpsampleConvWeightParams& p) {
  using Acc = acc_t<T>;
  int64_t size[3];
  for (int d = 0; d < 3; ++d) size[d] = p.kernel[d] + p.factor[d] - 1;
  const int64_t taps = size[0] * size[1] * size[2];
  const int64_t from_channel = p.channels_last ? 1 : taps, from_tap = p.channels_last ? p.c_out : 1;
  // Tap j of the result is the sum of the taps first(d, j) to last(d, j) of the weight.
  const auto first = [&](int d, int64_t j) { return std::max<int64_t>(0, p.kernel[d] - 1 - j); };
  const auto last = [&](int d, int64_t j) { return std::min(p.kernel[d] - 1, size[d] - 1 - j); };
  parallel(p.groups * p.c_in, p.c_out * taps, [&](int64_t row) {
    const int64_t group = row / p.c_in;
    const T* from = static_cast<const T*>(p.weight) + group * p.c_out * p.stride_out + row % p.c_in * p.stride_in;
    T* to = static_cast<T*>(p.to) + row * p.c_out * taps;
    for (int64_t c = 0; c < p.c_out; ++c, from += p.stride_out) {
      for (int64_t j = 0; j < taps; ++j) {
        const int64_t jd = j / (size[1] * size[2]), jh = j / size[2] % size[1], jw = j % size[2];
        Acc sum(0);
        for (int64_t td = first(0, jd); td <= last(0, jd); ++td) {
          for (int64_t th = first(1, jh); th <= last(1, jh); ++th) {
            for (int64_t tw = first(2, jw); tw <= last(2, jw); ++tw) {
              sum += static_cast<Acc>(from[td * p.stride[0] + th * p.stride[1] + tw * p.stride[2]]);
            }
          }
        }
        to[c * from_channel + j * from_tap] = static_cast<T>(sum);
      }
    }
  });
}

Tensor upsample_conv_weight(Tensor weight, IntArray factors, int64_t groups, bool channels_last) {
  const IntArray sizes = check_upsample_conv_weight("upsample_conv_weight", weight, factors, groups);
  const MemoryFormat format = channels_last ? channels_last_format(weight.dim()) : MemoryFormat::Contiguous;
  Tensor to = empty_like_shape(weight, sizes, std::nullopt, format);
  const UpsampleConvWeightParams p = upsample_conv_weight_params(weight, to, factors, groups, channels_last);
  dispatch_dtype(dtype_of(weight), [&](auto zero) { sum_taps<decltype(zero)>(p); });
  return to;
}

}  // namespace
}  // namespace kgopt

STABLE_TORCH_LIBRARY_IMPL(kgopt, CPU, m) {
  m.impl("conv_add", TORCH_BOX(&kgopt::conv_add));
  m.impl("conv_add_moments", TORCH_BOX(&kgopt::conv_add_moments));
  m.impl("group_norm_conv", TORCH_BOX(&kgopt::group_norm_conv));
  m.impl("group_norm_conv_moments", TORCH_BOX(&kgopt::group_norm_conv_moments));
  m.impl("explain_group_norm_conv", TORCH_BOX(&kgopt::explain_group_norm_conv));
  m.impl("group_norm_conv1x1", TORCH_BOX(&kgopt::group_norm_conv1x1));
  m.impl("upsample_linear", TORCH_BOX(&kgopt::upsample_linear));
  m.impl("upsample_linear_backward", TORCH_BOX(&kgopt::upsample_linear_backward));
  m.impl("upsample_nearest", TORCH_BOX(&kgopt::upsample_nearest));
  m.impl("upsample_nearest_backward", TORCH_BOX(&kgopt::upsample_nearest_backward));
  m.impl("pad_replicate", TORCH_BOX(&kgopt::pad_replicate));
  m.impl("max_pool", TORCH_BOX(&kgopt::max_pool));
  m.impl("upsample_conv_weight", TORCH_BOX(&kgopt::upsample_conv_weight));
}
