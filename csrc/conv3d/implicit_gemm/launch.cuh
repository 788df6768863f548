// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#pragma once

#include "common/host/launch.h"
#include "conv3d/implicit_gemm/implicit_gemm.h"
#include "conv3d/implicit_gemm/kernel.cuh"

namespace kgopt {

template <ConvMath kMath, int kMB, int kNB, ConvEpilogue kEpilogue>
Status launch_conv_instance(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  const ImplicitGemmPlan& plan = p.plan;
  constexpr auto kernel = conv_fprop_kernel<kMath, kMB, kNB, kEpilogue>;
  const dim3 grid(static_cast<unsigned>(n * plan.slices), plan.n_tiles,
                  plan.classes[0] * plan.classes[1] * plan.classes[2] * p.groups);
  return launch_kernel<kernel>("conv_fprop_kernel", p, grid, kConvThreads, plan.smem_bytes, stream);
}

template <ConvMath kMath, ConvEpilogue kEpilogue>
Status launch_conv_columns(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  switch (p.plan.nb) {
    case 1: return launch_conv_instance<kMath, 2, 1, kEpilogue>(p, n, stream);
    case 3: return launch_conv_instance<kMath, 2, 3, kEpilogue>(p, n, stream);
    case 4: return launch_conv_instance<kMath, 2, 4, kEpilogue>(p, n, stream);
    case 8: return launch_conv_instance<kMath, 2, 8, kEpilogue>(p, n, stream);
    case 16:
      if constexpr (kEpilogue == ConvEpilogue::kResidualLse) {
        return launch_conv_instance<kMath, 1, 16, kEpilogue>(p, n, stream);
      }
  }
  return Status::Unsupported("conv_fprop_kernel", "no instance for this number of output channel blocks");
}

template <ConvEpilogue kEpilogue>
Status launch_conv(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  int64_t span = 0;
  for (int i = 0; i < 3; ++i) span += (p.plan.halo[i] - 1) * (p.x_stride[i] < 0 ? -p.x_stride[i] : p.x_stride[i]);
  if (span >= int64_t(1) << 32) {
    return Status::Unsupported("conv_fprop_kernel", "the strides of x spread a tile over 2^32 elements");
  }
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_conv_columns<ConvMath::kTf32, kEpilogue>(p, n, stream);
    case ConvMath::kTf32x3: return launch_conv_columns<ConvMath::kTf32x3, kEpilogue>(p, n, stream);
    case ConvMath::kBf16: return launch_conv_columns<ConvMath::kBf16, kEpilogue>(p, n, stream);
    default: return launch_conv_columns<ConvMath::kFp16, kEpilogue>(p, n, stream);
  }
}

}  // namespace kgopt
