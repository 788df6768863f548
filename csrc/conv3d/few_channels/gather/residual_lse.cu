// A convolution of few channels, normalized and reduced over channels in registers: see
// conv3d/implicit_gemm/fprop_residual_lse.cu.
#include "conv3d/few_channels/gather/launch.cuh"

namespace kgopt {

Status run_conv_gather_residual_lse(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_gather<ConvEpilogue::kResidualLse>(p, n, stream);
}

}  // namespace kgopt
