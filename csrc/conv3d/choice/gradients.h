// Which kernel makes each gradient of a convolution, and why. Torch-free, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <string>

#include "conv3d/choice/choice.h"
#include "conv3d/gradients/few_dgrad/plan.h"
#include "conv3d/gradients/few_wgrad/plan.h"
#include "conv3d/gradients/wgrad/cost.h"

namespace kgopt {

// A null reason: an own kernel makes it. Else ATen does, because of it.
struct ConvGradientsChoice {
  const char* why_not_dgrad = nullptr;
  const char* why_not_wgrad = nullptr;
  HopperPlan dgrad;  // of the convolution that gives dx from dy
  RowsPlan dgrad_rows;
  bool dgrad_by_rows = false;
  WgradPlan wgrad;
  // The kernels for few channels of contiguous tensors, where they are taken; refused plans otherwise.
  NarrowDgradPlan narrow_dgrad;
  NarrowWgradPlan narrow_wgrad;

  std::string explain() const {
    auto one = [](const char* why_not) { return why_not ? std::string("aten: ") + why_not : std::string("kgopt"); };
    return "dx " + one(why_not_dgrad) + "; dweight " + one(why_not_wgrad);
  }
};

// Where few channels of contiguous tensors meet cuDNN, which transposes both tensors first; its rates are those of
// channels_last tensors.
inline const char* narrow_gradient_loses(const ConvProblem& q, double cycles, double tera_per_second) {
  double bytes_in = double(q.n) * q.c_in, bytes_out = double(q.n) * q.c_out;
  for (int i = 0; i < 3; ++i) bytes_in *= double(q.in[i]), bytes_out *= double(q.out[i]);
  const double transposes = (q.dtype == Dtype::kFloat32 ? 8 : 4) * (bytes_in + bytes_out) / 3e6;
  const double cudnn = 3 + 1e6 * conv_tera_operations(q) / tera_per_second + transposes;
  return 5 + cycles / kHopperCyclesPerMicrosecond < cudnn ? nullptr : "cuDNN is predicted to be faster";
}

// channels_innermost of the problem says that x and dy both are.
inline ConvGradientsChoice choose_conv_gradients(const ConvProblem& problem, const DeviceLimits& limits,
                                                 ConvBackend backend) {
  ConvGradientsChoice choice;
  if (backend == ConvBackend::kAten) {
    choice.why_not_dgrad = choice.why_not_wgrad = "backend=\"aten\" was asked for";
    choice.narrow_dgrad.refusal = choice.narrow_wgrad.refusal = choice.why_not_dgrad;
    return choice;
  }
  const ConvProblem adjoint = adjoint_problem(problem);
  choice.dgrad = plan_hopper(adjoint, limits);
  choice.dgrad_rows = plan_rows(adjoint, limits);
  choice.dgrad_by_rows = !choice.dgrad_rows.refusal && (choice.dgrad.refusal || rows_microseconds(choice.dgrad_rows) <
                                                                                    hopper_microseconds(choice.dgrad));
  choice.wgrad = plan_wgrad(problem, limits);
  const bool always = backend == ConvBackend::kKgopt;
  const char* const refusal = choice.dgrad_by_rows ? nullptr : choice.dgrad.refusal;
  choice.why_not_dgrad = refusal || always
                             ? refusal
                             : dgrad_loses(problem, choice.dgrad_by_rows ? rows_microseconds(choice.dgrad_rows)
                                                                         : hopper_microseconds(choice.dgrad));
  choice.why_not_wgrad = always ? choice.wgrad.refusal : wgrad_loses(problem, choice.wgrad);
  if (!problem.planar) {
    choice.narrow_dgrad.refusal = choice.narrow_wgrad.refusal = "x is not contiguous";
    return choice;
  }
  choice.narrow_dgrad = plan_narrow_dgrad(problem, limits);
  choice.narrow_wgrad = plan_narrow_wgrad(problem, limits);
  if (!always) {
    const CudnnGradientRate& rate = cudnn_gradient_rate(problem);
    // Without TF32 it is no faster than with it, nor than fp32's own rate.
    const auto tera_per_second = [&](double tf32, double half) {
      return problem.dtype != Dtype::kFloat32 ? half : problem.allow_tf32 ? tf32 : std::min(tf32, kCudnnFp32Rate);
    };
    if (!choice.narrow_dgrad.refusal) {
      choice.narrow_dgrad.refusal =
          narrow_gradient_loses(problem, choice.narrow_dgrad.cycles, tera_per_second(rate.dgrad_tf32, rate.dgrad_half));
    }
    if (!choice.narrow_wgrad.refusal) {
      choice.narrow_wgrad.refusal =
          narrow_gradient_loses(problem, choice.narrow_wgrad.cycles, tera_per_second(rate.wgrad_tf32, rate.wgrad_half));
    }
  }
  if (!choice.narrow_dgrad.refusal) choice.why_not_dgrad = nullptr;
  if (!choice.narrow_wgrad.refusal) choice.why_not_wgrad = nullptr;
  return choice;
}

}  // namespace kgopt
