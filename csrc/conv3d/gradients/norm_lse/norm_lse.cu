// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#include "conv3d/gradients/norm_lse/norm_lse.h"

#include "conv3d/gradients/norm_lse/kernel.cuh"

namespace kgopt {
namespace {

template <ConvMath kMath, NormLsePass kPass>
Status launch_norm_lse(const ConvNormLseParams& p, cudaStream_t stream) {
  const FewChannelsPlan& plan = p.conv.plan;
  const char* const name = "conv_norm_lse_kernel";
  const dim3 grid(static_cast<unsigned>(p.conv.n * plan.slices));
  // Up to 9 taps of 8 half channels are 5 steps.
  constexpr bool kSmallOnly = conv_is_scaled(kMath) || kPass == NormLsePass::kGradients;
  if constexpr (kSmallOnly) {
    if (plan.large_batch) return Status::Unsupported(name, "no instance of the larger batch");
    return launch_after<conv_norm_lse_kernel<kMath, false, kPass>>(false, name, grid, kNormLseThreads, plan.smem_bytes,
                                                                   stream, p);
  } else {
    return plan.large_batch ? launch_after<conv_norm_lse_kernel<kMath, true, kPass>>(false, name, grid, kNormLseThreads,
                                                                                     plan.smem_bytes, stream, p)
                            : launch_after<conv_norm_lse_kernel<kMath, false, kPass>>(
                                  false, name, grid, kNormLseThreads, plan.smem_bytes, stream, p);
  }
}

template <NormLsePass kPass>
Status launch(const ConvNormLseParams& p, cudaStream_t stream) {
  switch (p.conv.plan.math) {
    case ConvMath::kFp16x1: return launch_norm_lse<ConvMath::kFp16x1, kPass>(p, stream);
    case ConvMath::kBf16: return launch_norm_lse<ConvMath::kBf16, kPass>(p, stream);
    case ConvMath::kFp16: return launch_norm_lse<ConvMath::kFp16, kPass>(p, stream);
    case ConvMath::kFp16x3: return launch_norm_lse<ConvMath::kFp16x3, kPass>(p, stream);
    default: return Status::Unsupported("conv_norm_lse_kernel", "no instance of this kind of products");
  }
}

template <typename Element>
Status launch_borders(const ConvNormLseParams& p, unsigned planes, unsigned blocks, cudaStream_t stream) {
  return launch_after<norm_lse_dx_borders_kernel<Element>>(false, "norm_lse_dx_borders_kernel", dim3(planes, blocks),
                                                           kNormLseBorderThreads, 0, stream, p);
}

}  // namespace

Status run_norm_lse_dx_borders(const ConvNormLseParams& p, cudaStream_t stream) {
  const int64_t positions = norm_lse_shared_positions(p.conv);
  if (positions == 0) return Status::Ok();
  const unsigned planes = static_cast<unsigned>(p.conv.n * p.conv.out[0]);
  const unsigned blocks =
      static_cast<unsigned>(std::min<int64_t>((positions + kNormLseBorderThreads - 1) / kNormLseBorderThreads, 65535));
  switch (p.conv.plan.math) {
    case ConvMath::kBf16: return launch_borders<__nv_bfloat16>(p, planes, blocks, stream);
    case ConvMath::kFp16: return launch_borders<__half>(p, planes, blocks, stream);
    default: return launch_borders<float>(p, planes, blocks, stream);
  }
}

Status run_norm_lse_dweight(const ConvNormLseParams& p, cudaStream_t stream) {
  return launch_after<norm_lse_dweight_kernel>(false, "norm_lse_dweight_kernel",
                                               dim3((kNormLseDxColumns + 1) * kNormLseColumns / kNormLseSumLanes),
                                               kNormLseSumLanes * kNormLseSumShares, 0, stream, p);
}

Status run_conv_norm_lse_sums(const ConvNormLseParams& p, cudaStream_t stream) {
  return launch<NormLsePass::kSums>(p, stream);
}
Status run_conv_norm_lse_store(const ConvNormLseParams& p, cudaStream_t stream) {
  return launch<NormLsePass::kStore>(p, stream);
}
Status run_conv_norm_lse_gradients(const ConvNormLseParams& p, cudaStream_t stream) {
  return launch<NormLsePass::kGradients>(p, stream);
}

}  // namespace kgopt
