// From a convolution's operands to the parameters of the kernel with positions as rows and of what is in front of it.
#pragma once

#include "conv3d/operands.h"
#include "conv3d/wgmma/position_rows/plan.h"
#include "conv3d/wgmma/position_rows/position_rows.h"

namespace kgopt {

inline int64_t position_rows_bias_bytes(const PositionRowsPlan& plan) {
  return int64_t(plan.m_tiles) * plan.segments * 64 * 4;
}

// Splits x into `copy` where the plan has two parts, packs weights and bias, and describes x or its copy. y and what is
// done to it are left to the caller.
inline Status start_position_rows(const ConvOperands& o, const PositionRowsPlan& plan, void* packed, float* bias,
                                  void* copy, PositionRowsParams* p, cudaStream_t stream) {
  if (plan.parts == 2) {
    PositionRowsSplitParams split{};
    split.x = o.x;
    split.stride_n = o.x_stride_n;
    split.stride_d = o.x_stride[0];
    split.stride_w = o.in[2] > 1 ? o.x_stride[2] : o.x_stride[1];
    split.copy = copy;
    split.n = o.n;
    split.c_in = static_cast<int>(o.c_in);
    for (int i = 0; i < 3; ++i) split.in[i] = static_cast<int>(o.in[i]);
    split.plan = plan;
    if (const Status status = run_conv_position_rows_split(split, stream); !status.ok()) return status;
  }
  PositionRowsPackParams pack{};
  set_packed_weight(&pack, o);
  pack.packed = packed;
  pack.packed_bias = bias;
  pack.plan = plan;
  if (const Status status = run_conv_position_rows_pack(pack, stream); !status.ok()) return status;

  *p = {};
  p->packed = packed;
  p->bias = bias;
  p->c_out = pack.c_out;
  for (int i = 0; i < 3; ++i) {
    p->in[i] = static_cast<int>(o.in[i]);
    p->out[i] = static_cast<int>(o.out[i]);
  }
  p->plan = plan;
  if (plan.parts == 2) {
    const int64_t channels = 2 * position_rows_part_channels(plan), row = o.in[2] * channels, plane = o.in[1] * row;
    const int64_t strides[4] = {channels, row, plane, o.in[0] * plane};
    return set_position_rows_input(p, copy, o.n, channels, strides);
  }
  const int64_t strides[4] = {o.x_stride[2], o.x_stride[1], o.x_stride[0], o.x_stride_n};
  return set_position_rows_input(p, o.x, o.n, o.c_in, strides);
}

}  // namespace kgopt
