// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#include "conv3d/gradients/few_dgrad/few_dgrad.h"

#include "common/device/dependent_launch.cuh"
#include "conv3d/gradients/few_dgrad/kernel.cuh"

namespace kgopt {
namespace {

template <ConvMath kMath, int kRowTiles, int kUnits, bool kMarches>
Status launch_few_dgrad_instance(const FewDgradParams& p, cudaStream_t stream) {
  return launch_after<conv_few_dgrad_kernel<kMath, kRowTiles, kUnits, kMarches>>(
      p.early, "conv_few_dgrad_kernel", p.plan.blocks, kFewDgradThreads, p.plan.smem_bytes, stream, p);
}

template <ConvMath kMath>
Status launch_few_dgrad(const FewDgradParams& p, cudaStream_t stream) {
  if (p.plan.row_tiles == 1) {
    return p.plan.marches ? launch_few_dgrad_instance<kMath, 1, 4, true>(p, stream)
                          : launch_few_dgrad_instance<kMath, 1, 4, false>(p, stream);
  }
  if constexpr (kMath != ConvMath::kTf32x3) {
    if (p.plan.marches) return launch_few_dgrad_instance<kMath, 2, 2, true>(p, stream);
  }
  return launch_few_dgrad_instance<kMath, 2, 2, false>(p, stream);
}

}  // namespace

Status run_conv_few_dgrad(const FewDgradParams& p, cudaStream_t stream) {
  if (p.plan.all_tiles == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_few_dgrad<ConvMath::kTf32>(p, stream);
    case ConvMath::kTf32x3: return launch_few_dgrad<ConvMath::kTf32x3>(p, stream);
    case ConvMath::kBf16: return launch_few_dgrad<ConvMath::kBf16>(p, stream);
    default: return launch_few_dgrad<ConvMath::kFp16>(p, stream);
  }
}

}  // namespace kgopt
