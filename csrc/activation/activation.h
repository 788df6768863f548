#pragma once

#include <cuda_runtime_api.h>

#include "activation/activation_params.h"

namespace kgopt {

Status run_activation(const ActivationParams& p, cudaStream_t stream);
Status run_activation_backward(const ActivationParams& p, cudaStream_t stream);

}  // namespace kgopt
