// A convolution that leaves the statistics of its output, and stores it where a tensor is given.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

Status run_conv3d_stats(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStoreStats>(p, n, stream);
}

}  // namespace kgopt
