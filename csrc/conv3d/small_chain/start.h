// From a convolution's operands to the parameters of the kernel for small chains.
#pragma once

#include "conv3d/operands.h"
#include "conv3d/small_chain/small_chain.h"

namespace kgopt {

// The norm, the results and the workspace are left to the caller.
inline ChainParams chain_params(const ConvOperands& o, const ChainPlan& plan) {
  ChainParams p{};
  set_input(&p, o);
  set_weight(&p, o);
  p.dtype = o.dtype;
  p.n = o.n;
  for (int i = 0; i < 3; ++i) {
    p.kernel[i] = static_cast<int>(o.kernel[i]);
    p.step[i] = static_cast<int>(o.stride[i]);
    p.padding[i] = static_cast<int>(o.padding[i]);
    p.dilation[i] = static_cast<int>(o.dilation[i]);
  }
  p.plan = plan;
  return p;
}

}  // namespace kgopt
