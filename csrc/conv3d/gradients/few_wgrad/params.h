// The weight gradient of convolutions with few input channels, of contiguous tensors: its launch plan and its
// arguments. dw[co][c][tap] = sum over positions p of dy[co][p] * x[c][p * stride + tap - padding]; a "row" is one
// (c, tap of depth, tap of height), whose taps of the width are neighbours in a row of x. Sizes, strides and offsets
// are in elements unless said; dims are ordered depth, height, width.
#pragma once

#include <cstdint>

#include "conv3d/gradients/few_channels.h"
#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

inline constexpr int kFewWgradWarps = 8;
inline constexpr int kFewWgradThreads = kFewWgradWarps * 32;
// With fp32 accuracy a thread has both parts of its operands, in more registers than two blocks leave it.
KGOPT_HD constexpr int few_wgrad_blocks_per_sm(ConvMath math) { return math == ConvMath::kTf32x3 ? 1 : 2; }
inline constexpr int kFewWgradTaps = 3;      // of the width, at most
inline constexpr int kFewWgradUnit = 64;     // bytes of a row that a warp multiplies at once
inline constexpr int kFewWgradMaxRows = 40;  // of x
inline constexpr int kFewWgradMaxStages = 4;

// Plain numbers, computed on the host, inspectable without a GPU.
struct FewWgradPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  bool dy_is_a = false;    // rows of a product are channels of dy, columns rows of x; else the other way round
  int x_tiles = 1;         // of 8 rows of x
  int dy_tiles = 1;        // of 8 channels of dy that a warp has
  int splits = 1;          // warps side by side along channels of dy; the others share the positions
  int channel_blocks = 1;  // thread blocks along channels of dy
  int rows = 1;            // c_in times taps of depth and height
  // dy is not read: it is scale * (convolution of x) + offset, made in shared memory tile by tile. Steps of K of that
  // convolution, of two quads of taps.
  bool makes_dy = false;
  int k_steps = 0;
  // dx is given, too: a block marches along the depth over planes of dy, each with the rows that some rows of dx want
  // (a slab), and adds what each plane gives to planes of dx that are under way.
  int dx_rows = 0;                                // of a slab; 0: dx is not given
  int dx_planes = 0;                              // of a march
  int steps = 1;                                  // planes of dy of a march
  int dx_slots = 0;                               // planes of dx under way
  int dx_pitch = 0, dx_channel = 0, dx_slot = 0;  // words from row to row, channel to channel, plane to plane of them
  int dx_k_steps = 0;  // of the products that give dx: of 8 (TF32) or 16 channels and taps of the height
  int kernel[3] = {1, 1, 1};
  int step[3] = {1, 1, 1};
  int dilation[3] = {1, 1, 1};
  int padding[3] = {0, 0, 0};
  int tile[3] = {1, 1, 1};  // positions; tile[2] in whole units
  int halo[2] = {1, 1};     // planes and rows of x of a tile
  int margin[2] = {0, 0};   // elements of a row of x before and after those of the tile, whole vectors of 16 bytes
  int dy_pitch = 0, dy_channel = 0;  // bytes in shared memory: from row to row, from channel to channel
  int x_pitch = 0, x_plane = 0, x_channel = 0;
  FewCopy dy_copy, x_copy;
  int64_t tiles[3] = {1, 1, 1};
  int64_t all_tiles = 1;  // of all samples
  int stages = 2;
  int stage_bytes = 0;
  int made_bytes = 0;  // of a tile of dy that is made
  int blocks_per_sm = 2;
  int blocks = 1;  // per channel block
  int smem_bytes = 0;
  int64_t partial_floats = 0;
  double cycles = 0;  // estimated, of the whole launch
};

KGOPT_HD constexpr int few_wgrad_accumulators(int x_tiles, int dy_tiles) {  // of a thread
  return x_tiles * dy_tiles * kFewWgradTaps * 2 + dy_tiles;                 // the last are sums of dy
}
KGOPT_HD int few_wgrad_floats(const FewWgradPlan& p) {  // a block's partial sums
  return p.splits * 32 * few_wgrad_accumulators(p.x_tiles, p.dy_tiles);
}

// Four taps of the convolution that gives dy, each from rows of x and columns in other banks: two neighbouring rows at
// the first two taps of the width, and, where these are odd in number, four rows at the last.
struct FewWgradTap {
  int row, column;  // row < 0: none
};
KGOPT_HD int few_wgrad_pair_quads(const FewWgradPlan& p) { return p.kernel[2] > 1 ? (p.rows + 1) / 2 : 0; }
KGOPT_HD int few_wgrad_quads(const FewWgradPlan& p) {
  return few_wgrad_pair_quads(p) + (p.kernel[2] % 2 == 1 ? (p.rows + 3) / 4 : 0);
}
KGOPT_HD FewWgradTap few_wgrad_tap(const FewWgradPlan& p, int quad, int i) {
  const int pairs = few_wgrad_pair_quads(p);
  const FewWgradTap tap =
      quad < pairs ? FewWgradTap{quad * 2 + i % 2, i / 2} : FewWgradTap{(quad - pairs) * 4 + i, p.kernel[2] - 1};
  return tap.row < p.rows && quad < few_wgrad_quads(p) ? tap : FewWgradTap{-1, 0};
}

// Rows of the products that give dx are (tap of the width, tap of the depth, channel of dx), in two tiles of 16.
inline constexpr int kMadeDxRows = 32;
inline constexpr int kMadeDxUnit = 32;  // positions of a row of dy that a warp multiplies at once

// 16-byte pieces of a channel's rows of dy that is made are exchanged within 64 bytes, so that eight channels lie in
// different banks: the number of piece i is i ^ few_wgrad_swizzle(channel).
KGOPT_HD constexpr int few_wgrad_swizzle(int channel) { return (channel >> 1 & 1) * 2 + (channel >> 2 & 1); }

// Passed by value as a __grid_constant__.
struct FewWgradParams {
  const void* x;
  const void* dy;
  int64_t x_stride_n, x_stride_c, x_stride[2];  // rows of the width are dense
  int64_t dy_stride_n, dy_stride_c, dy_stride[2];
  int c_in, c_out;
  int in[3], out[3];
  // Where the plan makes dy, which is the gradient through a norm and a mean: dy = -rstd (term + xhat term_xhat), with
  // xhat of the convolution plus bias. It is stored where `made` is not null, with dy's strides.
  const void* gradient_rows;  // [n, c_out] of GradientRow<float>, see groupnorm/shared/affine_row.cuh
  const void* weight;         // of x's dtype
  int64_t w_stride_out, w_stride_in, w_stride_k[3];
  const void* bias;  // of bias_dtype, or null
  Dtype bias_dtype;
  void* made;
  void* dx;  // where the plan gives it, with x's strides
  // Samples may come in several launches, one after the other, whose sums are one.
  bool adds;        // to the partial sums that are there
  bool more;        // launches follow: the partial sums stay what they are
  bool early;       // the weight was there before the kernel ahead: this one may start beside it
  float* partials;  // [channel block][block][split][accumulator][lane]
  void* dw;
  int64_t dw_stride_out, dw_stride_in, dw_stride_k[3];
  void* dbias;  // dense, or null
  Dtype dtype;
  FewWgradPlan plan;
};

}  // namespace kgopt
