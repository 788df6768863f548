// fp32 tensors as scaled fp16 and convolutions of these (scaled_half_params.h), on the torch side.
#pragma once

#include "conv3d/api/call.h"
#include "conv3d/norm_conv/scaled_half_params.h"

namespace kgopt {

struct __attribute__((visibility("hidden"))) ScaledTensor {
  Tensor half;     // channels_last
  Tensor inverse;  // [C] of double: of the powers of two
};

// What is done to a tensor before it is rounded, and what else is wanted of it.
struct __attribute__((visibility("hidden"))) ScaledSource {
  int64_t num_groups = 0;  // none: no norm and no activation
  OptTensor weight, bias;
  double eps = 0;
  ActChain act;
  const PaddedShape* pad = nullptr;  // its outermost positions are repeated around it
  IntArray padded_sizes;
  const Tensor *mean = nullptr, *rstd = nullptr;  // where the norm's go, [N, num_groups]
  const Tensor* sums = nullptr;                   // where those of the tensor's channels go, [C]
};
ScaledTensor scale_half(const char* op, const Tensor& x, const ScaledSource& source);

// act((convolution + a.bias + residual) / divisor) in fp32. a.x is of the sizes that the convolution reads; it is not
// read, and may be the scaled tensor. That is gone before the result is there, if nobody else holds it.
Tensor conv_of_scaled(const ConvArgs& a, const ConvShape& shape, ScaledTensor x, const OptTensor& residual,
                      double divisor, const ActChain& act);

}  // namespace kgopt
