// Argument checks of the GroupNorm ops, shared by the CUDA and the CPU files.
#pragma once

#include "common/host/torch_utils.h"
#include "groupnorm/params.h"

namespace kgopt {

// num_groups and the affine parameters against `channels` channels of x's dtype and device. eps may be any number, as
// in PyTorch: NaN comes of one that is below the variance's negative.
inline void check_group_norm_affine(const char* op, const Tensor& x, int64_t channels, int64_t num_groups,
                                    const OptTensor& weight, const OptTensor& bias, bool by_sample = false) {
  KGOPT_CHECK(num_groups >= 1 && channels % num_groups == 0, op, ": num_groups is ", num_groups,
              ", expected a positive divisor of C = ", channels);
  auto check = [&](const char* arg, const OptTensor& t) {
    if (!t) return;
    check_same_device(op, arg, *t, x);
    const IntArray expected = by_sample ? IntArray{x.size(0), channels} : IntArray{channels};
    KGOPT_CHECK(sizes_of(*t) == expected, op, ": ", arg, " has shape ", shape_string(*t), ", expected ",
                list_string(expected));
    const bool mixed = t->scalar_type() == ScalarType::Float && x.scalar_type() != ScalarType::Double;
    KGOPT_CHECK(t->scalar_type() == x.scalar_type() || mixed, op, ": ", arg, " has dtype ",
                scalar_type_name(t->scalar_type()), ", expected ", scalar_type_name(x.scalar_type()),
                x.scalar_type() == ScalarType::Half || x.scalar_type() == ScalarType::BFloat16
                    ? " (the dtype of x) or float32"
                    : " (the dtype of x)");
  };
  check("weight", weight);
  check("bias", bias);
  KGOPT_CHECK(!weight || !bias || weight->scalar_type() == bias->scalar_type(), op, ": bias has dtype ",
              scalar_type_name(bias->scalar_type()), ", expected ", scalar_type_name(weight->scalar_type()),
              ", the dtype of weight");
}

// [N, C, *] as [N, C, S]; channels_last inputs keep their layout.
inline GroupNormDims check_group_norm(const char* op, const Tensor& x, int64_t num_groups,
                                      const OptTensor& weight = std::nullopt, const OptTensor& bias = std::nullopt,
                                      bool by_sample = false) {
  KGOPT_CHECK(x.dim() >= 2, op, ": x has shape ", shape_string(x), ", expected at least 2 dimensions [N, C, ...]");
  GroupNormDims d;
  d.dtype = check_dtype(op, "x", x);
  d.n = x.size(0);
  d.c = x.size(1);
  d.s = 1;
  for (int64_t i = 2; i < x.dim(); ++i) d.s *= x.size(i);
  d.g = num_groups;
  d.channels_last = is_channels_last(x);
  d.by_sample = by_sample;
  check_group_norm_affine(op, x, d.c, num_groups, weight, bias, by_sample);
  return d;
}

// The same of a forward. PyTorch normalizes an empty batch and refuses tensors without channels or positions; which of
// them depends on its version, so ATen is asked.
inline GroupNormDims check_group_norm_forward(const char* op, const Tensor& x, int64_t num_groups,
                                              const OptTensor& weight, const OptTensor& bias, bool by_sample = false) {
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias, by_sample);
  if (d.numel() == 0) call_aten("aten::group_norm", "", x, num_groups, OptTensor(), OptTensor(), 1e-5, true);
  return d;
}

inline void check_shape(const char* op, const char* arg, const Tensor& t, const IntArray& expected) {
  KGOPT_CHECK(sizes_of(t) == expected, op, ": ", arg, " has shape ", shape_string(t), ", expected ",
              list_string(expected));
}

// Statistics as an earlier forward left them: the accumulation type of x, on its device.
inline void check_statistics(const char* op, const char* arg, const Tensor& t, const Tensor& x,
                             const IntArray& expected) {
  check_same_device(op, arg, t, x);
  check_shape(op, arg, t, expected);
  KGOPT_CHECK(t.scalar_type() == stats_type(x), op, ": ", arg, " has dtype ", scalar_type_name(t.scalar_type()),
              ", expected ", scalar_type_name(stats_type(x)), " for x of dtype ", scalar_type_name(x.scalar_type()));
}

inline void check_group_statistics(const char* op, const Tensor& mean, const Tensor& rstd, const Tensor& x,
                                   const GroupNormDims& d) {
  check_statistics(op, "mean", mean, x, {d.n, d.g});
  check_statistics(op, "rstd", rstd, x, {d.n, d.g});
}

// x's shape, dtype and device, which a gradient that comes in has, and a residual.
inline void check_like(const char* op, const char* arg, const Tensor& t, const Tensor& x) {
  check_same_device(op, arg, t, x);
  check_same_dtype(op, arg, t, x);
  check_shape(op, arg, t, sizes_of(x));
}

// The slopes of a PReLU behind a norm: one or one a channel, of x's dtype or float32.
inline void check_slope(const char* op, const Tensor& slope, const Tensor& x, int64_t channels) {
  check_same_device(op, "slope", slope, x);
  KGOPT_CHECK(slope.dim() <= 1 && (slope.numel() == 1 || slope.numel() == channels), op, ": slope has shape ",
              shape_string(slope), ", expected [1] or [", channels, "]");
  const bool mixed = slope.scalar_type() == ScalarType::Float && x.scalar_type() != ScalarType::Double;
  KGOPT_CHECK(slope.scalar_type() == x.scalar_type() || mixed, op, ": slope has dtype ",
              scalar_type_name(slope.scalar_type()), ", expected ", scalar_type_name(x.scalar_type()),
              " (the dtype of x) or float32");
}

// The arguments of backward ops.
inline GroupNormDims check_group_stats_backward(const char* op, const Tensor& dmean, const Tensor& drstd,
                                                const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                                int64_t num_groups) {
  const GroupNormDims d = check_group_norm(op, x, num_groups);
  check_statistics(op, "dmean", dmean, x, {d.n, d.g});
  check_statistics(op, "drstd", drstd, x, {d.n, d.g});
  check_group_statistics(op, mean, rstd, x, d);
  return d;
}
inline GroupNormDims check_sum_backward(const char* op, const Tensor& dy, const Tensor& x, const Tensor& mean,
                                        const Tensor& rstd, int64_t num_groups, const OptTensor& weight,
                                        const OptTensor& bias, const OptTensor& residual) {
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight, bias);
  check_like(op, "dy", dy, x);
  check_group_statistics(op, mean, rstd, x, d);
  if (residual) check_like(op, "residual", *residual, x);
  return d;
}
inline GroupNormDims check_prelu_backward(const char* op, const Tensor& dy, const Tensor& x, const Tensor& mean,
                                          const Tensor& rstd, const Tensor& slope, int64_t num_groups,
                                          const OptTensor& weight, const OptTensor& bias, const OptTensor& residual) {
  const GroupNormDims d = check_sum_backward(op, dy, x, mean, rstd, num_groups, weight, bias, residual);
  check_slope(op, slope, x, d.c);
  return d;
}
inline GroupNormDims check_group_norm_mean_backward(const char* op, const Tensor& dout, const Tensor& x,
                                                    const Tensor& channel_mean, const Tensor& mean, const Tensor& rstd,
                                                    int64_t num_groups, const OptTensor& weight) {
  const GroupNormDims d = check_group_norm(op, x, num_groups, weight);
  check_same_device(op, "dout", dout, x);
  check_shape(op, "dout", dout, {d.n});
  check_dtype(op, "dout", dout);
  check_statistics(op, "channel_mean", channel_mean, x, {d.n, d.c});
  check_group_statistics(op, mean, rstd, x, d);
  return d;
}

// dweight and dbias have the parameters' dtype, or the statistics' without parameters.
inline ScalarType affine_type(const Tensor& x, const OptTensor& weight, const OptTensor& bias) {
  return weight ? weight->scalar_type() : bias ? bias->scalar_type() : stats_type(x);
}

}  // namespace kgopt
