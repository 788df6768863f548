// Statistics of a 2D convolution of few input channels from the input's autocorrelation: launch plan and arguments.
// Sizes, strides and offsets are in elements unless said; pairs are (height, width).
#pragma once

#include <cstdint>

#include "conv3d/few_channels/params.h"

namespace kgopt {

inline constexpr int kAutocorrelationTaps = 3;      // of a kernel's side, at most
inline constexpr int kAutocorrelationChannels = 8;  // of the input, at most
inline constexpr int kAutocorrelationChunk = 32;    // neighbouring positions of a row that a warp takes at once
// Warps that walk down the rows, and those that take an outer row each and load what the end needs. Sixteen together,
// so that each thread may have 128 registers.
inline constexpr int kAutocorrelationWarps = 12, kAutocorrelationOthers = 4;
inline constexpr int kAutocorrelationThreads = 32 * (kAutocorrelationWarps + kAutocorrelationOthers);
inline constexpr int kAutocorrelationOutputs = 256;  // channels, at most
inline constexpr int kAutocorrelationSlices = 16;    // of a sample, at most
// Sums of a warp, in floats: eight products of 16 x 8, the channels' sums among them; of the outer columns, twelve and
// those.
inline constexpr int kWalkFloats = 8 * 128;
inline constexpr int kColumnFloats = 12 * 128 + 64;
inline constexpr int kAutocorrelationEntries = 72;  // of K, (tap, channel) pairs; whole blocks of eight
inline constexpr int kAutocorrelationPairs =
    kAutocorrelationTaps * kAutocorrelationTaps * (kAutocorrelationTaps * kAutocorrelationTaps + 1) / 2;  // of taps
inline constexpr int kFilterPitch = 72;  // of a K entry's 64 weights: fragments meet no bank twice, nor the matrix's
// Of the outer columns' rows, in channels: lanes that read every fourth row meet no bank twice.
inline constexpr int kOuterPitch = 9;
inline constexpr int kPairInts = 12;     // see PairPlaces
inline constexpr int kZeroFloats = 128;  // as many as a product
// Outermost input values, with zeros around.
inline constexpr int kCornerFloats = 8 * 12 * kAutocorrelationChannels;

// Plain numbers, computed on the host, inspectable without a GPU.
struct AutocorrelationPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  int kernel[2] = {1, 1};
  int pad[2] = {0, 0};
  // Input rows and columns, from and to, whose values every tap sees; the others are the outer ones, at most two on a
  // side. Column 0 always is an outer one.
  int core_rows[2] = {0, 0}, core_columns[2] = {0, 0};
  // The outer rows and columns that a tap sees, a bit each: 0, 1 and, from the core's end on, 2, 3.
  unsigned seen_rows[kAutocorrelationTaps] = {}, seen_columns[kAutocorrelationTaps] = {};
  int chunks = 1;      // of a row
  int64_t slices = 1;  // thread blocks per sample
  int slice_rows = 1;  // of the input
  int runs = 1;        // that a slice's core rows are divided into, a warp each and chunk
  int run_rows = 1;
  int edge_rows = 4;    // outer rows that a slice may have
  int column_rows = 0;  // core rows and those below, whose outer columns are kept; two more than whole steps of 16
  int smem_bytes = 0;   // of the main kernel, and of the one that merges slices
  int finish_smem_bytes = 0;
  int64_t slice_floats = 0;  // that a slice leaves; 0 where it has all of its sample
  double cycles = 0;         // estimated, of all launches
};

// Shared memory, in floats. Sums that are merged take the place of the first of their kind.
struct AutocorrelationLayout {
  int walks;    // sums of each warp that walks
  int edges;    // sums of each outer row
  int columns;  // of the outer columns, left and right, of half of the rows and of the others
  int corners;
  int zeros;
  int entries;      // a float4 each K entry: mean in two terms, sum of squares, sum
  int weights;      // a column of 64 output channels for each K entry
  int affine;       // of each output channel: bias, the norm's weight and bias
  int pairs;        // of each pair of taps, where it finds its sums
  int scratch;      // 64 words
  int column_rows;  // see OuterColumns
  int total;
  // In the place of walks, once they are merged.
  int matrix;   // of products of K entries
  int parts;    // of 64 output channels, four of each
  int moments;  // of each output channel, then the channels' sums of squares alone
};

KGOPT_HD AutocorrelationLayout autocorrelation_layout(int walks, int edge_rows, int column_rows) {
  AutocorrelationLayout s{};
  s.walks = 0;
  s.matrix = kWalkFloats;
  s.parts = s.matrix + kAutocorrelationEntries * kAutocorrelationEntries;
  s.moments = s.parts + 4 * 64;
  const int first = walks * kWalkFloats, later = s.moments + kAutocorrelationOutputs * 4;
  s.edges = first > later ? first : later;
  s.columns = s.edges + edge_rows * kWalkFloats;
  s.corners = s.columns + 4 * kColumnFloats;
  s.zeros = s.corners + kCornerFloats;
  s.entries = s.zeros + kZeroFloats;
  s.weights = s.entries + kAutocorrelationEntries * 4;
  s.affine = s.weights + (kAutocorrelationEntries + 1) * kFilterPitch;
  s.pairs = s.affine + kAutocorrelationOutputs * 3;
  s.scratch = s.pairs + kAutocorrelationPairs * kPairInts;
  s.column_rows = s.scratch + 64;
  s.total = s.column_rows + column_rows * 4 * kOuterPitch;
  return s;
}

// Arguments of the kernels. Passed by value as a __grid_constant__.
struct AutocorrelationParams {
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[3];
  bool vectors;  // rows are multiples of 16 bytes
  const void* weight;
  int64_t w_stride_out, w_stride_in, w_stride_k[3], w_stride_group;
  const void* bias;        // [c_out] of the weight's dtype, or null
  float* sums;             // [n, slices, slice_floats], where slices are merged by a kernel of their own
  FewChannelsStats stats;  // what becomes of them; nothing but finish and sample_mean counts
  int* inexact;            // [n]: whether the sample is to be done again by the convolution
  int c_in, c_out;
  int groups;
  int in[3], out[3];
  AutocorrelationPlan plan;
};

}  // namespace kgopt
