// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#include "conv3d/gradients/norm_lse/norm_lse.h"

#include "conv3d/gradients/norm_lse/kernel.cuh"

namespace kgopt {
namespace {

template <ConvMath kMath, bool kStore>
Status launch_norm_lse(const ConvNormLseParams& p, cudaStream_t stream) {
  const FewChannelsPlan& plan = p.conv.plan;
  const char* const name = "conv_norm_lse_kernel";
  const dim3 grid(static_cast<unsigned>(p.conv.n * plan.slices));
  if constexpr (kMath == ConvMath::kTf32x3) {  // which takes its steps one by one
    return launch_after<conv_norm_lse_kernel<kMath, true, kStore>>(false, name, grid, kNormLseThreads, plan.smem_bytes,
                                                                   stream, p);
  } else {
    return plan.large_batch ? launch_after<conv_norm_lse_kernel<kMath, true, kStore>>(
                                  false, name, grid, kNormLseThreads, plan.smem_bytes, stream, p)
                            : launch_after<conv_norm_lse_kernel<kMath, false, kStore>>(
                                  false, name, grid, kNormLseThreads, plan.smem_bytes, stream, p);
  }
}

template <bool kStore>
Status launch(const ConvNormLseParams& p, cudaStream_t stream) {
  switch (p.conv.plan.math) {
    case ConvMath::kTf32: return launch_norm_lse<ConvMath::kTf32, kStore>(p, stream);
    case ConvMath::kTf32x3: return launch_norm_lse<ConvMath::kTf32x3, kStore>(p, stream);
    case ConvMath::kBf16: return launch_norm_lse<ConvMath::kBf16, kStore>(p, stream);
    case ConvMath::kFp16: return launch_norm_lse<ConvMath::kFp16, kStore>(p, stream);
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

Status run_conv_norm_lse_sums(const ConvNormLseParams& p, cudaStream_t stream) { return launch<false>(p, stream); }
Status run_conv_norm_lse_store(const ConvNormLseParams& p, cudaStream_t stream) { return launch<true>(p, stream); }

}  // namespace kgopt
