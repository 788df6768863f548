// conv_add as a C++ function, for what runs in front of it.
#pragma once

#include <string>

#include "conv3d/api/call.h"
#include "pointwise/pointwise.h"

namespace kgopt {

// What the convolution's kernel left to do, in one pass over its result y.
void add_tail(const char* op, const Tensor& y, const OptTensor& bias, const ConvShape& shape, const ConvTail& tail);

// With `moments`, those of the result are put there.
Tensor run_conv_add(const char* op, const Tensor& x, const Tensor& weight, OptTensor bias, const OptTensor& residual,
                    const IntArray& stride, const IntArray& padding, const IntArray& dilation,
                    const IntArray& output_padding, int64_t groups, bool transposed, double divisor,
                    const std::string& act, const std::string& backend, Tensor* moments);

// x with its outermost positions repeated around it, as F.pad has `pad`.
Tensor pad_replicate_cuda(Tensor x, IntArray pad);

}  // namespace kgopt
