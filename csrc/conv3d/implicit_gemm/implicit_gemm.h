// Launchers of the convolution family. Each picks its instance once and returns a status.
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

// Weights (and bias) into the order in which the implicit GEMM reads them. Must run before any run_conv*.
Status run_conv_pack(const ImplicitGemmPackParams& p, cudaStream_t stream);

// y = act(conv(x) + bias), or of a transposed convolution: its plan has a class of output positions for each residue of
// the stride.
Status run_conv3d(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream);

// The same, and per-channel statistics of y in p.partials. Where p.y is null, nothing is stored, and the statistics are
// those of conv(x) + bias: all that Conv + GroupNorm + mean needs, and the first pass of Conv + GroupNorm + logsumexp.
Status run_conv3d_stats(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream);

// logsumexp over channels of c + hardswish(tanh(GroupNorm(c))), c = conv(x) + bias.
Status run_conv3d_residual_lse(const ImplicitGemmParams& p, int64_t n, cudaStream_t stream);

// Any shape, without tensor cores: fp64, and whatever plan_implicit_gemm refuses.
Status run_conv_direct(const ConvDirectParams& p, cudaStream_t stream);

}  // namespace kgopt
