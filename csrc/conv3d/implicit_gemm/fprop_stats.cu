// Convolution that stores nothing but the statistics of its output: all that Conv + GroupNorm + mean needs, and the
// first pass of Conv + GroupNorm + logsumexp.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

Status run_conv3d_stats(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStats>(p, n, stream);
}

}  // namespace kgopt
