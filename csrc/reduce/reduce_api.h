// The CUDA reductions as C++ functions, for the fused pipelines.
#pragma once

#include "../common/torch_utils.h"

namespace kgopt {

Tensor logsumexp_cuda(Tensor x, IntArray dim, bool keepdim);

}  // namespace kgopt
