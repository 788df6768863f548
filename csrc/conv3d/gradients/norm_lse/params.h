// The gradient of a convolution's output behind GroupNorm, tanh, hardswish, the residual and logsumexp over channels,
// from the convolution's input: its launch plan and its arguments.
#pragma once

#include <vector>

#include "conv3d/few_channels/params.h"
#include "conv3d/few_channels/plan.h"
#include "conv3d/gradients/few_dgrad/plan.h"
#include "conv3d/gradients/few_wgrad/plan.h"
#include "groupnorm/params.h"

namespace kgopt {

inline constexpr int kNormLseColumns = 64;  // channels, all of them in one block
inline constexpr int kNormLseProducers = 1, kNormLseConsumers = 3;
inline constexpr int kNormLseThreads = 128 * (kNormLseProducers + kNormLseConsumers);

// Passed by value as a __grid_constant__.
struct ConvNormLseParams {
  // `stored` is the gradient: rows of the width are dense, zeros fill them up to `row` elements.
  FewChannelsParams conv;
  int row;
  const float* dlse;              // [n, positions]
  GroupNormPassesBwdParams norm;  // the first pass writes its partial sums, the second reads its rows
};

// That of the kernel which stores the convolution, with the warps of a longer epilogue.
inline FewChannelsPlan plan_conv_norm_lse(ConvProblem q, const DeviceLimits& limits) {
  const auto refuse = refused<FewChannelsPlan>;
  if (q.groups != 1) return refuse("logsumexp over channels needs groups = 1");
  if (q.c_out <= kNormLseColumns / 2 || q.c_out > kNormLseColumns) return refuse("not 33 to 64 output channels");
  const ConvMath math = conv_math(q);
  q.epilogue = ConvEpilogue::kStore;
  q.allow_tf32 = true;
  FewChannelsPlan p = plan_few_channels(q, limits);
  if (p.refusal) return p;
  if (!p.chunked) return refuse("input channels that 16 bytes of a position do not divide");
  p.math = math;  // weights in two parts, where that is 3xTF32
  p.producers = kNormLseProducers, p.consumers = kNormLseConsumers;
  p.smem_bytes = few_channels_smem_layout(p).total * 4;
  while (p.smem_bytes > limits.smem_per_block && p.stages > 2) {
    --p.stages;
    p.smem_bytes = few_channels_smem_layout(p).total * 4;
  }
  return p.smem_bytes <= limits.smem_per_block ? p : refuse("a tile does not fit in shared memory");
}

// Plans of all the passes. The gradient of all samples is stored between them, in rows of made_row_elements, which both
// products copy in whole pieces.
struct NormLsePlans {
  FewChannelsPlan norm;
  FewWgradPlan dweight;
  FewDgradPlan dx;

  // mask: which of dx, dweight and dbias are wanted.
  const char* refusal(const std::vector<bool>& mask) const {
    if (norm.refusal) return norm.refusal;
    if ((mask[1] || mask[2]) && dweight.refusal) return dweight.refusal;
    return mask[0] ? dx.refusal : nullptr;
  }
};

inline NormLsePlans plan_norm_lse(const ConvProblem& q, const DeviceLimits& limits) {
  NormLsePlans plans{plan_conv_norm_lse(q, limits), plan_few_wgrad(q, limits),
                     plan_few_dgrad(q, limits, /*dy_is_made=*/true)};
  FewWgradPlan p = plans.dweight;
  if (p.refusal) return plans;
  const int size = q.dtype == Dtype::kFloat32 ? 4 : 2;
  p.dy_copy = few_copy(made_row_elements(q.out[2], size) * size, p.dy_pitch,
                       few_wgrad_channels(p) * p.tile[0] * p.tile[1], kFewWgradThreads);
  p.smem_bytes = few_wgrad_layout(p).total;
  if (p.smem_bytes <= limits.smem_per_block && p.blocks_per_sm * (p.smem_bytes + 1024) <= limits.smem_per_sm) {
    plans.dweight = p;
  }
  return plans;
}

}  // namespace kgopt
