// From the plan's numbers to a template instance of the kernel with channels as rows.
#pragma once

#include "../common/launch.h"
#include "conv3d_narrow.h"
#include "conv3d_narrow_channels.cuh"

namespace kgopt {

template <ConvMath kMath, int kSteps, int kPositions, ConvEpilogue kEpilogue>
Status launch_channels_instance(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  const NarrowPlan& plan = p.plan;
  constexpr auto kernel = conv_narrow_channels_kernel<kMath, kSteps, kPositions, kEpilogue>;
  const dim3 grid(static_cast<unsigned>(n * plan.slices), plan.n_tiles, p.groups);
  return launch_kernel<kernel>("conv_narrow_channels_kernel", p, grid, 128 * (plan.producers + plan.consumers),
                               plan.smem_bytes, stream);
}

template <ConvMath kMath, ConvEpilogue kEpilogue>
Status launch_channels_math(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  const bool wide = p.plan.strip == 64;
  switch (p.plan.k_steps) {
    case kNarrowSplitSteps:
      return wide ? launch_channels_instance<kMath, kNarrowSplitSteps, 64, kEpilogue>(p, n, stream)
                  : launch_channels_instance<kMath, kNarrowSplitSteps, 32, kEpilogue>(p, n, stream);
    case kNarrowChannelSteps:
      if constexpr (kMath != ConvMath::kFp16x3) {
        return wide ? launch_channels_instance<kMath, kNarrowChannelSteps, 64, kEpilogue>(p, n, stream)
                    : launch_channels_instance<kMath, kNarrowChannelSteps, 32, kEpilogue>(p, n, stream);
      }
      break;
  }
  return Status::Unsupported("conv_narrow_channels_kernel", "no instance for this many products");
}

template <ConvEpilogue kEpilogue>
Status launch_channels(const NarrowParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_channels_math<ConvMath::kTf32, kEpilogue>(p, n, stream);
    case ConvMath::kBf16: return launch_channels_math<ConvMath::kBf16, kEpilogue>(p, n, stream);
    case ConvMath::kFp16: return launch_channels_math<ConvMath::kFp16, kEpilogue>(p, n, stream);
    case ConvMath::kFp16x3: return launch_channels_math<ConvMath::kFp16x3, kEpilogue>(p, n, stream);
    default: return Status::Unsupported("conv_narrow_channels_kernel", "no instance of 3xTF32");
  }
}

}  // namespace kgopt
