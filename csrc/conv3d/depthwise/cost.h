// Where depthwise kernels meet PyTorch's: its own for contiguous tensors and volumes, cuDNN's for channels_last images.
#pragma once

#include <algorithm>
#include <string>

#include "conv3d/depthwise/plan.h"

namespace kgopt {

enum class DepthwiseWork { kForward, kInputGradient, kWeightGradient };

// Of PyTorch's time: what ours must be predicted to stay below, since both are predictions.
inline constexpr double kDepthwiseMargin = 0.8;

// Of a dilated convolution in channels_last, for which cuDNN has its slowest kernels. The gradient of x in volumes is
// no slower than without dilation.
inline double aten_dilated_microseconds(double million_products, DepthwiseWork work, bool volume, bool half) {
  if (work == DepthwiseWork::kInputGradient) return 15 + 1.1 * million_products;
  const bool forward = work == DepthwiseWork::kForward;
  if (volume) return (forward ? 2.7 : half ? 1.7 : 5) * million_products;
  if (forward) return half ? 90 + 1.75 * million_products : 80 + 2.6 * million_products;
  return half ? 60 + 2.2 * million_products : 50 + 6 * million_products;
}

// PyTorch's microseconds, as fitted to the convolutions of benchmarks/depthwise.py on an H200. Of volumes in
// channels_last, and of their gradients, far too few: those take up to hundreds of times as long.
inline double aten_depthwise_microseconds(const ConvProblem& q, DepthwiseWork work) {
  double in = double(q.n) * q.c_in, out = double(q.n) * q.c_out, taps = 1;
  for (int i = 0; i < 3; ++i) {
    in *= double(q.in[i]);
    out *= double(q.out[i]);
    taps *= double(q.kernel[i]);
  }
  const double products = 1e-6 * taps * (q.transposed ? in : out);  // millions
  const double results = 1e-6 * (work == DepthwiseWork::kInputGradient ? in : out);
  const double memory = (in + out) * dtype_size(q.dtype) / depthwise_detail::kBytesPerMicrosecond;
  const bool volume = q.in[0] > 1 || q.out[0] > 1 || q.kernel[0] > 1, half = q.dtype != Dtype::kFloat32;
  const bool of_x = work == DepthwiseWork::kInputGradient, of_weight = work == DepthwiseWork::kWeightGradient;
  bool dilated = false;
  for (int i = 0; i < 3; ++i) dilated = dilated || (q.kernel[i] > 1 && q.dilation[i] > 1);
  if (dilated && !q.planar && !q.transposed && !(volume && of_x)) {
    return std::max(memory, aten_dilated_microseconds(products, work, volume, half));
  }
  if (volume || q.transposed) {
    const double us = q.planar ? std::max(13 * results, 0.65 * products) : (half ? 22 : 18) * results + 0.9 * products;
    const double slower = dilated && q.planar && !q.transposed ? (of_x ? 1.5 : 1.25) : 1;
    return 4 + std::max(us, memory) * (of_weight ? 2 : slower);
  }
  // Images: ATen's own kernels of contiguous tensors, cuDNN's of channels_last.
  if (q.planar) return 4 + std::max(1.5 * memory, 0.62 * products + 4.5 * results) * (of_weight ? 1.6 : 1);
  if (half) return 4 + std::max(1.1 * memory, 0.16 * products) * (of_x ? 2 : of_weight ? 1.2 : 1);
  return 4 + std::max(memory, 0.33 * products) * (of_weight ? 1.6 : 1);
}

// Why PyTorch's kernel is to be taken, null where ours is.
inline const char* depthwise_loses(const ConvProblem& q, DepthwiseWork work, double microseconds) {
  return microseconds < kDepthwiseMargin * aten_depthwise_microseconds(q, work)
             ? nullptr
             : "a depthwise convolution of a shape that PyTorch's kernels are predicted to be good at";
}

// Both times, in words.
inline std::string depthwise_times(const ConvProblem& q, DepthwiseWork work, double microseconds) {
  return "about " + std::to_string(std::lround(microseconds)) + " us, PyTorch's: about " +
         std::to_string(std::lround(aten_depthwise_microseconds(q, work))) + " us";
}

}  // namespace kgopt
