// From the plan's numbers to a template instance of the kernel with positions as rows.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "conv3d/few_channels/few_channels.h"
#include "conv3d/few_channels/positions/kernel.cuh"

namespace kgopt {

template <ConvMath kMath, int kSteps, bool kLse>
Status launch_positions_instance(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  const FewChannelsPlan& plan = p.plan;
  constexpr auto kernel = conv_positions_kernel<kMath, kSteps, kLse>;
  const dim3 grid(static_cast<unsigned>(n * plan.slices), plan.n_tiles, p.groups);
  return launch_after<kernel>(kLse || p.stats.only, "conv_positions_kernel", grid, position_threads(kLse),
                              plan.smem_bytes, stream, p);
}

template <ConvMath kMath, bool kLse>
Status launch_positions_steps(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  switch (p.plan.k_steps) {
    case kPositionSteps: return launch_positions_instance<kMath, kPositionSteps, kLse>(p, n, stream);
    case kPositionMoreSteps: return launch_positions_instance<kMath, kPositionMoreSteps, kLse>(p, n, stream);
    default: return Status::Unsupported("conv_positions_kernel", "no instance for this many products");
  }
}

template <bool kLse>
Status launch_positions(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_positions_steps<ConvMath::kTf32, kLse>(p, n, stream);
    case ConvMath::kBf16: return launch_positions_steps<ConvMath::kBf16, kLse>(p, n, stream);
    case ConvMath::kFp16: return launch_positions_steps<ConvMath::kFp16, kLse>(p, n, stream);
    default: return Status::Unsupported("conv_positions_kernel", "no instance of fp32 accuracy");
  }
}

}  // namespace kgopt
