// Statistics of a convolution's output from the Gram matrix of its unfolded input: the plan and the arguments of the
// kernel in conv3d_gram_kernel.cuh, where the idea is explained. Dims are ordered depth, height, width.
#pragma once

#include <cstdint>

#include "conv3d_narrow_params.h"

namespace kgopt {

inline constexpr int kGramTaps = 3;  // along the height and the width, at most
// Two warpgroups multiply; they share the rows. Two load.
inline constexpr int kGramComputing = 256, kGramLoaders = 256;
inline constexpr int kGramThreads = kGramComputing + kGramLoaders;
inline constexpr int kGramBands = kGramTaps;  // distances of rows
inline constexpr int kGramStages = 8;         // at most
inline constexpr int kGramSlots = 4;          // of x as it lies, at most
inline constexpr int kGramSamples = 64;       // values of each channel that its pivot and scale are taken from
inline constexpr int kGramBorders = 4;        // rows: two that not all taps see above, two below
inline constexpr int kGramColumns = 16;       // pairs of outputs that a product sums over
inline constexpr int kGramMostHeld = 192;     // products that one accumulator sums: the tensor core truncates

// Plain numbers, computed on the host, inspectable without a GPU.
struct GramPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  int channels = 8;               // of a position in an entry of 16 bytes: 8, or 4 and with them the next position's
  int kernel[3] = {1, 1, 1};
  int pad[3] = {0, 0, 0};
  int strips = 4;                      // of a row: 8 channels: positions 2 k + 0, 1, 2, 3; 4 channels: pairs of them
  int group_rows = 2;                  // rows whose strips are the 64 rows of a product
  int tile_rows = 2, tile_pairs = 16;  // of outputs: what one sweep over the depth covers
  int rows = 4;                        // of a stage; 4 channels: the border rows once more behind them
  int lead = 0;                        // columns before a row's first, so that vectors of x lie at 16 bytes
  int vectors = 1;                     // of four columns that hold a row
  int strip_bytes = 256;
  int stage_bytes = 1;
  int stages = 2;
  // Where x comes as it lies: all channels of a stage's rows a slot.
  int raw_rows = 1, raw_slots = 2, raw_bytes = 1, raw_stride = 128;
  int tiles[2] = {1, 1};
  int64_t slices = 1;   // thread blocks a sample, along the height
  int slice = 1;        // outputs along it of one
  int taps = 1;         // rows of the filters: channels and all taps
  double cycles = 0;    // estimated, of the whole launch
  int column_bits = 6;  // 2^bits output channels are finished together
  // Shared memory, in bytes.
  int at_taps = 0, at_sums = 0, at_filters = 0, at_gram = 0, at_border = 0, at_raw = 0, at_ring = 0, smem_bytes = 0;
};

// Floats of the Gram matrix, of both warpgroups.
KGOPT_HD int gram_floats(const GramPlan& p) { return 2 * kGramBands * (p.strips * 8) * (p.strips * 8); }
// Products of border rows: two matrices, top and bottom, of two rows with two rows.
KGOPT_HD int gram_border_floats(const GramPlan& p) { return 2 * (2 * p.strips * 8) * (2 * p.strips * 8); }
// Sums of each strip's values: of all rows, of both warpgroups, then of the border rows.
KGOPT_HD int gram_sum_floats(const GramPlan& p) { return 2 * p.strips * 8; }
KGOPT_HD int gram_border_sum_floats(const GramPlan& p) { return kGramBorders * p.strips * 8; }

// Whether a block sees all of a sample, and all of its channels at once.
inline bool gram_sees_samples(const GramPlan& p, int64_t c_out) { return p.slices == 1 && c_out <= 1 << p.column_bits; }

// Arguments of the kernel. Passed by value as a __grid_constant__.
struct GramParams {
  alignas(64) uint64_t x_map[16];  // tensor map of x as [N][C][D][H][W]
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[3];
  const void* weight;
  int64_t w_stride_out, w_stride_in, w_stride_k[3];
  int64_t w_stride_group;  // not used: groups is 1
  const void* bias;        // [c_out] of the weight's dtype, or null
  int c_in, c_out, groups;
  int in[3], out[3];
  Dtype dtype;
  NarrowStats stats;
  int* inexact;  // [N, slices]: whether a slice wants the convolution's own statistics
  GramPlan plan;
};

}  // namespace kgopt
