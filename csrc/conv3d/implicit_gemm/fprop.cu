// Convolution, regular or transposed: implicit GEMM with the storing epilogue.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

Status run_conv3d(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStore>(p, n, stream);
}

}  // namespace kgopt
