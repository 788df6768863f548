// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#include "conv3d/gradients/few_dgrad/few_dgrad.h"

#include "common/launch.h"
#include "conv3d/gradients/few_dgrad/kernel.cuh"

namespace kgopt {
namespace {

template <ConvMath kMath>
Status launch_few_dgrad(const FewDgradParams& p, cudaStream_t stream) {
  const char* const name = "conv_few_dgrad_kernel";
  const int threads = kFewDgradThreads, smem = p.plan.smem_bytes;
  if (p.plan.row_tiles == 1) {
    return launch_kernel<conv_few_dgrad_kernel<kMath, 1, 4>>(name, p, p.plan.blocks, threads, smem, stream);
  }
  return launch_kernel<conv_few_dgrad_kernel<kMath, 2, 2>>(name, p, p.plan.blocks, threads, smem, stream);
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
