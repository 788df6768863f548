// From the plan's numbers to a template instance of the kernels with channels as rows.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "common/host/launch.h"
#include "conv3d/few_channels/channels/kernel.cuh"
#include "conv3d/few_channels/channels/lse_kernel.cuh"
#include "conv3d/few_channels/few_channels.h"

namespace kgopt {

template <int kPositions, bool kLse>
Status launch_channels_instance(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  const FewChannelsPlan& plan = p.plan;
  const dim3 grid(static_cast<unsigned>(n * plan.slices), plan.n_tiles, p.groups);
  const int threads = 128 * (plan.producers + plan.consumers);
  if constexpr (kLse) {
    return launch_after<conv_channels_lse_kernel<kPositions>>(true, "conv_channels_lse_kernel", grid, threads,
                                                              plan.smem_bytes, stream, p);
  } else {
    return launch_kernel<conv_channels_kernel<kPositions>>("conv_channels_kernel", p, grid, threads, plan.smem_bytes,
                                                           stream);
  }
}

template <bool kLse>
Status launch_channels(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  if (p.plan.math != ConvMath::kFp16x3 || p.plan.k_steps != kChannelsSteps) {
    return Status::Unsupported("conv_channels_kernel", "no instance for this many products");
  }
  return p.plan.strip == 64 ? launch_channels_instance<64, kLse>(p, n, stream)
                            : launch_channels_instance<32, kLse>(p, n, stream);
}

}  // namespace kgopt
