// Which kernel makes each gradient of a convolution, and why. Torch-free, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <string>
#include <variant>

#include "conv3d/choice/choice.h"
#include "conv3d/gradients/few_dgrad/plan.h"
#include "conv3d/gradients/few_march/plan.h"
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
  SplitWgradPlan dweight_split;
  FewWgradPlan dweight_few;
  HeadGradientPlan head;  // of both
  DepthwisePlan dx_depthwise;
  DepthwiseWgradPlan dweight_depthwise;
};

// channels_innermost of the problem says that x and dy both are.
inline ConvGradientPlans plan_conv_gradients(const ConvProblem& problem, const DeviceLimits& limits) {
  ConvGradientPlans plans;
  const ConvProblem adjoint = adjoint_problem(problem);
  plans.dx_tap_columns = plan_tap_columns(adjoint, limits);
  plans.dx_position_rows = plan_position_rows(adjoint, limits);
  plans.dweight = plan_wgrad(problem, limits);
  plans.dweight_split = plan_split_wgrad(problem, limits);
  plans.head = plan_head_gradient(problem, limits);
  plans.dx_depthwise = plan_depthwise(problem, limits, /*of_dx=*/true);
  plans.dweight_depthwise = plan_depthwise_wgrad(problem, limits);
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
  std::variant<TapColumnsPlan, PositionRowsPlan, FewDgradPlan, HeadGradientPlan, DepthwisePlan, AtenPlan> dx =
      AtenPlan();
  std::variant<WgradPlan, SplitWgradPlan, FewWgradPlan, HeadGradientPlan, DepthwiseWgradPlan, AtenPlan> dweight =
      AtenPlan();
  const char* why_aten_dx = nullptr;
  const char* why_aten_dweight = nullptr;

  std::string explain() const {
    auto one = [](const char* why_aten) { return why_aten ? std::string("aten: ") + why_aten : std::string("kgopt"); };
    return "dx " + one(why_aten_dx) + "; dweight " + one(why_aten_dweight);
  }
};

// Both gradients for few channels of a dy that is made from x. One kernel marches through x and gives both, or the
// kernel for dweight gives dx, too, or stores dy of some samples at a time for a second one.
struct MadeGradientPlans {
  FewMarchPlan march;
  FewWgradPlan dweight;
  FewDgradPlan dx;
  int64_t samples = 1;                            // of a turn
  const char* why_apart = "dx is not asked for";  // null where dweight's kernel gives dx

  const char* refusal(bool with_dx) const {
    if (!march.refusal) return nullptr;
    return dweight.refusal || !with_dx || !why_apart ? dweight.refusal : dx.refusal;
  }
};
inline constexpr double kStoredGradientCost = 1.25;  // that a launch for both may take, which stores no dy
inline constexpr int kMoreTurns = 4;                 // than needed, which may fill the multiprocessors better
inline constexpr double kTurnCycles = 60000;         // that a turn more takes, measured on an H200

namespace choice_detail {

// Without the march.
inline MadeGradientPlans plan_made_tiles(ConvProblem problem, const DeviceLimits& limits, bool with_dx,
                                         int64_t most_samples, double* cycles_of_all) {
  const FewWgradPlan both = plan_few_wgrad_dx(problem, limits);
  const int64_t n = problem.n, least = with_dx ? (n + most_samples - 1) / most_samples : 1;
  MadeGradientPlans best;
  double least_cycles = -1;
  for (int64_t turns = least; turns <= std::min(n, least == 1 ? 1 : least + kMoreTurns); ++turns) {
    MadeGradientPlans plans;
    plans.march.refusal = "tiles are predicted to be faster";
    problem.n = plans.samples = (n + turns - 1) / turns;
    plans.dweight = plan_few_wgrad(problem, limits, /*makes_dy=*/true);
    plans.dx = plan_few_dgrad(problem, limits, /*dy_is_made=*/true);
    if (plans.refusal(with_dx)) return plans;
    const double cycles = double(turns) * (plans.dweight.cycles + (with_dx ? plans.dx.cycles : 0) + kTurnCycles);
    if (least_cycles < 0 || cycles < least_cycles) least_cycles = cycles, best = plans;
  }
  *cycles_of_all = kStoredGradientCost * (least_cycles - kTurnCycles);
  if (!with_dx) return best;
  best.why_apart = both.refusal                                       ? both.refusal
                   : both.cycles < kStoredGradientCost * least_cycles ? nullptr
                                                                      : "two kernels are predicted to be faster";
  if (!best.why_apart) best.dweight = both, best.samples = n, *cycles_of_all = std::min(*cycles_of_all, both.cycles);
  return best;
}

}  // namespace choice_detail

// `most_samples` of dy may be stored at a time.
inline MadeGradientPlans plan_made_gradients(const ConvProblem& problem, const DeviceLimits& limits, bool with_dx,
                                             int64_t most_samples) {
  double cycles = 0;
  MadeGradientPlans plans = choice_detail::plan_made_tiles(problem, limits, with_dx, most_samples, &cycles);
  const FewMarchPlan march = plan_few_march(problem, limits);
  if (!with_dx) {
    plans.march.refusal = "dx is not asked for";
  } else if (march.refusal || plans.refusal(true) || march.cycles < cycles) {
    plans.march = march;
  }
  return plans;
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

// Of a depthwise convolution, whose kernels read both formats.
inline void choose_depthwise_gradients(const ConvProblem& q, const DeviceLimits& limits, bool always,
                                       ConvGradientsChoice* choice) {
  const DepthwisePlan dx = plan_depthwise(q, limits, /*of_dx=*/true);
  const DepthwiseWgradPlan dweight = plan_depthwise_wgrad(q, limits);
  const auto why_not = [&](const char* refusal, DepthwiseWork work, double microseconds) {
    return refusal || always ? refusal : depthwise_loses(q, work, microseconds);
  };
  choice->why_aten_dx = why_not(dx.refusal, DepthwiseWork::kInputGradient, dx.microseconds);
  choice->why_aten_dweight = why_not(dweight.refusal, DepthwiseWork::kWeightGradient, dweight.microseconds);
  if (!choice->why_aten_dx) choice->dx = dx;
  if (!choice->why_aten_dweight) choice->dweight = dweight;
}

// `copies`: both x and dy would have to be copied to channels_last first.
inline ConvGradientsChoice choose_conv_gradients(const ConvProblem& problem, const DeviceLimits& limits,
                                                 ConvBackend backend, bool copies = false) {
  ConvGradientsChoice choice;
  if (backend == ConvBackend::kAten) {
    choice.why_aten_dx = choice.why_aten_dweight = "backend=\"aten\" was asked for";
    return choice;
  }
  if (is_depthwise(problem) && problem.dtype != Dtype::kFloat64) {
    choose_depthwise_gradients(problem, limits, backend == ConvBackend::kKgopt, &choice);
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
  } else if (!(always ? plans.dweight_split.refusal : split_wgrad_loses(problem, limits, plans.dweight_split))) {
    choice.dweight = plans.dweight_split;  // reads both formats
  } else if (why_not || copied) {
    choice.why_aten_dweight = why_not ? why_not : copied;
  } else {
    choice.dweight = plans.dweight;
  }
  return choice;
}

// Which gradients of contiguous x and dy, neither of few channels, to compute from copies in channels_last.
struct InnermostGradients {
  bool dx = false, dweight = false;

  std::string explain() const {
    return std::string(dx && dweight ? "both" : dx ? "dx" : "dweight") + " from copies of x and dy in channels_last";
  }
};

// A pass that changes the format of a tensor of x's or dy's size.
inline double relayout_microseconds(const ConvProblem& q, bool of_dy, double start = 3) {
  double elements = double(q.n) * (of_dy ? q.c_out : q.c_in);
  for (int i = 0; i < 3; ++i) elements *= double(of_dy ? q.out[i] : q.in[i]);
  return start + 2 * elements * static_cast<double>(dtype_size(q.dtype)) / 3e6;
}

// Which gradients of contiguous tensors pay for copies of x and dy in channels_last. cuDNN's kernels on tensor cores
// read channels innermost: it transposes both tensors, for each gradient, and gives dx back transposed. Here dy is
// transposed once, and other kernels may run. `dx`, `dweight`: which are wanted.
inline InnermostGradients choose_innermost_gradients(const ConvProblem& problem, const DeviceLimits& limits, bool dx,
                                                     bool dweight) {
  InnermostGradients chosen;
  const int64_t size = dtype_size(problem.dtype);
  if (problem.is_empty() || !problem.planar || problem.groups != 1 || problem.dtype == Dtype::kFloat64 ||
      problem.c_in * size % 16 != 0 || problem.c_out * size % 16 != 0) {
    return chosen;
  }
  const ConvGradientsChoice as_they_lie = choose_conv_gradients(problem, limits, ConvBackend::kAuto, true);
  if (!std::holds_alternative<AtenPlan>(as_they_lie.dx) || std::holds_alternative<FewWgradPlan>(as_they_lie.dweight)) {
    return chosen;
  }
  ConvProblem innermost = problem;
  innermost.planar = false;
  innermost.channels_innermost = true;
  const ConvGradientsChoice choice = choose_conv_gradients(innermost, limits, ConvBackend::kAuto);
  const bool fp32 = problem.dtype == Dtype::kFloat32 && !problem.allow_tf32;
  const CudnnGradientRate& rate = cudnn_gradient_rate(problem);
  const auto by_cudnn = [&](double tf32, double half) {
    const double tera = problem.dtype != Dtype::kFloat32 ? half : fp32 ? std::min(tf32, kCudnnFp32Rate) : tf32;
    return 3 + 1e6 * conv_tera_operations(problem) / tera;
  };
  const double of_x = relayout_microseconds(problem, false), of_dy = relayout_microseconds(problem, true);
  // Of cuDNN and of channels_last kernels, the copies left out.
  double dx_then = by_cudnn(rate.dgrad_tf32, rate.dgrad_half), dx_now = dx_then;
  if (const auto* rows = std::get_if<PositionRowsPlan>(&choice.dx)) dx_now = position_rows_microseconds(*rows);
  if (const auto* taps = std::get_if<TapColumnsPlan>(&choice.dx)) dx_now = tap_columns_microseconds(*taps);
  if (fp32) {  // cuDNN's kernels of this precision transpose nothing; dweight has a kernel that reads both formats
    chosen.dx = dx && of_x + of_dy + dx_now < 0.8 * dx_then;
    return chosen;
  }
  double dweight_then = by_cudnn(rate.wgrad_tf32, rate.wgrad_half), dweight_now = dweight_then;
  if (const auto* plan = std::get_if<WgradPlan>(&choice.dweight)) dweight_now = wgrad_microseconds(*plan);
  const double copies = of_dy + (dx ? of_x : 0) + (dweight ? of_x : 0);
  // Small ones may have other kernels, or hide their launches.
  const double hidden_pair = relayout_microseconds(problem, false, 0) + relayout_microseconds(problem, true, 0);
  const double hidden = (double(dx) + double(dweight)) * hidden_pair;
  const double now = copies + (dx ? dx_now : 0) + (dweight ? dweight_now : 0);
  const double then = hidden + (dx ? dx_then : 0) + (dweight ? dweight_then : 0);
  const bool pays = now < 0.97 * then;
  return {dx && pays, dweight && pays};
}

}  // namespace kgopt
