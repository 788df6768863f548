// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#include "conv3d/gradients/few_wgrad/few_wgrad.h"

#include "common/dependent_launch.cuh"
#include "common/launch.h"
#include "conv3d/gradients/few_wgrad/kernel.cuh"

namespace kgopt {
namespace {

template <ConvMath kMath, int kXTiles, int kDyTiles, bool kDyIsA>
Status launch_few_wgrad(const FewWgradParams& p, cudaStream_t stream) {
  const char* const name = "conv_few_wgrad_kernel";
  const dim3 grid(p.plan.blocks, p.plan.channel_blocks);
  const int threads = kFewWgradThreads, smem = p.plan.smem_bytes;
  if (p.plan.padding[2] > 0) {
    return launch_kernel<conv_few_wgrad_kernel<kMath, kXTiles, kDyTiles, kDyIsA, 1>>(name, p, grid, threads, smem,
                                                                                     stream);
  }
  return launch_kernel<conv_few_wgrad_kernel<kMath, kXTiles, kDyTiles, kDyIsA, 0>>(name, p, grid, threads, smem,
                                                                                   stream);
}

template <ConvMath kMath>
Status launch_few_wgrad_tiles(const FewWgradParams& p, cudaStream_t stream) {
  switch (p.plan.x_tiles * 10 + p.plan.dy_tiles) {
    case 22: return launch_few_wgrad<kMath, 2, 2, true>(p, stream);
    case 24: return launch_few_wgrad<kMath, 2, 4, true>(p, stream);
    case 32: return launch_few_wgrad<kMath, 3, 2, true>(p, stream);
    case 34: return launch_few_wgrad<kMath, 3, 4, true>(p, stream);
    case 43: return launch_few_wgrad<kMath, 4, 3, false>(p, stream);
    case 42: return launch_few_wgrad<kMath, 4, 2, true>(p, stream);
    case 52: return launch_few_wgrad<kMath, 5, 2, true>(p, stream);
  }
  return Status::Unsupported("conv_few_wgrad_kernel", "no instance for these tiles");
}

}  // namespace

Status run_conv_few_wgrad(const FewWgradParams& p, cudaStream_t stream) {
  if (p.plan.all_tiles == 0) return Status::Ok();
  Status status = p.plan.math == ConvMath::kTf32     ? launch_few_wgrad_tiles<ConvMath::kTf32>(p, stream)
                  : p.plan.math == ConvMath::kTf32x3 ? launch_few_wgrad_tiles<ConvMath::kTf32x3>(p, stream)
                  : p.plan.math == ConvMath::kBf16   ? launch_few_wgrad_tiles<ConvMath::kBf16>(p, stream)
                                                     : launch_few_wgrad_tiles<ConvMath::kFp16>(p, stream);
  if (!status.ok()) return status;
  const unsigned blocks = few_wgrad_floats(p.plan) / 32 * p.plan.channel_blocks;
  return launch_after<conv_few_wgrad_sum_kernel>(true, "conv_few_wgrad_sum_kernel", blocks,
                                                 kFewWgradSumLanes * kFewWgradSumShares, stream, p);
}

}  // namespace kgopt
