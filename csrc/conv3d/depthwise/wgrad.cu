// Gradients of depthwise convolutions' weights.
#include "conv3d/depthwise/wgrad.cuh"

#include <type_traits>

#include "common/host/launch.h"
#include "conv3d/depthwise/depthwise.h"

namespace kgopt {
namespace {

constexpr char kName[] = "conv_depthwise_wgrad_kernel";

template <int kLanes, int kStride, int kK>
Status launch_width(const DepthwiseWgradParams& p, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(p.plan.channel_blocks * p.plan.depth), static_cast<unsigned>(p.plan.splits));
  constexpr int kTaps = depthwise_wgrad_taps(kK, kStride);
  if (kTaps > 1 && p.plan.taps > 1) {
    constexpr auto kMarch = conv_depthwise_wgrad_kernel<kLanes, kStride, kK, kTaps>;
    return launch_after<kMarch>(p.early, kName, grid, p.plan.threads, p.plan.smem_bytes, stream, p);
  }
  constexpr auto kKernel = conv_depthwise_wgrad_kernel<kLanes, kStride, kK, 1>;
  return launch_after<kKernel>(p.early, kName, grid, p.plan.threads, p.plan.smem_bytes, stream, p);
}

template <int kLanes, int kStride>
Status launch_stride(const DepthwiseWgradParams& p, cudaStream_t stream) {
  switch (p.plan.kernel) {
    case 3: return launch_width<kLanes, kStride, 3>(p, stream);
    case 5: return launch_width<kLanes, kStride, 5>(p, stream);
    case 7: return launch_width<kLanes, kStride, 7>(p, stream);
    default: return Status::Unsupported(kName, "no instance for this width of the kernel");
  }
}

template <int kLanes>
Status launch_format(const DepthwiseWgradParams& p, cudaStream_t stream) {
  return p.plan.stride == 1 ? launch_stride<kLanes, 1>(p, stream) : launch_stride<kLanes, 2>(p, stream);
}

}  // namespace

Status run_conv_depthwise_wgrad(const DepthwiseWgradParams& p, cudaStream_t stream) {
  return p.plan.lanes > 1 ? launch_format<kDepthwiseLanes>(p, stream) : launch_format<1>(p, stream);
}

Status run_conv_depthwise_sum(const DepthwiseWgradParams& p, cudaStream_t stream) {
  constexpr int kWarps = kDepthwiseThreads / 32;
  const unsigned blocks = static_cast<unsigned>((p.plan.weights + kWarps - 1) / kWarps);
  return launch_after<conv_depthwise_sum_kernel>(true, "conv_depthwise_sum_kernel", blocks, kDepthwiseThreads, stream,
                                                 p);
}

}  // namespace kgopt
