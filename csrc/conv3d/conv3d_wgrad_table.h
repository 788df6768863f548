// Where the gradients' own kernels beat cuDNN: measured rates of cuDNN (autotuned, channels_last, kernel 3 x 3 x 3,
// stride 1) on an H200 in TFLOP/s. A shape takes the nearest row.
#pragma once

#include <cmath>

#include "conv3d_hopper_table.h"
#include "conv3d_wgrad_plan.h"

namespace kgopt {

struct CudnnGradientRate {
  int c_in, c_out;
  double dgrad_tf32, dgrad_half, wgrad_tf32, wgrad_half;
};
inline constexpr CudnnGradientRate kCudnnGradientRates[] = {
    {4, 32, 14, 26, 18, 33},        {32, 32, 127, 238, 36.5, 159}, {32, 64, 134, 272, 57, 199},
    {64, 32, 226, 477, 45, 229},    {64, 64, 220, 453, 88, 428},   {64, 128, 232, 497, 133, 642},
    {128, 128, 306, 590, 157, 527},
};
inline constexpr double kWgradStartMicroseconds = 15;  // launches, partial sums and their addition

inline const CudnnGradientRate& cudnn_gradient_rate(int64_t c_in, int64_t c_out) {
  const CudnnGradientRate* nearest = kCudnnGradientRates;
  double least = 1e30;
  for (const CudnnGradientRate& row : kCudnnGradientRates) {
    const double distance = std::abs(std::log(double(c_in) / row.c_in)) + std::abs(std::log(double(c_out) / row.c_out));
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
  return kWgradStartMicroseconds + rounds * wgrad_step_cycles(p) / kHopperCyclesPerMicrosecond;
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

// Null where the own kernel is to be taken, else why not. The measured rates are those of 3 x 3 x 3 between 32 and 128
// channels.
inline const char* was_measured(const ConvProblem& q, bool few) {
  for (int i = 0; i < 3; ++i) {
    if (q.stride[i] != 1) return "only stride 1 was measured";
  }
  const bool measured = few || (q.c_in >= 32 && q.c_in <= 128 && q.c_out >= 32 && q.c_out <= 128 && q.kernel[0] == 3 &&
                                q.kernel[1] == 3 && q.kernel[2] == 3);
  return measured ? nullptr : "only 3D kernels of 3 x 3 x 3 between 32 and 128 channels were measured";
}
inline const char* hopper_dgrad_loses(const ConvProblem& q, const HopperPlan& plan) {
  if (plan.refusal) return plan.refusal;
  if (const char* const why = was_measured(q, false)) return why;
  const CudnnGradientRate& rate = cudnn_gradient_rate(q.c_in, q.c_out);
  const double cudnn =
      3 + 1e6 * conv_tera_operations(q) / (q.dtype == Dtype::kFloat32 ? rate.dgrad_tf32 : rate.dgrad_half);
  return hopper_microseconds(plan) < 0.97 * cudnn ? nullptr : "cuDNN is predicted to be faster";
}
inline const char* wgrad_loses(const ConvProblem& q, const WgradPlan& plan) {
  if (plan.refusal) return plan.refusal;
  if (const char* const why = was_measured(q, plan.few > 0)) return why;
  const CudnnGradientRate& rate = cudnn_gradient_rate(q.c_in, q.c_out);
  const double cudnn =
      3 + 1e6 * conv_tera_operations(q) / (q.dtype == Dtype::kFloat32 ? rate.wgrad_tf32 : rate.wgrad_half);
  return wgrad_microseconds(plan) < 0.97 * cudnn ? nullptr : "cuDNN is predicted to be faster";
}

}  // namespace kgopt
