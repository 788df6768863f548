// From the plan's numbers to a template instance: the one place where run time becomes compile time.
#pragma once

#include "common/device/dependent_launch.cuh"
#include "conv3d/few_channels/few_channels.h"
#include "conv3d/few_channels/gather/kernel.cuh"

namespace kgopt {

template <ConvMath kMath, int kColumns, int kWindow, bool kChunked, bool kLargeBatch, ConvEpilogue kEpilogue>
Status launch_gather_instance(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  const FewChannelsPlan& plan = p.plan;
  constexpr auto kernel = conv_gather_kernel<kMath, kColumns, kWindow, kChunked, kLargeBatch, kEpilogue>;
  const dim3 grid(static_cast<unsigned>(n * plan.slices), plan.n_tiles, p.groups);
  // The table of the norm is all that logsumexp waits for.
  return launch_after<kernel>(kEpilogue == ConvEpilogue::kResidualLse, "conv_gather_kernel", grid,
                              128 * (plan.producers + plan.consumers), plan.smem_bytes, stream, p);
}

template <ConvMath kMath, int kColumns, bool kLargeBatch, ConvEpilogue kEpilogue>
Status launch_gather_window(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if constexpr (kColumns <= 32 && kEpilogue == ConvEpilogue::kStats) {
    if (p.plan.window > 1) {
      return launch_gather_instance<kMath, kColumns, kWindowRows, false, kLargeBatch, kEpilogue>(p, n, stream);
    }
  }
  if (p.plan.chunked) return launch_gather_instance<kMath, kColumns, 1, true, kLargeBatch, kEpilogue>(p, n, stream);
  return launch_gather_instance<kMath, kColumns, 1, false, kLargeBatch, kEpilogue>(p, n, stream);
}

template <ConvMath kMath, int kColumns, ConvEpilogue kEpilogue>
Status launch_gather_batch(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if constexpr (few_channels_has_large_batch(kMath, kColumns)) {
    if (p.plan.large_batch) return launch_gather_window<kMath, kColumns, true, kEpilogue>(p, n, stream);
  }
  return launch_gather_window<kMath, kColumns, false, kEpilogue>(p, n, stream);
}

template <ConvMath kMath, ConvEpilogue kEpilogue>
Status launch_gather_columns(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  switch (p.plan.columns) {
    case 24: return launch_gather_batch<kMath, 24, kEpilogue>(p, n, stream);
    case 32: return launch_gather_batch<kMath, 32, kEpilogue>(p, n, stream);
    case 64: return launch_gather_batch<kMath, 64, kEpilogue>(p, n, stream);
    case 128:
      if constexpr (kEpilogue == ConvEpilogue::kResidualLse) {
        return launch_gather_batch<kMath, 128, kEpilogue>(p, n, stream);
      }
  }
  return Status::Unsupported("conv_gather_kernel", "no instance for this number of output channels");
}

template <ConvEpilogue kEpilogue>
Status launch_gather(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  if (n * p.plan.slices == 0) return Status::Ok();
  switch (p.plan.math) {
    case ConvMath::kTf32: return launch_gather_columns<ConvMath::kTf32, kEpilogue>(p, n, stream);
    case ConvMath::kTf32x3:
      if constexpr (kEpilogue == ConvEpilogue::kStats) {
        return launch_gather_columns<ConvMath::kTf32x3, kEpilogue>(p, n, stream);
      }
      return Status::Unsupported("conv_gather_kernel", "no instance of this epilogue without TF32");
    case ConvMath::kBf16: return launch_gather_columns<ConvMath::kBf16, kEpilogue>(p, n, stream);
    default: return launch_gather_columns<ConvMath::kFp16, kEpilogue>(p, n, stream);
  }
}

}  // namespace kgopt
