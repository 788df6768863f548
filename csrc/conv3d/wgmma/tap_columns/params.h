// Arguments of the convolution with taps as columns. Sizes, strides and offsets are in elements unless said otherwise;
// dims are ordered depth, height, width. A transposed convolution of stride 1 is a regular one with flipped taps.
#pragma once

#include <cstdint>

#include "conv3d/implicit_gemm/params.h"

namespace kgopt {

inline constexpr int kWgmmaConsumers = 2;  // computing warpgroups of a block
inline constexpr int kTapColumnsMaxStages = 8;

// Quotients of numbers below 2^31 by a divisor that the host knows.
struct KnownDivisor {
  uint32_t magic = 1u << 31;
  int shift = 0;
#if defined(__CUDACC__)
  __device__ __forceinline__ int operator()(int n) const { return int(__umulhi(uint32_t(n) * 2, magic) >> shift); }
#endif
};

// 64 rows of a tile: which run they are of, from which row on, and the same in their strip.
struct TapColumnsSegment {
  int run, run_row, strip_row;
};

// The launch plan: plain numbers, computed on the host.
struct TapColumnsPlan {
  const char* refusal = nullptr;  // why the kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  int taps_w = 3;        // taps along the width, folded into the columns of the product
  int c_tile = 32;       // output channels of a block
  int segments = 4;      // 64-row segments of positions per warpgroup
  int teams = 1;         // 2: all weights stay in shared memory, and each warpgroup has tiles of its own
  int n_tiles = 1;       // blocks along output channels
  int row_bytes = 128;   // of a position's channels in shared memory, and the width of the swizzle
  int chunks = 1;        // of that many channels
  int taps[2] = {1, 1};  // along depth, height
  int dilation[3] = {1, 1, 1};
  int padding[3] = {0, 0, 0};  // of the equivalent regular convolution
  bool flip = false;           // weights are those of a transposed convolution
  int first_shift = 0;  // tap j of the width adds row r + first_shift + j * dilation[2] to the output anchored at row r
  int last_shift = 0;
  int anchor_to_out = 0;  // the output column of the anchor at input column 0
  // Neighbouring positions that one warpgroup computes are a strip; neighbouring strips that are loaded together a run.
  // Where the rows of a strip are no whole rows of the input, strips overlap by what the taps of the width reach.
  int strip_rows = 256, strip_step = 256;
  int owned_first = 0, owned_end = 0;  // rows of a strip whose outputs it writes
  int run_strips = 1, runs = 1;        // strips of a run, runs of a tile; runs may lie in several planes of a sample
  int runs_per_plane = 1;
  TapColumnsSegment segment[8] = {};
  int tiles_per_sample = 1;  // and channel tile
  int blocks = 0;
  int64_t tiles = 0;             // of all samples and channel tiles
  int taps_per_stage = 1;        // taps along the height that one stage of positions serves
  int boxes = 1, box_rows = 64;  // tensor copies per run and stage
  int a_stages = 2, b_stages = 2;
  int lag = 0;        // taps that the second warpgroup starts later, so that products run during an epilogue
  bool wide = false;  // outputs beyond the input's columns
  KnownDivisor by_n_tiles, by_tiles_per_sample, by_runs_per_plane, by_width;
  int smem_bytes = 0;
  int64_t packed_bytes = 0;
};

struct alignas(64) TapColumnsParams {
  uint64_t x_map[16];  // tensor map of x as [N][D][H * W][C]
  const void* packed;  // weights: [n_tile][kd][chunk][kh] images of taps_w * c_tile rows, see run_conv_tap_columns_pack
  const float* bias;   // n_tiles * c_tile values, zeros without a bias
  void* y;
  int64_t y_stride_n, y_stride_c, y_stride[3];  // with y_stride_c == 1 the others are multiples of 16 bytes
  // y = act((convolution + bias + residual) * scale)
  const void* residual = nullptr;  // of y's strides; null: none. Not in wide plans
  float scale = 1;                 // 1 in wide plans
  Chain act;                       // not kAny
  float* moments = nullptr;  // of y, as StatsPartials in groupnorm/params.h, zero before; or null. Not in wide plans
  int c_out;
  int in[3], out[3];
  TapColumnsPlan plan;
};

struct TapColumnsPackParams {
  const void* weight;
  int64_t stride_out, stride_in, stride_k[3];
  const void* bias;  // [c_out] of the weight's dtype, or null
  void* packed;
  float* packed_bias;
  float* moments = nullptr;  // set to zero, so many values
  int64_t moment_values = 0;
  int c_in, c_out;
  Dtype dtype;  // of weight and bias; float32 is rounded to what the plan computes in
  TapColumnsPlan plan;
};

// Taps of the depth that read inside the tensor; at least one, which may read zeros.
struct DepthTaps {
  int first, end;
};

// Of a tile whose first plane of outputs reads depth `lo` with its first tap, and whose last plane depth `hi`.
KGOPT_HD DepthTaps depth_taps(int lo, int hi, int depth, int taps, int step) {
  DepthTaps t;
  t.first = hi < 0 ? (-hi + step - 1) / step : 0;
  t.end = lo >= depth ? 0 : (depth - 1 - lo) / step + 1;
  if (t.end > taps) t.end = taps;
  if (t.first >= t.end) t.first = 0, t.end = 1;
  return t;
}

}  // namespace kgopt
