// Which kernel makes each gradient of a convolution, and why. Torch-free, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <string>
#include <variant>

#include "conv3d/choice/choice.h"
#include "conv3d/gradients/few_dgrad/plan.h"
#include "conv3d/gradients/few_wgrad/plan.h"
#include "conv3d/gradients/head/plan.h"
#include "conv3d/gradients/wgrad/cost.h"

namespace kgopt {

// The plans of all kernels that make a gradient, each with its refusal.
struct ConvGradientPlans {
  // dx: the convolution that gives it from dy, by the kernels for channels-innermost tensors; or few channels of
  // contiguous ones.
  TapColumnsPlan dx_tap_columns;
  PositionRowsPlan dx_position_rows;
  FewDgradPlan dx_few;
  WgradPlan dweight;
  FewWgradPlan dweight_few;
  HeadGradientPlan head;  // of both
};

// channels_innermost of the problem says that x and dy both are.
inline ConvGradientPlans plan_conv_gradients(const ConvProblem& problem, const DeviceLimits& limits) {
  ConvGradientPlans plans;
  const ConvProblem adjoint = adjoint_problem(problem);
  plans.dx_tap_columns = plan_tap_columns(adjoint, limits);
  plans.dx_position_rows = plan_position_rows(adjoint, limits);
  plans.dweight = plan_wgrad(problem, limits);
  plans.head = plan_head_gradient(problem, limits);
  if (problem.planar) {
    plans.dx_few = plan_few_dgrad(problem, limits);
    plans.dweight_few = plan_few_wgrad(problem, limits);
  } else {
    plans.dx_few.refusal = plans.dweight_few.refusal = "x is not contiguous";
  }
  return plans;
}

// ATen makes a gradient that has no other plan, because of why_aten.
struct ConvGradientsChoice {
  std::variant<TapColumnsPlan, PositionRowsPlan, FewDgradPlan, HeadGradientPlan, AtenPlan> dx = AtenPlan();
  std::variant<WgradPlan, FewWgradPlan, HeadGradientPlan, AtenPlan> dweight = AtenPlan();
  const char* why_aten_dx = nullptr;
  const char* why_aten_dweight = nullptr;

  std::string explain() const {
    auto one = [](const char* why_aten) { return why_aten ? std::string("aten: ") + why_aten : std::string("kgopt"); };
    return "dx " + one(why_aten_dx) + "; dweight " + one(why_aten_dweight);
  }
};

// Both gradients for few channels of a dy that is made from x and, for dx, stored of some samples at a time.
struct MadeGradientPlans {
  FewWgradPlan dweight;
  FewDgradPlan dx;
  int64_t samples = 1;  // of a turn

  const char* refusal(bool with_dx) const { return dweight.refusal || !with_dx ? dweight.refusal : dx.refusal; }
};
inline constexpr int kMoreTurns = 4;           // than needed, which may fill the multiprocessors better
inline constexpr double kTurnCycles = 60000;  // that a turn more takes, measured on an H200

// `most_samples` of dy may be stored at a time.
inline MadeGradientPlans plan_made_gradients(ConvProblem problem, const DeviceLimits& limits, bool with_dx,
                                             int64_t most_samples) {
  const int64_t n = problem.n, least = with_dx ? (n + most_samples - 1) / most_samples : 1;
  MadeGradientPlans best;
  double least_cycles = -1;
  for (int64_t turns = least; turns <= std::min(n, least == 1 ? 1 : least + kMoreTurns); ++turns) {
    MadeGradientPlans plans;
    problem.n = plans.samples = (n + turns - 1) / turns;
    plans.dweight = plan_few_wgrad(problem, limits, /*makes_dy=*/true);
    plans.dx = plan_few_dgrad(problem, limits, /*dy_is_made=*/true);
    if (plans.refusal(with_dx)) return plans;
    const double cycles = double(turns) * (plans.dweight.cycles + (with_dx ? plans.dx.cycles : 0) + kTurnCycles);
    if (least_cycles < 0 || cycles < least_cycles) least_cycles = cycles, best = plans;
  }
  return best;
}

// Where few channels of contiguous tensors meet cuDNN, which transposes both tensors first; its rates are those of
// channels_last tensors.
inline const char* few_gradient_loses(const ConvProblem& q, double cycles, double tera_per_second) {
  double bytes_in = double(q.n) * q.c_in, bytes_out = double(q.n) * q.c_out;
  for (int i = 0; i < 3; ++i) bytes_in *= double(q.in[i]), bytes_out *= double(q.out[i]);
  const double transposes = (q.dtype == Dtype::kFloat32 ? 8 : 4) * (bytes_in + bytes_out) / 3e6;
  const double cudnn = 3 + 1e6 * conv_tera_operations(q) / tera_per_second + transposes;
  return 5 + cycles / kCyclesPerMicrosecond < cudnn ? nullptr : "cuDNN is predicted to be faster";
}

// `copies`: both x and dy would have to be copied to channels_last first.
inline ConvGradientsChoice choose_conv_gradients(const ConvProblem& problem, const DeviceLimits& limits,
                                                 ConvBackend backend, bool copies = false) {
  ConvGradientsChoice choice;
  if (backend == ConvBackend::kAten) {
    choice.why_aten_dx = choice.why_aten_dweight = "backend=\"aten\" was asked for";
    return choice;
  }
  const ConvGradientPlans plans = plan_conv_gradients(problem, limits);
  if (!plans.head.refusal && !copies) {  // one pass over x or dx; cuDNN pads dy's channels to a tile's
    choice.dx = plans.head;
    choice.dweight = plans.head;
    return choice;
  }
  const bool always = backend == ConvBackend::kKgopt;
  // Without TF32 cuDNN is no faster than with it, nor than fp32's own rate.
  const auto tera_per_second = [&](double tf32, double half) {
    return problem.dtype != Dtype::kFloat32 ? half : problem.allow_tf32 ? tf32 : std::min(tf32, kCudnnFp32Rate);
  };
  const CudnnGradientRate& rate = cudnn_gradient_rate(problem);
  const char* const copied = copies ? "both tensors would be copied to channels_last first" : nullptr;

  const bool by_rows = !plans.dx_position_rows.refusal &&
                       (plans.dx_tap_columns.refusal || position_rows_microseconds(plans.dx_position_rows) <
                                                            tap_columns_microseconds(plans.dx_tap_columns));
  const char* why_not = by_rows ? nullptr : plans.dx_tap_columns.refusal;
  if (!why_not && !always) {
    why_not = dgrad_loses(problem, by_rows ? position_rows_microseconds(plans.dx_position_rows)
                                           : tap_columns_microseconds(plans.dx_tap_columns));
  }
  if (!plans.dx_few.refusal && (always || !few_gradient_loses(problem, plans.dx_few.cycles,
                                                              tera_per_second(rate.dgrad_tf32, rate.dgrad_half)))) {
    choice.dx = plans.dx_few;
  } else if (why_not || copied) {
    choice.why_aten_dx = why_not ? why_not : copied;
  } else if (by_rows) {
    choice.dx = plans.dx_position_rows;
  } else {
    choice.dx = plans.dx_tap_columns;
  }

  why_not = always ? plans.dweight.refusal : wgrad_loses(problem, plans.dweight);
  if (!plans.dweight_few.refusal &&
      (always ||
       !few_gradient_loses(problem, plans.dweight_few.cycles, tera_per_second(rate.wgrad_tf32, rate.wgrad_half)))) {
    choice.dweight = plans.dweight_few;
  } else if (why_not || copied) {
    choice.why_aten_dweight = why_not ? why_not : copied;
  } else {
    choice.dweight = plans.dweight;
  }
  return choice;
}

}  // namespace kgopt
