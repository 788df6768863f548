// Launchers of the transposed convolution with its norm. Torch-free.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "conv3d/norm_conv/scaled_half_params.h"
#include "conv3d/wgmma/transposed_norm/params.h"

namespace kgopt {

// Weights as shared-memory images in the order in which tiles read them, and the bias in fp32. x with its channels
// innermost, rounded to TF32 or split into two such values, with zeros behind rows and planes.
// `scaled`: null, or what rounds the weights to fp16 before they are packed.
Status run_conv_transposed_norm_prepare(const TransposedNormInputParams& p, const TransposedNormPackParams& pack,
                                        const ScaledHalfParams* scaled, cudaStream_t stream);
// Describes the copies of x for the tensor copies.
Status set_transposed_norm_input(TransposedNormParams* p, const void* copy, const void* tail_copy);
Status run_conv_transposed_norm(const TransposedNormParams& p, cudaStream_t stream);

}  // namespace kgopt
