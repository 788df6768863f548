// Transposed convolution whose epilogue also leaves the statistics that a following GroupNorm needs.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

Status run_conv_transpose3d_stats(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStoreStats>(p, n, stream);
}

}  // namespace kgopt
