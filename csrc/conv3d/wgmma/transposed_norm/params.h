// Arguments of the kernels of ConvTranspose + ReLU + GroupNorm of stride 1 without padding,
// whose output is longer than its input by what the kernel reaches. Sizes and offsets are in elements unless said
// otherwise; dims are ordered depth, height, width.
//
// x is copied with its channels innermost and as many zeros after each row and plane as the output is longer. The
// output's position q, counted along its contiguous planes, then reads slot q + shift(tap) of that copy for every tap,
// row and plane ends included, and a tile is any run of positions.
#pragma once

#include <cstdint>

#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

inline constexpr int kTransposedNormChannels = 128;  // output channels of a tile
// Samples are layers of the grid that copies x, and pieces of the packed weights are some more of them.
inline constexpr int kTransposedNormPackLayers = 1024, kTransposedNormMostBatch = 65535 - kTransposedNormPackLayers;
inline constexpr int kTransposedNormHalfChannels = kTransposedNormChannels / kWgmmaConsumers;  // of a warpgroup
inline constexpr int kTransposedNormRowBytes = 128;  // of a slot's channels in shared memory: a chunk
inline constexpr int kTransposedNormMaxStages = 8;
inline constexpr int kTransposedNormHelpers = 3;        // warps that normalize
inline constexpr int kTransposedNormPieceBytes = 2048;  // what one of them normalizes at a time
inline constexpr int kTransposedNormPieces = 4;         // that it has under way

struct TransposedNormPlan {
  const char* refusal = nullptr;
  ConvMath math = ConvMath::kTf32;
  // fp32 tensors whose operands are fp16, scaled by powers of two: conv3d/norm_conv/scaled_half_params.h.
  bool scaled = false;
  int columns = 184;  // positions of a product; a tile has two runs of them
  int parts = 1;      // 2: x and the weights are sums of two TF32 values
  int chunks = 1;     // of kTransposedNormRowBytes of input channels
  int taps[3] = {1, 1, 1};
  int dilation[3] = {1, 1, 1};
  bool flip = false;  // weights are those of a transposed convolution
  int in[3] = {1, 1, 1}, out[3] = {1, 1, 1};
  int reach = 0;             // of all taps, in slots
  int plane = 1;             // positions of an output plane, which are also the slots of an input plane
  int m_tiles = 1;           // of kTransposedNormChannels
  int tiles_per_sample = 1;  // and channel tile
  int blocks = 0;
  int64_t tiles = 0;
  // Tiles with fewer taps of the depth are neighbours, counted around the sample: the first of them, and where in the
  // order of a sample's tiles they are.
  int first_short = 0, short_step = 0, short_blocks = 1;
  bool whole_height = true;  // a stage of x serves all taps of the height, else those of the width alone
  int boxes = 1, box_rows = 64;
  int x_stages = 2, w_stages = 2;
  int lag = 0;              // taps that the second warpgroup starts later
  int channel_vectors = 1;  // of 16 bytes, of an output channel
  KnownDivisor by_m_tiles, by_tiles_per_sample, by_plane, by_channel;
  int smem_bytes = 0;
  int64_t packed_bytes = 0;  // weights
  int64_t sample_bytes = 0;  // of the copy of x
  int64_t slots = 0;         // of a sample
};

struct alignas(64) TransposedNormParams {
  uint64_t x_map[16], x_tail_map[16];  // copies of x as [N][slots][channels]; of the last samples, from x_split on
  const void* packed;    // weights: [m_tile][kd][chunk][kh][kw][part] images, see conv_transposed_norm_pack_kernel
  const float* factors;  // [c_out][2], by whose product outputs are too large; of scaled operands
  const float* bias;     // m_tiles * kTransposedNormChannels values
  void* y;               // of the convolution: [n][c_out][out], contiguous
  void* z;               // of the norm: y, or another tensor where y is kept for a backward
  float* partials;       // [n][group][block][4]: mean, squared deviations, count, unused
  uint32_t* arrived;     // [n]: blocks whose tiles of the sample are stored; zeros at the start
  float* mean;           // [n][groups], null: not wanted
  float* rstd;
  const void* gamma;  // [c_out] or null
  const void* beta;
  Dtype affine_dtype;
  int n, c_out, groups;
  int x_split;
  bool x_in_y;        // the copy of x lies where the output of later samples goes
  int64_t x_in_y_at;  // from this byte of the output on
  // How many samples later at least. With 1, tiles of a sample are stored when all of the one before have been read.
  int x_ahead;
  bool relu;
  float eps;
  TransposedNormPlan plan;
};

struct TransposedNormPackParams {
  const void* weight;
  int64_t stride_out, stride_in, stride_k[3];
  const void* bias;  // [c_out] or null
  void* packed;
  float* packed_bias;
  uint32_t* arrived;  // [n], cleared
  int n, c_in, c_out;
  Dtype dtype, bias_dtype;
  TransposedNormPlan plan;
};

struct TransposedNormInputParams {
  const void* x;
  const uint32_t* largest;  // [c_in], of scaled operands: bits of the largest finite magnitudes
  int64_t stride_n, stride_c, stride[3];
  void* copy;       // of samples below x_split
  void* tail_copy;  // of the others
  int x_split;
  int n, c_in;
  Dtype dtype;
  TransposedNormPlan plan;
};

}  // namespace kgopt
