// Which convolutions these kernels take. Plain arithmetic without CUDA or torch.
#pragma once

#include <algorithm>

#include "common/refusal.h"
#include "conv3d/gradients/head/params.h"
#include "conv3d/problem.h"

namespace kgopt {

inline constexpr int kHeadBatch = 4;  // rows that a thread loads before it uses the first
inline constexpr int kHeadBlocksPerSm = 4;

inline HeadGradientPlan plan_head_gradient(const ConvProblem& q, const DeviceLimits& limits) {
  HeadGradientPlan plan;
  const auto refuse = refused<HeadGradientPlan>;
  if (q.is_empty()) return refuse(kEmptyProblem);
  if (q.dtype == Dtype::kFloat64) return refuse("float64 is summed in float64");
  if (q.transposed || q.groups != 1) return refuse("it is transposed, or has groups");
  plan.rows = q.n;
  for (int i = 0; i < 3; ++i) {
    if (q.kernel[i] != 1 || q.stride[i] != 1 || q.padding[i] != 0) return refuse("the kernel is not 1 x 1 at stride 1");
    plan.rows *= q.out[i];
  }
  if (q.planar || !q.channels_innermost) return refuse("x has no whole 16-byte pieces of channels");
  const int64_t vectors = q.c_in * dtype_size(q.dtype) / 16;
  if (q.c_out > kHeadMaxOutputs || vectors > kHeadThreads) return refuse("it has over 8 outputs, or very many inputs");
  if (plan.rows < kHeadLeastRows) return refuse("x is small");
  plan.c_in = static_cast<int>(q.c_in);
  plan.c_out = static_cast<int>(q.c_out);
  plan.outputs = plan.c_out <= 2 ? 2 : plan.c_out <= 4 ? 4 : 8;
  const int64_t of_block = kHeadThreads / vectors * kHeadBatch;
  plan.blocks = static_cast<int>(
      std::min<int64_t>(int64_t(limits.sm_count) * kHeadBlocksPerSm, (plan.rows + of_block - 1) / of_block));
  plan.partial_floats = int64_t(plan.blocks) * plan.c_out * plan.c_in;
  return plan;
}

}  // namespace kgopt
