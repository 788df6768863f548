// Statistics of a 2D convolution of few channels from its input's autocorrelation: from the plan's numbers to template
// instances.
#include "conv3d/few_channels/autocorrelation/autocorrelation.h"

#include "common/device/dependent_launch.cuh"
#include "conv3d/few_channels/autocorrelation/kernel.cuh"

namespace kgopt {
namespace {

template <typename Element, bool kVectors>
Status launch_instance(const AutocorrelationParams& p, int64_t n, cudaStream_t stream) {
  constexpr auto kernel = conv_autocorrelation_kernel<Element, kVectors>;
  const dim3 grid(static_cast<unsigned>(n * p.plan.slices));
  const Status status = launch_after<kernel>(false, "conv_autocorrelation_kernel", grid, kAutocorrelationThreads,
                                             p.plan.smem_bytes, stream, p);
  if (!status.ok() || p.plan.slices == 1) return status;
  constexpr auto finish = conv_autocorrelation_finish_kernel<Element>;
  return launch_after<finish>(true, "conv_autocorrelation_finish_kernel", dim3(static_cast<unsigned>(n)),
                              kAutocorrelationThreads, p.plan.finish_smem_bytes, stream, p);
}

template <typename Element>
Status launch(const AutocorrelationParams& p, int64_t n, cudaStream_t stream) {
  return p.vectors ? launch_instance<Element, true>(p, n, stream) : launch_instance<Element, false>(p, n, stream);
}

}  // namespace

Status run_conv_autocorrelation(const AutocorrelationParams& p, int64_t n, cudaStream_t stream) {
  if (n == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch<float>(p, n, stream);
    case ConvMath::kBf16: return launch<__nv_bfloat16>(p, n, stream);
    case ConvMath::kFp16: return launch<__half>(p, n, stream);
    default: return Status::Unsupported("conv_autocorrelation_kernel", "no instance of fp32 accuracy");
  }
}

}  // namespace kgopt
