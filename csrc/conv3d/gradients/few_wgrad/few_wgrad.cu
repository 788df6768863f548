// The weight gradient of a dy that is read, and the sums of both kinds.
#include "conv3d/gradients/few_wgrad/few_wgrad.h"

#include "conv3d/gradients/few_wgrad/launch.cuh"
#include "conv3d/gradients/few_wgrad/sum.cuh"

namespace kgopt {

Status run_conv_few_wgrad(const FewWgradParams& p, cudaStream_t stream) {
  if (p.plan.all_tiles == 0) return Status::Ok();
  const Status status =
      p.plan.makes_dy ? launch_conv_few_wgrad_making(p, stream) : launch_few_wgrad_math<false>(p, stream);
  if (!status.ok() || p.more) return status;
  const unsigned blocks = few_wgrad_floats(p.plan) / 32 * p.plan.channel_blocks;
  return launch_after<conv_few_wgrad_sum_kernel>(true, "conv_few_wgrad_sum_kernel", blocks,
                                                 kFewWgradSumLanes * kFewWgradSumShares, stream, p);
}

}  // namespace kgopt
