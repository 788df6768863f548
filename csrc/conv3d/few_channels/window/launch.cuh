// From the plan's numbers to a template instance of the window on gathered chunks.
#pragma once

#include <algorithm>

#include "common/host/launch.h"
#include "conv3d/few_channels/few_channels.h"
#include "conv3d/few_channels/window/kernel.cuh"

namespace kgopt {

template <ConvMath kMath, int kColumns, int kBlocks>
Status launch_window_instance(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  const FewChannelsPlan& plan = p.plan;
  constexpr auto kernel = conv_window_kernel<kMath, kColumns, kBlocks>;
  const dim3 grid(static_cast<unsigned>(std::min(n * plan.slices, plan.at_once)), plan.n_tiles, p.groups);
  return launch_kernel<kernel>("conv_window_kernel", p, grid, window_threads(kMath, kColumns, kBlocks), plan.smem_bytes,
                               stream);
}

template <ConvMath kMath, int kColumns>
Status launch_window_columns(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  switch (p.plan.blocks) {
    case 1: return launch_window_instance<kMath, kColumns, 1>(p, n, stream);
    case 2: return launch_window_instance<kMath, kColumns, 2>(p, n, stream);
    case 3: return launch_window_instance<kMath, kColumns, 3>(p, n, stream);
    default: return Status::Unsupported("conv_window_kernel", "no instance for this many products");
  }
}

template <ConvMath kMath>
Status launch_window_math(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return p.plan.columns == 24 ? launch_window_columns<kMath, 24>(p, n, stream)
                              : launch_window_columns<kMath, 32>(p, n, stream);
}

inline Status launch_window(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_window_math<ConvMath::kTf32>(p, n, stream);
    case ConvMath::kFp16x3: return launch_window_math<ConvMath::kFp16x3>(p, n, stream);
    case ConvMath::kBf16: return launch_window_math<ConvMath::kBf16>(p, n, stream);
    case ConvMath::kFp16: return launch_window_math<ConvMath::kFp16>(p, n, stream);
    default: return Status::Unsupported("conv_window_kernel", "no instance of 3xTF32");
  }
}

}  // namespace kgopt
