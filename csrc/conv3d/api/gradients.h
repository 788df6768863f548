// Gradients of convolutions on CUDA, for ops that have them among their steps.
#pragma once

#include "conv3d/api/checks.h"
#include "conv3d/gradients/wgrad/params.h"

namespace kgopt {

// dx, dweight and dbias as far as `mask` asks; empty tensors for the others. weight may be fp32 beside half tensors,
// and so is its gradient then.
ConvGradients conv_backward(Tensor dy, Tensor x, Tensor weight, IntArray stride, IntArray padding, IntArray dilation,
                            IntArray output_padding, int64_t groups, bool transposed, std::vector<bool> mask,
                            std::string backend, std::optional<bool> allow_tf32);

// dweight of channels_last tensors by kgopt's kernel. `sum`: what is done to its sums.
Tensor conv_wgrad(const char* op, const Tensor& dy, const Tensor& x, const Tensor& weight, const ConvShape& shape,
                  const WgradPlan& plan, const WgradSumParams& sum = WgradSumParams{});

// Sums of dy, which has channels innermost; none where the kernel does not take it.
std::optional<Tensor> conv_bias_gradient(const char* op, const Tensor& dy, const ConvShape& shape);

}  // namespace kgopt
