// From a plan's numbers to a template instance of the kernel.
#pragma once

#include <type_traits>

#include "common/host/launch.h"
#include "conv3d/depthwise/depthwise.h"
#include "conv3d/depthwise/kernel.cuh"

namespace kgopt {
namespace depthwise_detail {

inline constexpr char kName[] = "conv_depthwise_kernel";

// launch(integral_constant of 3, 5 or 7).
template <typename Launch>
Status with_width(const char* name, int kernel, Launch launch) {
  switch (kernel) {
    case 3: return launch(std::integral_constant<int, 3>());
    case 5: return launch(std::integral_constant<int, 5>());
    case 7: return launch(std::integral_constant<int, 7>());
    default: return Status::Unsupported(name, "no instance for this width of the kernel");
  }
}

template <int kLanes, DepthwiseMode kMode>
Status launch_mode(const DepthwiseParams& p, cudaStream_t stream) {
  const DepthwisePlan& plan = p.plan;
  return with_width(kName, plan.kernel, [&](auto kernel) {
    constexpr int kK = decltype(kernel)::value;
    const auto blocks = static_cast<unsigned>(plan.blocks);
    if (plan.volume) {
      constexpr auto kKernel = conv_depthwise_kernel<kLanes, kMode, kK, true>;
      return launch_after<kKernel>(p.early, kName, dim3(blocks), plan.threads, plan.smem_bytes, stream, p);
    }
    if constexpr (kK < 7 || kMode == DepthwiseMode::kGather1) {
      constexpr auto kKernel = conv_depthwise_kernel<kLanes, kMode, kK, false>;
      return launch_after<kKernel>(p.early, kName, dim3(blocks), plan.threads, plan.smem_bytes, stream, p);
    } else {
      return Status::Unsupported(kName, "no instance for this width of the kernel at stride 2");
    }
  });
}

template <int kLanes>
Status launch_pass(const DepthwiseParams& p, cudaStream_t stream) {
  if (p.plan.direct && p.y_log2 < depthwise_whole_log2(p.dtype)) {
    return Status::Invalid(kName, "rows of y are not aligned to 16 bytes");
  }
  switch (p.plan.mode) {
    case DepthwiseMode::kGather1: return launch_mode<kLanes, DepthwiseMode::kGather1>(p, stream);
    case DepthwiseMode::kGather2: return launch_mode<kLanes, DepthwiseMode::kGather2>(p, stream);
    default: return launch_mode<kLanes, DepthwiseMode::kScatter2>(p, stream);
  }
}

}  // namespace depthwise_detail
}  // namespace kgopt
