// From a convolution's operands to the parameters of the kernel with taps as columns and of the packing in front of it.
#pragma once

#include "conv3d/operands.h"
#include "conv3d/wgmma/tap_columns/tap_columns.h"
#include "groupnorm/params.h"

namespace kgopt {

inline int64_t tap_columns_bias_bytes(const TapColumnsPlan& plan) { return int64_t(plan.n_tiles) * plan.c_tile * 4; }

// Packs weights and bias, sets `moments`, with slices and rows, to zero, and describes x. y and what is done to it are
// left to the caller.
inline Status start_tap_columns(const ConvOperands& o, const TapColumnsPlan& plan, void* packed, float* bias,
                                const StatsPartials& moments, TapColumnsParams* p, cudaStream_t stream) {
  TapColumnsPackParams pack{};
  set_packed_weight(&pack, o);
  pack.packed = packed;
  pack.packed_bias = bias;
  pack.plan = plan;
  pack.moments = static_cast<float*>(moments.data);
  pack.moment_values = moments.data ? o.n * moments.slices * moments.rows * 3 : 0;
  if (const Status status = run_conv_tap_columns_pack(pack, stream); !status.ok()) return status;

  *p = {};
  p->packed = packed;
  p->bias = bias;
  p->c_out = pack.c_out;
  for (int i = 0; i < 3; ++i) {
    p->in[i] = static_cast<int>(o.in[i]);
    p->out[i] = static_cast<int>(o.out[i]);
  }
  p->plan = plan;
  const int64_t stride_w = o.in[2] > 1 ? o.x_stride[2] : o.in[1] > 1 ? o.x_stride[1] : o.c_in;
  return set_tap_columns_input(p, o.x, o.n, o.c_in, stride_w, o.x_stride[0], o.x_stride_n);
}

}  // namespace kgopt
