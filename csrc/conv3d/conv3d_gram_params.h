// Statistics of a convolution's output from the Gram matrix of its unfolded input: the plan and the arguments of the
// kernel in conv3d_gram_kernel.cuh, where the idea is explained. Dims are ordered depth, height, width.
#pragma once

#include <cstdint>

#include "conv3d_narrow_params.h"

namespace kgopt {

inline constexpr int kGramComputing = 12;  // warps
// Warps that load. For fp32 accuracy the others multiply so long, and need so many registers, that four suffice.
KGOPT_HD constexpr int gram_loading(bool accurate) { return accurate ? 4 : 8; }
KGOPT_HD constexpr int gram_threads(bool accurate) { return 32 * (gram_loading(accurate) + kGramComputing); }
inline constexpr int kGramBlocks = 3;    // of 16 rows, at most
inline constexpr int kGramLags = 7;      // at most
inline constexpr int kGramStages = 8;    // at most
inline constexpr int kGramSamples = 64;  // values of each channel that its pivot and scale are taken from

// Plain numbers, computed on the host, inspectable without a GPU.
struct GramPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  bool accurate = false;          // two fp16 terms a value, for fp32 accuracy
  int channels = 8;               // of an entry: 8, or 4 and with them those of the position `unit` further
  int outer = 0;                  // the dim that slabs follow each other along: depth, or the height where depth is 1
  int lags = 1;                   // taps along it
  int lag_step = 1;               // its dilation
  int pad[3] = {0, 0, 0};
  int kernel[3] = {1, 1, 1};  // with 1 along the outer dim
  int row_step = 1;           // dilation of the rows of a slab
  int pair = 1;               // output positions along the width that one column of the products stands for: 1 or 2
  int unit = 1;               // positions from one offset along the width to the next
  int per_row = 1;            // blocks of a kernel row
  int blocks = 1;             // of 16 rows (offset, channel) of the Gram matrix, for all kernel rows of a slab
  int block_at[kGramBlocks] = {};  // bytes from a position to a block's first eight rows
  int second_at = 1;               // entries from there to its other eight
  int lead = 0;                    // columns before a row's first, so that every fourth of x lies at 16 bytes
  int vectors = 1;                 // of 4 columns that hold a row
  int tile[2] = {1, 1};            // output rows and columns of a slab that one sweep over the slabs covers
  int halo[2] = {1, 1};
  int half = 1;         // entries between even and odd positions of a row where pair is 2
  int row_entries = 1;  // of 16 bytes
  int slab_entries = 1;
  int steps = 1;  // products of 16 columns across a tile's width
  int stage_slabs = 1;
  int stages = 3;
  int ahead = 1;   // stages after the one whose slabs lead the products, that these read
  int teams = 4;   // warps that share the products of a lag
  int shared = 0;  // what they share out: slabs, rows or steps (0, 1, 2)
  int tiles[2] = {1, 1};
  int64_t slices = 1;   // along the outer dim, thread blocks a sample
  int slice = 1;        // outputs along it of one
  int taps = 1;         // rows of the filters: channels and all taps
  int column_bits = 6;  // 2^bits output channels are finished together
  // Shared memory, in bytes.
  int at_taps = 0, at_sums = 0, at_filters = 0, at_gram = 0, at_ring = 0, smem_bytes = 0;
};

// Whether a block sees all of a sample, and all of its channels at once.
inline bool gram_sees_samples(const GramPlan& p, int64_t c_out) { return p.slices == 1 && c_out <= 1 << p.column_bits; }

// Arguments of the kernel. Passed by value as a __grid_constant__.
struct GramParams {
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
  GramPlan plan;
};

}  // namespace kgopt
