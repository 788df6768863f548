// Argument checks of the pointwise ops, shared by the CUDA and the CPU files.
#pragma once

#include "common/host/torch_utils.h"
#include "conv3d/api/checks.h"
#include "groupnorm/api/checks.h"
#include "pointwise/pointwise_params.h"

namespace kgopt {

// The convolution of conv_add, and its output's format.
inline ConvShape check_conv_add(const char* op, const Tensor& x, const Tensor& weight, const OptTensor& bias,
                                const OptTensor& residual, const IntArray& stride, const IntArray& padding,
                                const IntArray& dilation, const IntArray& output_padding, int64_t groups,
                                bool transposed) {
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  ConvShape s = check_conv(op, x, weight, bias, stride, padding, dilation, output_padding, groups, transposed,
                           static_cast<int>(x.dim()) - 2);
  if (residual) {
    check_same_device(op, "residual", *residual, x);
    check_same_dtype(op, "residual", *residual, x);
    KGOPT_CHECK(sizes_of(*residual) == s.out_sizes, op, ": residual has shape ", shape_string(*residual),
                ", expected the convolution's, ", list_string(s.out_sizes));
  }
  return s;
}

// The norm in front of a convolution, none with 0 groups, and where x's own moments are given, these.
inline void check_prologue(const char* op, const Tensor& x, const OptTensor& moments, int64_t num_groups,
                           const OptTensor& gn_weight, const OptTensor& gn_bias, double eps, const std::string& act) {
  const bool acts = !check_act(op, act).empty();
  if (num_groups == 0) {
    KGOPT_CHECK(
        !acts && !moments && !gn_weight && !gn_bias, op,
        ": num_groups is 0, expected no activation before the convolution and no moments, gn_weight and gn_bias");
    return;
  }
  check_group_norm(op, x, num_groups, gn_weight, gn_bias);
  if (moments) check_statistics(op, "moments", *moments, x, {x.size(0), x.size(1), 2});
}

// The result's sizes.
inline IntArray check_group_norm_conv1x1(const char* op, const Tensor& x, const OptTensor& moments, int64_t num_groups,
                                         const OptTensor& gn_weight, const OptTensor& gn_bias, double eps,
                                         const std::string& act, const Tensor& weight, const OptTensor& bias) {
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  const int rank = static_cast<int>(x.dim()) - 2;
  check_prologue(op, x, moments, num_groups, gn_weight, gn_bias, eps, act);
  const IntArray ones(rank, 1), zeros(rank, 0);
  for (int i = 0; i < rank; ++i) {
    KGOPT_CHECK(weight.dim() == x.dim() && weight.size(2 + i) == 1, op, ": weight has shape ", shape_string(weight),
                ", expected a kernel of 1 along each dim");
  }
  return check_conv(op, x, weight, bias, ones, zeros, ones, zeros, 1, false, rank).out_sizes;
}

// As PyTorch's resampling, pooling and padding: the batch alone may be empty.
inline void check_no_empty_dims(const char* op, const char* arg, const Tensor& x) {
  for (int64_t i = 1; i < x.dim(); ++i) {
    KGOPT_CHECK(x.size(i) >= 1, op, ": ", arg, " has shape ", shape_string(x),
                ", expected at least 1 along each dim but the first");
  }
}

// Sizes of the result of upsample_linear.
inline IntArray check_upsample_linear(const char* op, const Tensor& x, const OptTensor& residual) {
  check_dtype(op, "x", x);
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  check_no_empty_dims(op, "x", x);
  IntArray sizes = sizes_of(x);
  for (size_t i = 2; i < sizes.size(); ++i) sizes[i] *= 2;
  if (residual) {
    check_same_device(op, "residual", *residual, x);
    check_same_dtype(op, "residual", *residual, x);
    KGOPT_CHECK(sizes_of(*residual) == sizes, op, ": residual has shape ", shape_string(*residual), ", expected ",
                list_string(sizes));
  }
  return sizes;
}

// Sizes of the result of upsample_linear_backward.
inline IntArray check_upsample_linear_backward(const char* op, const Tensor& dy) {
  check_dtype(op, "dy", dy);
  KGOPT_CHECK(dy.dim() == 4 || dy.dim() == 5, op, ": dy has shape ", shape_string(dy), ", expected 4 or 5 dimensions");
  check_no_empty_dims(op, "dy", dy);
  IntArray sizes = sizes_of(dy);
  for (size_t i = 2; i < sizes.size(); ++i) {
    KGOPT_CHECK(sizes[i] >= 2 && sizes[i] % 2 == 0, op, ": dy has shape ", shape_string(dy),
                ", expected even sizes of at least 2 along each dim");
    sizes[i] /= 2;
  }
  return sizes;
}

// Sizes of the result of upsample_nearest and, backward, of its gradient.
inline IntArray check_upsample_nearest(const char* op, const char* name, const Tensor& x, const IntArray& factors,
                                       bool backward) {
  check_dtype(op, name, x);
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": ", name, " has shape ", shape_string(x),
              ", expected 4 or 5 dimensions");
  check_list(op, "factors", factors, static_cast<int>(x.dim()) - 2, 1, "positive values");
  check_no_empty_dims(op, name, x);
  IntArray sizes = sizes_of(x);
  for (size_t i = 2; i < sizes.size(); ++i) {
    const int64_t factor = factors[i - 2];
    KGOPT_CHECK(factor < 1024, op, ": factors is ", list_string(factors), ", expected values below 1024");
    KGOPT_CHECK(!backward || sizes[i] % factor == 0, op, ": dy has shape ", shape_string(x),
                ", expected multiples of factors, which is ", list_string(factors));
    sizes[i] = backward ? sizes[i] / factor : sizes[i] * factor;
  }
  return sizes;
}

// Sizes of the result of pad_replicate.
inline IntArray check_pad_replicate(const char* op, const Tensor& x, const IntArray& pad) {
  check_dtype(op, "x", x);
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  const int rank = static_cast<int>(x.dim()) - 2;
  check_list(op, "pad", pad, 2 * rank, 0, "non-negative values");
  check_no_empty_dims(op, "x", x);
  IntArray sizes = sizes_of(x);
  for (int i = 0; i < rank; ++i) {
    sizes[2 + i] += pad[2 * (rank - 1 - i)] + pad[2 * (rank - 1 - i) + 1];
  }
  return sizes;
}

// A tensor of that result's sizes and format, for checks: nobody may read it, its memory is x's.
inline Tensor padded_in_name(const char* op, const Tensor& x, const IntArray& pad) {
  const IntArray sizes = check_pad_replicate(op, x, pad);
  const int64_t rank = x.dim();
  const bool last = is_channels_last(x);
  IntArray strides(rank);
  int64_t next = 1;
  if (last) strides[1] = next, next *= sizes[1];
  for (int64_t d = rank - 1; d >= (last ? 2 : 1); --d) strides[d] = next, next *= sizes[d];
  strides[0] = next;
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(x.get(), rank, sizes.data(), strides.data(), /*offset_increment=*/0, &made));
  return Tensor(made);
}

// Sizes of the result of max_pool.
inline IntArray check_max_pool(const char* op, const Tensor& x, const IntArray& kernel, const IntArray& stride,
                               const IntArray& padding) {
  check_dtype(op, "x", x);
  KGOPT_CHECK(x.dim() == 4 || x.dim() == 5, op, ": x has shape ", shape_string(x), ", expected 4 or 5 dimensions");
  const int rank = static_cast<int>(x.dim()) - 2;
  check_list(op, "kernel_size", kernel, rank, 1, "positive values");
  check_list(op, "stride", stride, rank, 1, "positive values");
  check_list(op, "padding", padding, rank, 0, "non-negative values");
  check_no_empty_dims(op, "x", x);
  IntArray sizes = sizes_of(x);
  for (int i = 0; i < rank; ++i) {
    KGOPT_CHECK(2 * padding[i] <= kernel[i], op, ": padding is ", list_string(padding),
                ", expected at most half of kernel_size ", list_string(kernel));
    const int64_t reach = x.size(2 + i) + 2 * padding[i] - kernel[i];
    KGOPT_CHECK(reach >= 0, op, ": x has shape ", shape_string(x), ", expected at least the size of a window, ",
                list_string(kernel));
    sizes[2 + i] = reach / stride[i] + 1;
  }
  return sizes;
}

// Sizes of the result of upsample_conv_weight.
inline IntArray check_upsample_conv_weight(const char* op, const Tensor& weight, const IntArray& factors,
                                           int64_t groups) {
  check_dtype(op, "weight", weight);
  KGOPT_CHECK(weight.dim() == 4 || weight.dim() == 5, op, ": weight has shape ", shape_string(weight),
              ", expected 4 or 5 dimensions");
  check_list(op, "factors", factors, static_cast<int>(weight.dim()) - 2, 1, "positive values");
  for (int64_t i = 0; i < weight.dim(); ++i) {
    KGOPT_CHECK(weight.size(i) >= 1, op, ": weight has shape ", shape_string(weight),
                ", expected at least 1 along each dim");
  }
  KGOPT_CHECK(groups >= 1 && weight.size(0) % groups == 0, op, ": groups is ", groups,
              ", expected a divisor of the output channels, ", weight.size(0));
  IntArray sizes = {weight.size(1) * groups, weight.size(0) / groups};
  for (size_t i = 0; i < factors.size(); ++i) {
    KGOPT_CHECK(factors[i] < 1024, op, ": factors is ", list_string(factors), ", expected values below 1024");
    sizes.push_back(weight.size(2 + static_cast<int64_t>(i)) + factors[i] - 1);
  }
  return sizes;
}

// What both devices are given. `to` has these sizes.
inline UpsampleConvWeightParams upsample_conv_weight_params(const Tensor& weight, const Tensor& to,
                                                            const IntArray& factors, int64_t groups,
                                                            bool channels_last) {
  UpsampleConvWeightParams p;
  p.weight = weight.const_data_ptr();
  p.to = to.mutable_data_ptr();
  p.stride_out = weight.stride(0);
  p.stride_in = weight.stride(1);
  p.groups = groups;
  p.c_out = weight.size(0) / groups;
  p.c_in = weight.size(1);
  p.channels_last = channels_last;
  const int64_t rank = weight.dim() - 2;
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t at = 3 - rank + i;
    p.stride[at] = weight.stride(2 + i);
    p.kernel[at] = weight.size(2 + i);
    p.factor[at] = factors[static_cast<size_t>(i)];
  }
  return p;
}

}  // namespace kgopt
