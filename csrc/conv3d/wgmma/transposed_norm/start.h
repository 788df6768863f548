// From a transposed convolution's operands to the parameters of the kernels that do it with its norm in one launch.
#pragma once

#include "conv3d/operands.h"
#include "conv3d/wgmma/transposed_norm/transposed_norm.h"

namespace kgopt {

// Where the copy of x lies: in the output where that is written last; only the last samples', whose place the output
// takes before they are read, in the workspace.
struct TransposedNormSpace {
  int64_t y_sample;  // bytes
  // Samples in the workspace. A tile waits until the copies under its sample have been read: with two, those of the
  // sample before the last at most, long done but for the last samples; one would stall blocks that run ahead, and pays
  // only where a copy holds two terms a value.
  int x_ahead;
  bool x_in_y;
  int64_t split;      // the first sample in the workspace
  int64_t x_in_y_at;  // from this byte of the output on

  TransposedNormSpace(const ConvOperands& o, const TransposedNormPlan& plan)
      : y_sample(o.c_out * o.out[0] * o.out[1] * o.out[2] * dtype_size(o.dtype)),
        x_ahead(plan.parts == 2 ? 1 : 2),
        x_in_y(o.n > 2 && y_sample >= plan.sample_bytes + 128),
        split(x_in_y ? o.n - x_ahead : 0),
        x_in_y_at((o.n * y_sample - split * plan.sample_bytes) / 128 * 128) {}
  int64_t copy_bytes(const ConvOperands& o, const TransposedNormPlan& plan) const {
    return (o.n - split) * plan.sample_bytes;
  }
};

inline int64_t transposed_norm_bias_bytes(const TransposedNormPlan& plan) {
  return int64_t(plan.m_tiles) * kTransposedNormChannels * 4;
}

// Lays out x and the weights, and describes x's copies; `packed`, `bias`, `arrived` and `copy` are pieces of the
// workspace. `scaled`: of scaled operands, whose weight in `o` is the fp16 one. The norm is left to the caller.
inline Status start_transposed_norm(const ConvOperands& o, const TransposedNormPlan& plan,
                                    const TransposedNormSpace& space, void* y, void* packed, float* bias,
                                    uint32_t* arrived, void* copy, const ScaledHalfParams* scaled,
                                    TransposedNormParams* p, cudaStream_t stream) {
  TransposedNormPackParams pack{};
  set_packed_weight(&pack, o);
  pack.packed = packed;
  pack.packed_bias = bias;
  pack.arrived = arrived;
  pack.n = static_cast<int>(o.n);
  pack.dtype = plan.scaled ? Dtype::kFloat16 : o.dtype;
  pack.bias_dtype = o.dtype;
  pack.plan = plan;

  TransposedNormInputParams in{};
  in.x = o.x;
  in.largest = scaled ? scaled->largest : nullptr;
  in.stride_n = o.x_stride_n;
  in.stride_c = o.x_stride_c;
  std::copy(o.x_stride, o.x_stride + 3, in.stride);
  in.copy = static_cast<char*>(y) + space.x_in_y_at;
  in.tail_copy = copy;
  in.x_split = static_cast<int>(space.split);
  in.n = pack.n;
  in.c_in = pack.c_in;
  in.dtype = o.dtype;
  in.plan = plan;
  if (const Status status = run_conv_transposed_norm_prepare(in, pack, scaled, stream); !status.ok()) {
    return status;
  }

  *p = {};
  p->packed = packed;
  p->bias = bias;
  p->factors = scaled ? scaled->factors : nullptr;
  p->y = p->z = y;
  p->arrived = arrived;
  p->n = pack.n;
  p->c_out = pack.c_out;
  p->x_split = in.x_split;
  p->x_in_y = space.x_in_y;
  p->x_in_y_at = space.x_in_y_at;
  p->x_ahead = space.x_ahead;
  p->relu = true;
  p->plan = plan;
  return Status::Ok();
}

}  // namespace kgopt
