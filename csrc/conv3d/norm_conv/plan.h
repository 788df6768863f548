// Which tensors the 1 x 1 convolution behind a norm takes, and its grid. Host code, free of CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pointwise/pointwise_params.h"

namespace kgopt {

inline constexpr int kNormConv1x1Threads = 128;
inline constexpr int kNormConv1x1Unroll = 4;  // neighbouring positions that a lane loads before it uses the first

// Why the kernel cannot run it; null when it can.
inline const char* norm_conv1x1_refusal(const NormConv1x1Params& p) {
  if (p.dtype == Dtype::kFloat64) return "float64";
  if (p.n < 1 || p.s < 1 || p.c < 1 || p.c_out < 1) return "a tensor has no elements";
  const int64_t size = 16 / dtype_size(p.dtype), lanes = p.c / size;
  if (p.c % size != 0 || lanes > 32 || (lanes & (lanes - 1)) != 0) return "channels are no power of 2 of vectors";
  if (p.c_out > 4) return "more than 4 output channels";
  return nullptr;
}

// Blocks of a sample, where it can run. Six or more fit on a multiprocessor; a few rounds each hide what loading the
// weights costs.
inline int norm_conv1x1_blocks(const NormConv1x1Params& p) {
  const int64_t lanes = p.c * dtype_size(p.dtype) / 16, positions = kNormConv1x1Threads / lanes * kNormConv1x1Unroll;
  const int64_t needed = (p.s + positions - 1) / positions;
  return static_cast<int>(std::min<int64_t>(needed, std::max<int64_t>(int64_t(p.sm_count) * 32 / p.n, 1)));
}

}  // namespace kgopt
