// Transposed convolution: the same implicit GEMM, one class of output positions per residue of the stride.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

Status run_conv_transpose3d(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStore, true>(p, n, stream);
}

}  // namespace kgopt
