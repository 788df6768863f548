// What the kernel for channels-innermost tensors of 64 output channels and more is told. Sizes, strides and offsets are
// in elements unless said otherwise; dims are ordered depth, height, width. A transposed convolution of stride 1 is a
// regular one with flipped taps.
//
// Positions are counted along rows of `row_slots` and planes of `plane_rows` rows, which are longer than the input's by
// the padding: what lies behind a row or a plane is loaded as zeros and is at once what lies before the next. A tap is
// then one shift for all positions, row and plane ends included, and a tile is any run of positions. Positions that are
// no outputs are computed and not stored.
#pragma once

#include <cstdint>

#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

inline constexpr int kPositionRowsMaxStages = 12;
inline constexpr int kPositionRowsNormalizers = 3;  // warps
inline constexpr int kPositionRowsPieces = 12;      // of a stage of x that is normalized, at most

struct PositionRowsPlan {
  const char* refusal = nullptr;  // why the kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  int segments = 1;     // of 64 output channels, of a tile
  int columns = 256;    // positions of a warpgroup's tile
  int row_bytes = 128;  // of a position's channels in shared memory, and the width of the swizzle
  int chunks = 1;       // of that many channels, over all products of parts
  int parts = 1;        // 2: x and the weights are sums of two TF32 values, x in a copy of chunks / 3 chunks a part
  int taps[3] = {1, 1, 1};
  int dilation[3] = {1, 1, 1};
  int padding[3] = {0, 0, 0};  // of the equivalent regular convolution
  bool flip = false;           // weights are those of a transposed convolution
  int row_slots = 1, plane_rows = 1;
  int stage_rows = 1;  // rows of a stage of x, at most
  int m_tiles = 1;
  int tiles_per_sample = 1;  // and channel tile
  int blocks = 0;
  int64_t tiles = 0;
  int x_stages = 2, w_stages = 2;
  int lag = 0;  // weight stages that the second warpgroup starts later
  KnownDivisor by_m_tiles, by_tiles_per_sample, by_row, by_plane;
  int smem_bytes = 0;
  int64_t packed_bytes = 0;
  int64_t copy_bytes = 0;  // of x in two parts, [N][D][H][W][part][C]
  // With a norm in front of it, stages of x come in pieces of some rows, each with a barrier of its own.
  bool normalizes = false;
  int piece_rows = 1;
};

// The norm: x is read as act(x * scale + shift), of a group norm's scale and shift.
struct PositionRowsNorm {
  const void* table = nullptr;  // [n][c_in] of (mean, rstd, weight, bias) in fp32
  int c_in = 0;
  Chain act = Chain::kNone;  // not kAny
};

struct alignas(64) PositionRowsParams {
  uint64_t x_map[16];  // tensor map of x, or of its copy, as [N][D][H][W][C]
  const void* packed;  // weights: [m_tile][kd][chunk][kh][kw] images, see conv_position_rows_pack_kernel
  const float* bias;   // of all tiles' channels, zeros without a bias
  void* y;             // channels innermost
  int64_t y_stride_n, y_stride[3];
  Chain act = Chain::kNone;  // of convolution + bias; not kAny
  int c_out;
  int in[3], out[3];
  PositionRowsPlan plan;
  PositionRowsNorm norm;  // where the plan normalizes
};

struct PositionRowsPackParams {
  const void* weight;
  int64_t stride_out, stride_in, stride_k[3];
  const void* bias;  // [c_out] of the weight's dtype, or null
  void* packed;
  float* packed_bias;
  int c_in, c_out;
  Dtype dtype;  // of weight and bias; float32 is rounded to what the plan computes in
  PositionRowsPlan plan;
};

// Arguments of the copy of x in two parts.
struct PositionRowsSplitParams {
  const void* x;
  int64_t stride_n, stride_d, stride_w;  // a row begins where the one before ends
  void* copy;
  int64_t n;
  int c_in;
  int in[3];
  PositionRowsPlan plan;
};

}  // namespace kgopt
