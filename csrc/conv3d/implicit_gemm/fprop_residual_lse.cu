// Second pass of Conv + GroupNorm + tanh + hardswish + residual + logsumexp: the convolution again, normalized and
// reduced over channels in registers. Computing it twice costs less than storing and reading it.
#include "conv3d/implicit_gemm/launch.cuh"

namespace kgopt {

Status run_conv3d_residual_lse(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream) {
  return launch_conv<ConvEpilogue::kResidualLse>(p, n, stream);
}

}  // namespace kgopt
