// From a convolution's operands to the parameters of the implicit GEMM and of the packing in front of it.
#pragma once

#include "conv3d/implicit_gemm/implicit_gemm.h"
#include "conv3d/operands.h"

namespace kgopt {

// Bytes of the packed weights and of the packed bias.
inline int64_t packed_weight_bytes(const ImplicitGemmPlan& plan) { return plan.packed_words * 4; }
inline int64_t packed_bias_bytes(const ConvOperands& o, const ImplicitGemmPlan& plan) {
  return o.groups * plan.n_tiles * plan.nb * 8 * 4;
}

// y, and what is done to it, is left to the caller.
inline ImplicitGemmParams implicit_gemm_params(const ConvOperands& o, const ImplicitGemmPlan& plan) {
  ImplicitGemmParams p{};
  set_input(&p, o);
  p.c_out_total = static_cast<int>(o.c_out);
  p.x_pair_load = has_channel_pairs(p, o.dtype);
  p.plan = plan;
  return p;
}

// Packs weights and bias where `p` then finds them.
inline Status pack_implicit_gemm(const ConvOperands& o, ImplicitGemmParams* p, uint32_t* packed, float* bias,
                                 cudaStream_t stream) {
  ImplicitGemmPackParams pack{};
  set_packed_weight(&pack, o);
  pack.groups = static_cast<int>(o.groups);
  pack.stride_group = o.w_stride_group;
  pack.dtype = o.dtype;
  pack.plan = p->plan;
  pack.packed = packed;
  pack.packed_bias = bias;
  p->packed_weight = packed;
  p->bias = bias;
  return run_conv_pack(pack, stream);
}

}  // namespace kgopt
