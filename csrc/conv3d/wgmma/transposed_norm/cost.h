// Whether the one launch beats cuDNN and a GroupNorm after it: predicted from its plan and measured rates.
#pragma once

#include <cmath>

#include "conv3d/wgmma/cost.h"
#include "conv3d/wgmma/transposed_norm/plan.h"

namespace kgopt {

inline constexpr double kBytesPerMicrosecond = 3.5e6;  // of a pass over memory

inline double transposed_norm_microseconds(const ConvProblem& q, const TransposedNormPlan& p) {
  const double steps = double(p.taps[0]) * p.taps[1] * p.taps[2] * p.chunks * (p.parts == 2 ? 3 : 1);
  const double rounds = std::ceil(double(p.tiles) / p.blocks);
  const double tile = steps * (kTransposedNormRowBytes / 32) * 2 * kWgmmaConsumers * p.columns / 2 + 3000;
  const double x_bytes = double(q.n) * (q.c_in * q.in[0] * q.in[1] * q.in[2] * dtype_size(q.dtype) + p.sample_bytes);
  // The passes that find the operands' ranges.
  const double ranges =
      p.scaled ? 15 + 4.0 * double(q.n) * q.c_in * q.in[0] * q.in[1] * q.in[2] / kBytesPerMicrosecond : 0;
  return ranges + 40 + rounds * tile / kCyclesPerMicrosecond + x_bytes / kBytesPerMicrosecond;
}

// Null where the kernel is to be taken, else why not. `forced`: wherever it is not mostly padding.
inline const char* transposed_norm_loses(const ConvProblem& q, const TransposedNormPlan& plan, bool forced) {
  if (plan.refusal) return plan.refusal;
  if (!q.planar) return "the output is not contiguous";
  if (q.c_out * 2 <= kTransposedNormChannels ||
      q.c_in * (plan.scaled ? 2 : dtype_size(q.dtype)) * 2 <= kTransposedNormRowBytes) {
    return "its tiles of channels would be mostly padding";
  }
  if (forced) return nullptr;
  double products = 2.0 * q.n * q.c_in * q.c_out;
  for (int i = 0; i < 3; ++i) products *= double(q.kernel[i]) * q.in[i];
  const double conv = plan.parts == 2 ? products / (kCudnnFp32Rate * 1e6) : cudnn_microseconds(q);
  const double y_bytes = double(q.n) * q.c_out * q.out[0] * q.out[1] * q.out[2] * dtype_size(q.dtype);
  // The transposes around cuDNN's kernels and the passes of relu and the norm.
  const double passes = 5 * y_bytes / kBytesPerMicrosecond + 15;
  return transposed_norm_microseconds(q, plan) < 0.97 * (conv + passes) ? nullptr : "cuDNN is predicted to be faster";
}

}  // namespace kgopt
