// Which kernel does a norm and the convolution behind it, and why. Torch-free, so that it can be tested without a GPU.
#pragma once

#include <memory>
#include <string>

#include "common/activation.h"
#include "conv3d/choice/choice.h"

namespace kgopt {

struct NormConvRequest {
  // Why the kernel for few output channels (norm_conv/norm_conv_few.cu) cannot run it, null when it can.
  const char* few_refusal = nullptr;
  // Whether fp16 between two passes (norm_conv/scaled_half.h) was asked for, and why it cannot be; null when it can.
  bool is_scaled_half = false;
  const char* scaled_half_refusal = nullptr;
  bool is_empty = false;
  bool has_norm = true;     // else the convolution alone
  bool has_moments = true;  // of x; else it is read for them first
  bool is_bare = true;      // nothing but `act` follows the convolution
  Chain norm_act = Chain::kNone, act = Chain::kNone;
};

struct NormConvChoice {
  enum Path { kTwoOps, kFewChannels, kPositionRows, kScaledHalf } path = kTwoOps;
  std::shared_ptr<const PositionRowsPlan> plan;  // kPositionRows
  std::string reason;
};

inline NormConvChoice choose_norm_conv(const ConvProblem& problem, const DeviceLimits& limits, ConvBackend backend,
                                       const NormConvRequest& request) {
  using Path = NormConvChoice::Path;
  if (request.is_empty) return {Path::kTwoOps, nullptr, "a tensor is empty"};
  if (request.is_scaled_half) {
    if (!request.scaled_half_refusal) return {Path::kScaledHalf, nullptr, "its backend was asked for"};
    return {Path::kTwoOps, nullptr, std::string("scaled half: ") + request.scaled_half_refusal};
  }
  if (backend == ConvBackend::kAten) return {Path::kTwoOps, nullptr, "backend is 'aten'"};
  if (!request.is_bare) return {Path::kTwoOps, nullptr, "a residual, a division or moments of the result"};
  const bool rows_named = backend == ConvBackend::kPositionRows;
  if (!request.few_refusal && !rows_named) {
    return {Path::kFewChannels, nullptr,
            request.has_moments ? "few output channels: x is normalized as it is read"
                                : "few output channels: without moments of x behind the norm"};
  }
  const std::string why = std::string("few output channels: ") +
                          (request.few_refusal ? request.few_refusal : "backend names another kernel");
  auto two_ops = [&](const char* reason) {
    return NormConvChoice{Path::kTwoOps, nullptr, why + "; positions as rows: " + reason};
  };
  if (!request.has_norm) return two_ops("no norm");
  if (request.act == Chain::kAny || request.norm_act == Chain::kAny) {
    return two_ops("an activation that is neither relu nor silu");
  }
  // Where x must be read for its moments first, the group norm that reads it once is as fast.
  if (!request.has_moments && !rows_named) return two_ops("no moments of x");
  if (remembered_choice(problem, limits, backend)->path() != ConvPath::kPositionRows) {
    return two_ops("the convolution is another one");
  }
  const auto plan = remembered(conv_key(problem, limits, ConvBackend::kAuto),
                               [&] { return plan_position_rows(problem, limits, /*normalizes=*/true); });
  if (plan->refusal) return two_ops(plan->refusal);
  if (!rows_named && !position_rows_norm_pays(problem, *plan, request.norm_act)) {
    return two_ops("a pass of its own for the norm is predicted to be faster");
  }
  return {Path::kPositionRows, plan, "positions as rows: each stage is normalized in shared memory"};
}

}  // namespace kgopt
