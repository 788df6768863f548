// The input gradient of convolutions with few input channels, of contiguous tensors: its launch plan and its arguments.
// dx[c][p] = sum over co and taps of w[co][c][tap] * dy[co][p + padding - tap]. Sizes, strides and offsets are in
// elements unless said; dims are ordered depth, height, width.
#pragma once

#include <cstdint>

#include "conv3d/gradients/few_channels.h"
#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

inline constexpr int kFewDgradWarps = 8;
inline constexpr int kFewDgradThreads = kFewDgradWarps * 32;
inline constexpr int kFewDgradUnit = 32;  // positions along the width: four tiles of 8 columns of products
inline constexpr int kFewDgradTaps = 3;   // of the width, at most
inline constexpr int kFewDgradStages = 3;
// At most. With fp32 accuracy the registers of two keep more of the many short sums under way.
KGOPT_HD constexpr int few_dgrad_blocks_per_sm(ConvMath math, int row_tiles) {
  return math == ConvMath::kTf32x3 && row_tiles == 1 ? 1 : 2;
}

// Plain numbers, computed on the host, inspectable without a GPU.
struct FewDgradPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  // Rows of the products are (tap of the width, channel of dx): of 16 of them, and units of a warp.
  int row_tiles = 1, units = 4;
  bool dy_is_made = false;  // by the kernel for dweight
  int kernel[3] = {1, 1, 1};
  int dilation[2] = {1, 1};
  int padding[3] = {0, 0, 0};
  int channels = 8;  // of dy in shared memory at a time
  int chunks = 1;    // of channels
  int parts = 1;     // of a weight: 2 with fp32 accuracy
  int k_steps = 1;   // of a chunk: 8 (TF32) or 16 (half) pairs of a channel and a tap of depth and height
  // A warp's units are neighbouring rows, so that it loads a row of dy once for the three taps of the height.
  bool marches = false;
  int tile[2] = {1, 1};
  int units_w = 1;  // of a row of dy
  int halo[2] = {1, 1};
  int pitch = 0, channel = 0;  // bytes in shared memory: from row to row, from channel to channel
  int scratch_channel = 0;     // words from channel to channel of the sums
  FewCopy dy_copy;
  int dx_vector = 1;       // elements of a row of dx that a thread stores at once
  int dx_across_log2 = 0;  // threads side by side along a row of dx
  int64_t tiles[2] = {1, 1};
  int64_t all_tiles = 1;  // of all samples
  int stages = kFewDgradStages;
  int stage_bytes = 0;
  int blocks_per_sm = 2;
  int blocks = 1;
  int smem_bytes = 0;
  double cycles = 0;  // estimated, of the whole launch
};

// What a part of a step of K is: 8 channels at a tap of depth and height, those of the height innermost. Marching, half
// types' two parts are of one tap of the height.
KGOPT_HD int few_dgrad_pair(const FewDgradPlan& p, int k_step, int part) {
  const int parts = conv_channels_per_word(p.math);
  if (!p.marches) return k_step * parts + part;
  return (k_step / p.kernel[1] * parts + part) * p.kernel[1] + k_step % p.kernel[1];
}

// Passed by value as a __grid_constant__.
struct FewDgradParams {
  const void* dy;
  const void* weight;
  void* dx;
  int64_t dy_stride_n, dy_stride_c, dy_stride[2];  // rows of the width are dense, here and in dx
  int64_t dx_stride_n, dx_stride_c, dx_stride[2];
  int64_t w_stride_out, w_stride_in, w_stride_k[3];
  int c_in, c_out;
  int in[3], out[3];
  bool early;  // the weight was there before the kernel ahead: this one may start beside it
  FewDgradPlan plan;
};

}  // namespace kgopt
