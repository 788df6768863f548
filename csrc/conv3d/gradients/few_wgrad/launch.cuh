// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "conv3d/gradients/few_wgrad/few_wgrad.h"
#include "conv3d/gradients/few_wgrad/kernel.cuh"

namespace kgopt {

template <bool kMakesDy, ConvMath kMath, int kXTiles, int kDyTiles, bool kDyIsA>
Status launch_few_wgrad(const FewWgradParams& p, cudaStream_t stream) {
  const char* const name = "conv_few_wgrad_kernel";
  const dim3 grid(p.plan.blocks, p.plan.channel_blocks);
  const int threads = kFewWgradThreads, smem = p.plan.smem_bytes;
  if (p.plan.padding[2] > 0) {
    constexpr auto kernel = conv_few_wgrad_kernel<kMath, kXTiles, kDyTiles, kDyIsA, 1, kMakesDy>;
    return launch_after<kernel>(p.early, name, grid, threads, smem, stream, p);
  }
  constexpr auto kernel = conv_few_wgrad_kernel<kMath, kXTiles, kDyTiles, kDyIsA, 0, kMakesDy>;
  return launch_after<kernel>(p.early, name, grid, threads, smem, stream, p);
}

template <bool kMakesDy, ConvMath kMath>
Status launch_few_wgrad_tiles(const FewWgradParams& p, cudaStream_t stream) {
  switch (p.plan.x_tiles * 10 + p.plan.dy_tiles) {
    case 22: return launch_few_wgrad<kMakesDy, kMath, 2, 2, true>(p, stream);
    case 24: return launch_few_wgrad<kMakesDy, kMath, 2, 4, true>(p, stream);
    case 32: return launch_few_wgrad<kMakesDy, kMath, 3, 2, true>(p, stream);
    case 34: return launch_few_wgrad<kMakesDy, kMath, 3, 4, true>(p, stream);
    case 43: return launch_few_wgrad<kMakesDy, kMath, 4, 3, false>(p, stream);
    case 42: return launch_few_wgrad<kMakesDy, kMath, 4, 2, true>(p, stream);
    case 52: return launch_few_wgrad<kMakesDy, kMath, 5, 2, true>(p, stream);
  }
  return Status::Unsupported("conv_few_wgrad_kernel", "no instance for these tiles");
}

template <bool kMakesDy>
Status launch_few_wgrad_math(const FewWgradParams& p, cudaStream_t stream) {
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_few_wgrad_tiles<kMakesDy, ConvMath::kTf32>(p, stream);
    case ConvMath::kTf32x3: return launch_few_wgrad_tiles<kMakesDy, ConvMath::kTf32x3>(p, stream);
    case ConvMath::kBf16: return launch_few_wgrad_tiles<kMakesDy, ConvMath::kBf16>(p, stream);
    default: return launch_few_wgrad_tiles<kMakesDy, ConvMath::kFp16>(p, stream);
  }
}

}  // namespace kgopt
