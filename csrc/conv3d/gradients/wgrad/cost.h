// Where the gradients' own kernels beat cuDNN: measured rates of cuDNN (autotuned, channels_last, kernel 3 x 3 x 3) on
// an H200 in TFLOP/s. A shape takes the nearest row of its stride; 2D convolutions were found to run at the rates of
// 3D. Ours are predicted from their plans.
#pragma once

#include <cmath>

#include "conv3d/gradients/wgrad/plan.h"
#include "conv3d/wgmma/cost.h"

namespace kgopt {

struct CudnnGradientRate {
  int c_in, c_out, stride;
  double dgrad_tf32, dgrad_half, wgrad_tf32, wgrad_half;
};
inline constexpr CudnnGradientRate kCudnnGradientRates[] = {
    {1, 16, 1, 2.5, 2.8, 2.9, 3.5},   {4, 32, 1, 14, 26, 18, 33},        {16, 32, 1, 60, 118, 33, 126},
    {32, 32, 1, 127, 238, 36.5, 159}, {32, 64, 1, 134, 272, 57, 199},    {64, 32, 1, 226, 477, 45, 229},
    {96, 32, 1, 246, 545, 42, 192},   {64, 64, 1, 220, 453, 88, 428},    {192, 64, 1, 333, 652, 84, 368},
    {64, 128, 1, 232, 497, 133, 642}, {128, 128, 1, 306, 640, 157, 560}, {256, 256, 1, 224, 441, 161, 489},
    {32, 64, 2, 90, 154, 45, 204},    {64, 128, 2, 165, 274, 114, 348},
};
inline constexpr double kWgradStartMicroseconds = 15;  // launches, partial sums and their addition

inline const CudnnGradientRate& cudnn_gradient_rate(const ConvProblem& q) {
  const CudnnGradientRate* nearest = kCudnnGradientRates;
  double least = 1e30;
  for (const CudnnGradientRate& row : kCudnnGradientRates) {
    const double distance = std::abs(std::log(double(q.c_in) / row.c_in)) +
                            std::abs(std::log(double(q.c_out) / row.c_out)) + (row.stride == q.stride[2] ? 0 : 100);
    if (distance < least) least = distance, nearest = &row;
  }
  return *nearest;
}

inline double conv_tera_operations(const ConvProblem& q) {
  double products = 2e-12 * q.n * q.c_in * q.c_out;
  for (int i = 0; i < 3; ++i) products *= double(q.kernel[i]) * (q.transposed ? q.in[i] : q.out[i]);
  return products;
}

inline double wgrad_microseconds(const WgradPlan& p) {
  const double rounds = std::ceil(double(p.steps) / p.splits) * std::ceil(double(wgrad_blocks(p)) / p.sm_count);
  const double writes = 1.2e-5 * p.partial_floats / p.slots;  // of dw, in pieces of one element
  return kWgradStartMicroseconds + rounds * wgrad_step_cycles(p) / kCyclesPerMicrosecond + writes;
}

// Three of them, the passes that split x and dy, and the partial sums of the first on their way to memory and back.
inline double split_wgrad_microseconds(const ConvProblem& q, const DeviceLimits& limits, const SplitWgradPlan& p) {
  const WgradPlan main = plan_wgrad_terms(q, limits, p.samples, kSplitChain);
  const WgradPlan rest = plan_wgrad_terms(q, limits, p.samples);
  double elements = double(q.n) * q.c_in, of_dy = double(q.n) * q.c_out;
  for (int i = 0; i < 3; ++i) elements *= double(q.in[i]), of_dy *= double(q.out[i]);
  const double slices = std::ceil(double(q.n) / static_cast<double>(p.samples));
  const double sums = 8.0 * static_cast<double>(main.partial_floats) / 3e6;
  return slices * (wgrad_microseconds(main) + 2 * wgrad_microseconds(rest) + 20 + sums) + 12 * (elements + of_dy) / 3e6;
}

// The convolution that gives dx from dy.
inline ConvProblem adjoint_problem(const ConvProblem& q) {
  ConvProblem adjoint = q;
  adjoint.c_in = q.c_out;
  adjoint.c_out = q.c_in;
  for (int i = 0; i < 3; ++i) {
    adjoint.in[i] = q.out[i];
    adjoint.out[i] = q.in[i];
  }
  adjoint.transposed = !q.transposed;
  return adjoint;
}

// Null where the own kernel, of that many microseconds, is to be taken, else why not.
inline const char* dgrad_loses(const ConvProblem& q, double microseconds) {
  if (q.c_in < 16 || q.c_in > 128 || q.c_out < 16 || q.c_out > 128 || q.kernel[0] != 3 || q.kernel[1] != 3 ||
      q.kernel[2] != 3) {
    return "only 3D kernels of 3 x 3 x 3 from 16 to 128 channels were measured";
  }
  const CudnnGradientRate& row = cudnn_gradient_rate(q);
  const double rate = q.dtype != Dtype::kFloat32 ? row.dgrad_half : q.allow_tf32 ? row.dgrad_tf32 : kCudnnFp32Rate;
  return microseconds < 0.97 * (3 + 1e6 * conv_tera_operations(q) / rate) ? nullptr : "cuDNN is predicted to be faster";
}
// Null where the own kernel is to be taken, else why not.
inline const char* wgrad_loses(const ConvProblem& q, const WgradPlan& plan) {
  if (plan.refusal) return plan.refusal;
  if ((!plan.few && q.c_in < 16) || q.c_in > 256 || q.c_out < 16 || q.c_out > 256 ||
      (q.kernel[0] != 1 && q.kernel[0] != 3)) {
    return "only kernels of 3 x 3 and 3 x 3 x 3 up to 256 channels were measured";
  }
  const CudnnGradientRate& rate = cudnn_gradient_rate(q);
  const double cudnn =
      3 + 1e6 * conv_tera_operations(q) / (q.dtype == Dtype::kFloat32 ? rate.wgrad_tf32 : rate.wgrad_half);
  return wgrad_microseconds(plan) < 0.97 * cudnn ? nullptr : "cuDNN is predicted to be faster";
}

// The same for the sum of products of fp16 terms.
inline const char* split_wgrad_loses(const ConvProblem& q, const DeviceLimits& limits, const SplitWgradPlan& plan) {
  if (plan.refusal) return plan.refusal;
  const double cudnn = 3 + 1e6 * conv_tera_operations(q) / kCudnnFp32Rate;
  return split_wgrad_microseconds(q, limits, plan) < 0.8 * cudnn ? nullptr : "cuDNN is predicted to be faster";
}

}  // namespace kgopt
