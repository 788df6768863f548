// Which kernel makes each gradient of a convolution, and why. Torch-free, so that it can be tested without a GPU.
#pragma once

#include <string>

#include "conv3d_dispatch.h"
#include "conv3d_wgrad_table.h"

namespace kgopt {

// A null reason: an own kernel makes it. Else ATen does, because of it.
struct ConvGradientsChoice {
  const char* why_not_dgrad = nullptr;
  const char* why_not_wgrad = nullptr;
  HopperPlan dgrad;  // of the convolution that gives dx from dy
  RowsPlan dgrad_rows;
  bool dgrad_by_rows = false;
  WgradPlan wgrad;

  std::string explain() const {
    auto one = [](const char* why_not) { return why_not ? std::string("aten: ") + why_not : std::string("kgopt"); };
    return "dx " + one(why_not_dgrad) + "; dweight " + one(why_not_wgrad);
  }
};

// channels_innermost of the problem says that x and dy both are.
inline ConvGradientsChoice choose_conv_gradients(const ConvProblem& problem, const DeviceLimits& limits,
                                                 ConvBackend backend) {
  ConvGradientsChoice choice;
  if (backend == ConvBackend::kAten) {
    choice.why_not_dgrad = choice.why_not_wgrad = "backend=\"aten\" was asked for";
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
  return choice;
}

}  // namespace kgopt
