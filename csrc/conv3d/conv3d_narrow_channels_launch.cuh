// From the plan's numbers to a template instance of the kernels with channels as rows.
#pragma once

#include "../common/dependent_launch.cuh"
#include "conv3d_narrow.h"
#include "conv3d_narrow_channels.cuh"
#include "conv3d_narrow_lse.cuh"

namespace kgopt {

template <ConvMath kMath, int kSteps, int kPositions, bool kLse>
Status launch_channels_instance(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  const NarrowPlan& plan = p.plan;
  const dim3 grid(static_cast<unsigned>(n * plan.slices), plan.n_tiles, p.groups);
  const int threads = 128 * (plan.producers + plan.consumers);
  if constexpr (kLse) {
    return launch_after<conv_narrow_lse_kernel<kMath, kSteps, kPositions>>(true, "conv_narrow_lse_kernel", grid,
                                                                           threads, plan.smem_bytes, stream, p);
  } else {
    return launch_after<conv_narrow_channels_kernel<kMath, kSteps, kPositions>>(
        p.stats.inexact != nullptr, "conv_narrow_channels_kernel", grid, threads, plan.smem_bytes, stream, p);
  }
}

template <ConvMath kMath, int kSteps, bool kLse>
Status launch_channels_steps(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  return p.plan.strip == 64 ? launch_channels_instance<kMath, kSteps, 64, kLse>(p, n, stream)
                            : launch_channels_instance<kMath, kSteps, 32, kLse>(p, n, stream);
}

template <ConvMath kMath, bool kLse>
Status launch_channels_math(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  switch (p.plan.k_steps) {
    case kNarrowSplitSteps: return launch_channels_steps<kMath, kNarrowSplitSteps, kLse>(p, n, stream);
    case kNarrowChannelSteps:
      if constexpr (kMath != ConvMath::kFp16x3) {
        return launch_channels_steps<kMath, kNarrowChannelSteps, kLse>(p, n, stream);
      }
      break;
  }
  return Status::Unsupported("conv_narrow_channels_kernel", "no instance for this many products");
}

template <bool kLse>
Status launch_channels(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_channels_math<ConvMath::kTf32, kLse>(p, n, stream);
    case ConvMath::kBf16: return launch_channels_math<ConvMath::kBf16, kLse>(p, n, stream);
    case ConvMath::kFp16: return launch_channels_math<ConvMath::kFp16, kLse>(p, n, stream);
    case ConvMath::kFp16x3: return launch_channels_math<ConvMath::kFp16x3, kLse>(p, n, stream);
    default: return Status::Unsupported("conv_narrow_channels_kernel", "no instance of 3xTF32");
  }
}

}  // namespace kgopt
