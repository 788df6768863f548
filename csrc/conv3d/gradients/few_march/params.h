// Both gradients of a convolution with few input channels behind a norm and a mean, from x alone: launch plan and
// arguments. "Padded" places count the zeros around x; sizes, strides and offsets are in elements unless said; dims are
// ordered depth, height, width.
#pragma once

#include <cstdint>

#include "conv3d/gradients/few_channels.h"
#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

inline constexpr int kFewMarchGroups = 2;  // warpgroups
inline constexpr int kFewMarchThreads = kFewMarchGroups * 128;
inline constexpr int kFewMarchWarps = kFewMarchThreads / 32;
inline constexpr int kFewMarchInputs = 4;  // channels of x, at most: 16 bytes a position
inline constexpr int kFewMarchDepth = 3;   // taps of the depth, at most
inline constexpr int kFewMarchTaps = 27;   // at most
inline constexpr int kFewMarchPlaneSteps = (kFewMarchTaps + 1) / 2, kFewMarchDxSteps = 4 * kFewMarchTaps / 2;
inline constexpr int kFewMarchPlanes = 4;  // of x in shared memory
inline constexpr int kFewMarchRows = 64;   // positions of a warpgroup's product
// Tiles of as many positions that a warpgroup has, at most.
KGOPT_HD constexpr int few_march_dx_tiles(bool terms) { return terms ? 2 : 4; }
inline constexpr int kFewMarchLoads = 3;  // positions of a plane of x that a thread loads, at most
inline constexpr int kFewMarchLeft = 16;  // taps of dweight that a warp has, of each channel
inline constexpr int kFewMarchPairs = 2;  // in two terms, pairs of taps that a warp has, at most

// Plain numbers, computed on the host, inspectable without a GPU.
struct FewMarchPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  int kernel[3] = {1, 1, 1};
  int padding[3] = {0, 0, 0};
  bool terms = false;  // fp32 accuracy: x, dy and weights in two terms of fp16
  int inputs = 3;      // channels of x that there are products for, 3 or 4
  int tiles = 3;       // of 8 output channels, 3 or 4
  int rows = 1;        // of dx that a block has, a slab
  int planes = 1;      // of dx of a march
  int pitch = 1;       // of a padded row
  int dy_rows = 1;     // of a slab: its own, and those ahead that its rows of dx see
  int x_rows = 1;      // that these see
  int x_plane = 1;     // positions from plane to plane of x in shared memory
  int dy_octet = 1;    // positions from 8 channels of dy to the next 8
  int dy_tiles = 1;    // of kFewMarchRows positions
  int dx_tiles = 1;    // the same of dx
  // Products that give a tile of y, of two taps, in each plane of x, and those that give a tile of dx, of two (8
  // channels, tap) pairs: of each, where its left operand lies in a plane of x or in dy and how far its halves are
  // apart, in units of 16 bytes, as a descriptor has them.
  int plane_steps = 1, dx_steps = 1;
  uint32_t y_operands[kFewMarchPlaneSteps] = {}, dx_operands[kFewMarchDxSteps] = {};
  int halves = 1;                // warps that share a position's part of dweight
  int64_t slabs = 1, parts = 1;  // of a sample: along the height and the depth
  int64_t marches = 1;           // of all samples
  int blocks = 1;
  int smem_bytes = 0;
  int64_t partial_floats = 0;
  double cycles = 0;  // estimated, of the whole launch
};

// Shared memory in bytes, in the order in which the kernel lays it out.
struct FewMarchLayout {
  int x;           // [plane][position] of four TF32 values, or of four fp16 values and four second terms
  int dy;          // [term][8 channels][position] of eight fp16 values
  int y_weights;   // [step][term][tile] of 256 bytes
  int dx_weights;  // [step][term] of 512 bytes
  int rows;        // a float4 a channel
  int taps;        // an int2 for each of dweight's taps, in the order of its rows: its plane, and bytes in it
  int places;      // of each position of a slab of dx, its offset in a plane, or -1
  int valid;       // of each position of a slab of dy, whether it is one
  int scratch;
  int total;
};
KGOPT_HD FewMarchLayout few_march_layout(const FewMarchPlan& p) {
  auto align = [](int bytes) { return (bytes + 127) / 128 * 128; };
  FewMarchLayout s{};
  s.x = 0;
  s.dy = s.x + align(kFewMarchPlanes * p.x_plane * 16);
  const int terms = p.terms ? 2 : 1;
  s.y_weights = s.dy + align(terms * p.tiles * p.dy_octet * 16);
  s.dx_weights = s.y_weights + p.kernel[0] * p.plane_steps * terms * p.tiles * 256;
  s.rows = s.dx_weights + p.dx_steps * terms * 512;
  s.taps = s.rows + p.tiles * 8 * 16;
  s.places = s.taps + align(p.halves * kFewMarchLeft * 8);
  s.valid = s.places + p.dx_tiles * kFewMarchRows * 4;
  s.scratch = s.valid + align(p.dy_tiles * kFewMarchRows);
  s.total = s.scratch + 128;
  return s;
}
KGOPT_HD constexpr int few_march_floats(const FewMarchPlan& p) {  // a block's partial sums
  if (p.terms) return p.kernel[0] * p.kernel[1] * p.kernel[2] * kFewMarchInputs * p.tiles * 8;
  return p.halves * p.inputs * p.tiles * 4 * 32;
}

// Tap i of dweight's rows, or -1: row i % 8 of the left operand's first eight, in turns of two, and of its last eight.
// Lanes read four positions of two taps at once, in different banks: neighbours of the width, then what is left of a
// row with the same of the next plane.
// In two terms, where whole rows of 16 bytes are read, as they come.
KGOPT_HD int few_march_tap(const FewMarchPlan& p, int i) {
  if (p.terms) return i < p.kernel[0] * p.kernel[1] * p.kernel[2] ? i : -1;
  const int row = i % 8, pair = i / 16 * 8 + row / 2 * 2 + i / 8 % 2, place = pair * 2 + row % 2;
  const int pairs = p.kernel[2] / 2, rows = p.kernel[0] * p.kernel[1], paired = rows * pairs * 2;
  if (place >= rows * p.kernel[2]) return -1;
  if (place < paired) return place / (pairs * 2) * p.kernel[2] + place % (pairs * 2);
  const int left = place - paired, kd = left % p.kernel[0], kh = left / p.kernel[0];
  return (kd * p.kernel[1] + kh) * p.kernel[2] + p.kernel[2] - 1;
}

// Passed by value as a __grid_constant__.
struct FewMarchParams {
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[2];  // rows of the width are dense
  const void* gradient_rows;                    // [n, c_out] of GradientRow<float>
  const void* weight;                           // of x's dtype
  int64_t w_stride_out, w_stride_in, w_stride_k[3];
  const void* bias;  // of bias_dtype, or null
  Dtype bias_dtype;
  const void* channel_mean;  // [n, c_out], float: of the convolution plus bias
  void* dx;                  // with x's strides
  float* partials;           // [block][half][channel of x][tile][4][lane]; in two terms [block][tap][4 of x][c_out]
  void* dw;
  int64_t dw_stride_out, dw_stride_in, dw_stride_k[3];
  void* dbias;  // dense, or null
  int64_t n;
  int c_in, c_out;
  int in[3], out[3];
  Dtype dtype;     // of x, dx and the weight
  Dtype dw_dtype;  // of dw and dbias
  FewMarchPlan plan;
};

}  // namespace kgopt
