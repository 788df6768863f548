// The CUDA reductions as C++ functions, for the fused pipelines.
#pragma once

#include "common/host/torch_utils.h"

namespace kgopt {

Tensor logsumexp_cuda(Tensor x, IntArray dim, bool keepdim);

// float32 values, dense in the order of `sizes`, in the half type of `like`. ATen's conversion takes the host twice as
// long, for a call by name.
Tensor rounded_cuda(const char* op, const void* values, const IntArray& sizes, const Tensor& like);

}  // namespace kgopt
