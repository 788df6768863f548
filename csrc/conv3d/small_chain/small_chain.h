// Launcher of the kernel that does a small chain in one launch (code of compute capability 9.0 or later).
#pragma once

#include <cuda_runtime_api.h>

#include "conv3d/small_chain/params.h"

namespace kgopt {

// Unsupported where not all blocks of teams can run at a time; no kernel was launched then.
Status run_conv_chain(const ChainParams& p, cudaStream_t stream);

}  // namespace kgopt
