// Both gradients for few input channels behind a norm and a mean: from the plan's numbers to template instances.
#include "conv3d/gradients/few_march/few_march.h"

#include "common/device/dependent_launch.cuh"
#include "conv3d/gradients/few_march/kernel.cuh"

namespace kgopt {
namespace {

template <typename Element, int kInputs, int kTiles, bool kTerms = false>
Status launch_instance(const FewMarchParams& p, cudaStream_t stream) {
  constexpr auto kernel = conv_few_march_kernel<Element, kInputs, kTiles, kTerms>;
  return launch_after<kernel>(false, "conv_few_march_kernel", dim3(p.plan.blocks), kFewMarchThreads, p.plan.smem_bytes,
                              stream, p);
}

template <typename Element>
Status launch(const FewMarchParams& p, cudaStream_t stream) {
  if constexpr (sizeof(Element) == 4) {
    if (p.plan.terms) {
      return p.plan.tiles == 3 ? launch_instance<Element, 4, 3, true>(p, stream)
                               : launch_instance<Element, 4, 4, true>(p, stream);
    }
  }
  switch (p.plan.inputs * 10 + p.plan.tiles) {
    case 33: return launch_instance<Element, 3, 3>(p, stream);
    case 34: return launch_instance<Element, 3, 4>(p, stream);
    case 43: return launch_instance<Element, 4, 3>(p, stream);
    case 44: return launch_instance<Element, 4, 4>(p, stream);
    default: return Status::Unsupported("conv_few_march_kernel", "no instance for these channels");
  }
}

}  // namespace

Status run_conv_few_march(const FewMarchParams& p, cudaStream_t stream) {
  const Status status = p.dtype == Dtype::kFloat32    ? launch<float>(p, stream)
                        : p.dtype == Dtype::kBFloat16 ? launch<__nv_bfloat16>(p, stream)
                                                      : launch<__half>(p, stream);
  if (!status.ok()) return status;
  const unsigned blocks = few_march_floats(p.plan) / 32 + (p.dbias ? p.c_out : 0);
  return launch_after<conv_few_march_sum_kernel>(true, "conv_few_march_sum_kernel", blocks, kFewMarchSumShares * 32,
                                                 stream, p);
}

}  // namespace kgopt
