// From tensors to the parameters of the depthwise kernels.
#pragma once

#include "conv3d/depthwise/depthwise.h"
#include "conv3d/depthwise/plan.h"

namespace kgopt {

// Strides in elements; a 2D convolution has depth 1.
struct DepthwiseTensor {
  void* data = nullptr;
  int64_t stride_n = 0, stride_c = 0, stride[3] = {};
};
struct DepthwiseWeight {
  void* data = nullptr;
  int64_t stride_c = 0, stride_k[3] = {};  // of a channel; of a tap
  Dtype dtype = Dtype::kFloat32;
};

// Elements of the innermost dim, up to 16 bytes, that can be accessed at once from every multiple of them on, as a
// power of two. Strides of a dim of size 1 may be anything.
inline int depthwise_log2(const DepthwiseTensor& t, int64_t n, int64_t channels, const int64_t (&size)[3], int lanes,
                          Dtype dtype) {
  if ((lanes > 1 ? t.stride_c : t.stride[2]) != 1) return 0;
  const auto fits = [&](int log2) {
    const int64_t vector = int64_t(1) << log2;
    const auto is_step = [&](int64_t of_size, int64_t stride) { return of_size == 1 || stride % vector == 0; };
    const bool whole = lanes > 1 ? channels % vector == 0 && is_step(size[2], t.stride[2])
                                 : size[2] % vector == 0 && is_step(channels, t.stride_c);
    return whole && is_step(n, t.stride_n) && is_step(size[0], t.stride[0]) && is_step(size[1], t.stride[1]) &&
           reinterpret_cast<uintptr_t>(t.data) % (vector * dtype_size(dtype)) == 0;
  };
  int log2 = depthwise_whole_log2(dtype);
  while (log2 > 0 && !fits(log2)) --log2;
  return log2;
}

// Whether kernels can read it as it lies: rows of a phase are less than 2^31 bytes apart.
inline bool depthwise_reads(const DepthwiseTensor& t, const int (&phases)[3]) {
  const auto is_near = [](int64_t stride) { return stride > -(int64_t(1) << 28) && stride < int64_t(1) << 28; };
  return is_near(t.stride[1] * phases[1]) && is_near(t.stride[2] * phases[2]);
}

// The part of a tensor that a phase has.
inline DepthwiseTensor part_of(DepthwiseTensor t, const DepthwisePass& s, const int64_t (&first)[3]) {
  int64_t offset = 0;
  for (int i = 0; i < 3; ++i) {
    offset += first[i] * t.stride[i];
    t.stride[i] *= s.apart[i];
  }
  t.data = static_cast<char*>(t.data) + offset * dtype_size(s.dtype);
  return t;
}

// A phase of the pass `of_dx` or the convolution: from x to y, or from dy to dx.
inline DepthwiseParams depthwise_params(const ConvProblem& q, bool of_dx, const DepthwisePlan& plan, int index,
                                        const DepthwiseTensor& whole_x, const DepthwiseTensor& whole_y,
                                        const DepthwiseWeight& weight, const void* bias) {
  const DepthwisePhase phase = depthwise_phase(depthwise_pass(q, of_dx), plan.phases, index);
  const DepthwisePass& s = phase.pass;
  const DepthwiseTensor x = part_of(whole_x, s, phase.in_first), y = part_of(whole_y, s, phase.out_first);
  DepthwiseParams p;
  p.plan = plan;
  cover(&p.plan, s);
  p.early = index > 0;
  p.x = x.data;
  p.x_stride_n = x.stride_n;
  p.x_stride_c = x.stride_c;
  p.y = y.data;
  p.y_stride_n = y.stride_n;
  p.y_stride_c = y.stride_c;
  p.w_stride_c = weight.stride_c;
  p.bias = bias;
  p.dtype = s.dtype;
  p.weight_dtype = weight.dtype;
  p.n = s.n;
  p.channels = static_cast<int>(s.channels);
  int64_t first = 0;
  for (int i = 0; i < 3; ++i) {
    p.x_stride[i] = x.stride[i];
    p.y_stride[i] = y.stride[i];
    p.in[i] = static_cast<int>(s.in[i]);
    p.out[i] = static_cast<int>(s.out[i]);
    const DepthwiseCells cells = depthwise_cells(s, i);
    p.cells[i] = static_cast<int>(cells.cells);
    p.lead[i] = static_cast<int>(cells.lead);
    p.skew[i] = static_cast<int>(cells.skew);
    p.w_stride_k[i] = s.flipped ? -weight.stride_k[i] : weight.stride_k[i];
    if (s.flipped) first += (s.kernel[i] - 1) * weight.stride_k[i];
  }
  p.weight = static_cast<const char*>(weight.data) + first * dtype_size(weight.dtype);
  p.x_log2 = depthwise_log2(x, s.n, s.channels, s.in, plan.lanes, s.dtype);
  p.y_log2 = depthwise_log2(y, s.n, s.channels, s.out, plan.lanes, s.dtype);
  return p;
}

inline DepthwiseWgradParams depthwise_wgrad_params(const ConvProblem& q, const DepthwiseWgradPlan& plan, int index,
                                                   const DepthwiseTensor& x, const DepthwiseTensor& dy,
                                                   const DepthwiseWeight& dw, float* partials) {
  const DepthwisePhase phase = depthwise_phase(depthwise_wgrad_pass(q), plan.phases, index);
  const DepthwisePass& s = phase.pass;
  const DepthwiseTensor still = part_of(q.transposed ? x : dy, s, phase.out_first);
  const DepthwiseTensor moved = part_of(q.transposed ? dy : x, s, phase.in_first);
  DepthwiseWgradParams p;
  p.plan = plan;
  cover(&p.plan, s);
  p.early = index > 0;
  p.still = still.data;
  p.still_stride_n = still.stride_n;
  p.still_stride_c = still.stride_c;
  p.moved = moved.data;
  p.moved_stride_n = moved.stride_n;
  p.moved_stride_c = moved.stride_c;
  p.dw = dw.data;
  p.dw_stride_c = dw.stride_c;
  p.partials = partials + index * plan.splits * plan.weights;
  p.dtype = s.dtype;
  p.dw_dtype = dw.dtype;
  p.n = s.n;
  p.channels = static_cast<int>(s.channels);
  for (int i = 0; i < 3; ++i) {
    p.still_stride[i] = still.stride[i];
    p.moved_stride[i] = moved.stride[i];
    p.dw_stride_k[i] = dw.stride_k[i];
    p.size[i] = static_cast<int>(s.out[i]);
    p.moved_size[i] = static_cast<int>(s.in[i]);
    p.kernel[i] = static_cast<int>(s.kernel[i]);
    p.stride[i] = static_cast<int>(s.stride[i]);
    p.padding[i] = static_cast<int>(s.padding[i]);
  }
  p.still_log2 = depthwise_log2(still, s.n, s.channels, s.out, plan.lanes, s.dtype);
  p.moved_log2 = depthwise_log2(moved, s.n, s.channels, s.in, plan.lanes, s.dtype);
  return p;
}

}  // namespace kgopt
