// Convolutions, regular or transposed, as implicit GEMMs. One file for all epilogues: their main loops are nearly the
// same code, which takes few bytes beside each other.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

// The output is stored.
Status run_conv3d(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStore>(p, n, stream);
}

// Leaves the statistics of the output, and stores it where a tensor is given.
Status run_conv3d_stats(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kStoreStats>(p, n, stream);
}

// Second pass of Conv + GroupNorm + tanh + hardswish + residual + logsumexp: the convolution again, normalized and
// reduced over channels in registers. Computing it twice costs less than storing and reading it.
Status run_conv3d_residual_lse(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kResidualLse>(p, n, stream);
}

}  // namespace kgopt
