// Convolutions of few channels, gathered. One file for all epilogues: their main loops are nearly the same code, which
// takes few bytes beside each other.
#include "conv3d/few_channels/gather/launch.cuh"

namespace kgopt {

// The output is stored.
Status run_conv_gather_store(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_gather<ConvEpilogue::kStore>(p, n, stream);
}

// Statistics of the output, nothing stored: see run_conv3d_stats in conv3d/implicit_gemm/fprop.cu for who wants them.
Status run_conv_gather_stats(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_gather<ConvEpilogue::kStats>(p, n, stream);
}

// Normalized and reduced over channels in registers: see run_conv3d_residual_lse.
Status run_conv_gather_residual_lse(const FewChannelsParams& p, int64_t n, cudaStream_t stream) {
  return launch_gather<ConvEpilogue::kResidualLse>(p, n, stream);
}

}  // namespace kgopt
