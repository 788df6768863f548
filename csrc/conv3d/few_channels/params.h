// The kernels for convolutions with few input channels: their launch plan and their arguments. All of K lies in one
// block's shared memory, which is what "few" means here. Sizes, strides and offsets are in elements unless said;
// dims are ordered depth, height, width.
#pragma once

#include <cstdint>

#include "conv3d/implicit_gemm/params.h"
#include "groupnorm/params.h"

namespace kgopt {

// Warpgroups that load, and that compute: as many as have the registers for accumulators, sums and fragments. One loads
// fast enough where much is done with what it brings: 3xTF32, and the epilogue of logsumexp.
KGOPT_HD constexpr int few_channels_producers(ConvMath math, bool lse) {
  return lse || math == ConvMath::kTf32x3 || math == ConvMath::kFp16x3 ? 1 : 2;
}
KGOPT_HD constexpr int few_channels_consumers(ConvMath math, int columns, int window, bool lse) {
  if (window > 1) return 3;
  return columns >= 128 || (columns >= 64 && !lse && math != ConvMath::kTf32x3) ? 2 : 3;
}
// K steps whose fragments are loaded and multiplied together: one of two numbers, whichever pads K less. Without TF32,
// of many columns, whose totals of all batches take the registers of the larger number's fragments, the smaller one.
KGOPT_HD constexpr bool few_channels_has_large_batch(ConvMath math, int columns) {
  return math != ConvMath::kTf32x3 || columns < 64;
}
KGOPT_HD constexpr int few_channels_batch(ConvMath math, int window, bool large) {
  if (window > 1) return large ? 4 : 3;
  return math == ConvMath::kTf32x3 ? (large ? 5 : 3) : (large ? 9 : 5);
}
inline constexpr int kFewChannelsStrip =
    16;  // neighbouring positions along the width that a warp takes for one product
// Where channels are the rows, with fp32 accuracy: warpgroups that compute, and K steps whose weights they keep in
// registers, at most.
inline constexpr int kChannelsConsumers = 3, kChannelsSteps = 5;
// Steps of K, of two chunks of eight half channels, where positions are rows: one of two numbers.
inline constexpr int kPositionSteps = 5, kPositionMoreSteps = 10;
inline constexpr int kPositionStrips = 2;     // that a warp multiplies and reduces at once
inline constexpr int kPositionStages = 6;     // at most
inline constexpr int kPositionNoStrips = 64;  // entries behind those of a tile's strips, which look ahead finds
KGOPT_HD constexpr int position_producers(bool lse) { return lse ? 1 : 2; }
KGOPT_HD constexpr int position_consumers(bool lse) { return lse ? 3 : 2; }
KGOPT_HD constexpr int position_threads(bool lse) { return 128 * (position_producers(lse) + position_consumers(lse)); }
inline constexpr int kWindowRows = 3;         // kernel rows that share a fragment, where they do
inline constexpr int kFewChannelsStages = 3;  // at most
// The window on gathered chunks: warpgroups that load, pairs of K steps at most, whose fragments a thread holds at
// once, and stages at most.
inline constexpr int kWindowProducers = 2;
inline constexpr int kWindowBlocks = 3;
// At most, where loading threads keep planes in registers.
KGOPT_HD constexpr int window_march_channels(ConvMath math) { return math == ConvMath::kFp16x3 ? 3 : 4; }
inline constexpr int kWindowStages = 8;

// Strips that a computing warp takes at once: the tensor cores multiply for one while it sums up the other. That takes
// registers, of which fp32 input leaves the loading threads' conversion too few.
KGOPT_HD constexpr int window_chains(ConvMath math, int columns, int blocks) {
  return columns <= 24 && blocks == 1 && (math == ConvMath::kBf16 || math == ConvMath::kFp16) ? 2 : 1;
}
// Weights lie there once for each turn of the window, and with two strips at once for the first two rows of a halo.
KGOPT_HD constexpr int window_turns(ConvMath math, int columns, int blocks) {
  return kWindowRows + (window_chains(math, columns, blocks) == 2 ? 2 : 0);
}
// Warpgroups that compute: as many as have the registers for accumulators, sums and fragments.
KGOPT_HD constexpr int window_consumers(ConvMath math, int columns, int blocks) {
  const bool small = columns <= 24 && blocks * (math == ConvMath::kFp16x3 ? 2 : 1) <= 2;
  return small && window_chains(math, columns, blocks) == 1 ? 3 : 2;
}

// Plain numbers, computed on the host, inspectable without a GPU.
struct FewChannelsPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  // Rows of the GEMM are output channels and columns positions, or the other way round.
  bool by_channels = false;
  // Positions are the rows, and the halo lies in chunks of eight half channels:
  // conv3d/few_channels/positions/kernel.cuh.
  bool by_positions = false;
  int columns = 24;                  // output channels per thread block
  int producers = 2, consumers = 3;  // warpgroups
  int window = 1;  // kernel rows (along the height) that one load of A serves; the others are part of K
  // Words of input channels lie in the halo as planes, or in chunks of four next to each other, which ldmatrix reads in
  // one instruction where planes take four.
  bool chunked = false;
  // A window whose halo is gathered: each position of an output depth has chunks of eight half values, any of those
  // that its output sees at one kernel row and column. `types` chunks lie in the halo, the first `shifted_types` of
  // which every kernel column reads; the others hold what eight does not divide, of all columns.
  bool by_window = false;
  int types = 0, shifted_types = 0;
  int blocks = 0;       // of four chunks: two K steps
  int march_lanes = 0;  // threads along a row where each keeps its place going down the depth; 0: they do not
  int n_tiles = 1;      // thread blocks along output channels, per conv group
  int words = 1;        // 32-bit words of input channels (a word: 1 fp32 or 2 half channels)
  int kernel[3] = {1, 1, 1};
  int step[3] = {1, 1, 1};      // stride
  int dilation[3] = {1, 1, 1};  // from tap to tap
  int origin[3] = {0, 0, 0};    // minus the padding: where the halo of the tile at zero begins
  int k_words = 1;              // words of input channels times taps, over the window
  int k_steps = 1;              // of 8 words
  int batch = 3;                // K steps whose fragments a thread holds at once; divides k_steps
  bool large_batch = false;     // which of the two
  bool taps_fast = false;       // order of K: taps innermost, else channel words innermost
  int zero_plane = 0;           // 1 where K is padded: padded entries read a plane of zeros
  int rows = 1;                 // along the height that a strip covers, one after the other
  int segments = 1;             // strips that cover the tile's height
  int tile[3] = {1, 1, 1};      // positions; tile[1] = rows * segments, tile[2] a multiple of a strip
  int halo[3] = {1, 1, 1};      // input extent of a tile
  int lead = 0;                 // words before a row's first, so that every fourth word of x lies at 16 bytes
  int vectors = 1;              // of 4 positions that hold a row
  int pitch = 4;                // positions between rows of a plane
  int plane = 1;                // words between planes, of one word or of one chunk a position
  int stage_words = 0;          // by_positions: between stages
  int stages = 2;
  int strip = kFewChannelsStrip;  // positions along the width; by_channels: of a warpgroup's product, else of a warp's
  int strips = 1;                 // per tile
  int tiles_together = 1;         // a window on gathered chunks: neighbouring tiles whose strips are one for each warp
  uint32_t chunk_pairs[kChannelsSteps] = {};  // by_channels: what a K step reads, as wgmma_b_descriptor has it
  int raw_words = 0;                          // room for the tile as it lies in memory, where it must be rearranged
  int64_t tiles[3] = {1, 1, 1};
  int64_t tiles_per_sample = 1;
  int64_t slices = 1;  // thread blocks per sample, group and channel tile
  int64_t tiles_per_slice = 1;
  int64_t at_once = int64_t(1) << 31;  // a window on gathered chunks: blocks that share samples and slices, at most
  double cycles = 0;                   // estimated, of the whole launch
  int smem_bytes = 0;
};

inline bool few_channels_sees_samples(const FewChannelsPlan& p, int64_t groups) {
  return p.slices == 1 && p.n_tiles == 1 && groups == 1;
}

// How the loading warpgroup reads x.
enum class FewChannelsLoad : int {
  kVectors,  // rows in vectors of 4 positions
  kWords,    // single words: fp32, or two neighbouring half channels in one aligned word
  kHalves    // single half values
};

// What becomes of statistics.
struct FewChannelsStats {
  float* partials;  // see StatsPartials in groupnorm/params.h
  int64_t slices;   // of a sample, in the partials
  int c_out_total;
  // Where a block sees all of its sample: the sample's statistics instead of partials, and with sample_mean [N] the
  // mean of its norm.
  bool finishes;
  GroupStatsFinalizeParams finish;  // but for its partials
  float* sample_mean;
  const int* only;  // [N]: the samples that are wanted; null: all. Written by the kernel ahead
};

// Arguments of the kernels. Passed by value as a __grid_constant__.
struct FewChannelsParams {
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[3];
  FewChannelsLoad load;
  const void* weight;
  int64_t w_stride_out, w_stride_in, w_stride_k[3];
  int64_t w_stride_group;  // from one conv group's weights to the next
  const void* bias;        // [c_out * groups] of the weight's dtype, or null
  void* y;                 // kResidualLse: the result [N, positions], fp32
  bool y_rounded;          // or of x's half type
  int64_t y_stride_n, y_stride[3];
  void* stored;  // kStore: y [N, C, ...] of x's dtype
  int64_t stored_stride_c;
  bool stored_pairs;          // half types: two neighbours of an even position are one aligned word
  bool stored_channel_pairs;  // so are two of an even channel
  FewChannelsStats stats;     // kStats
  const void* norm_table;     // kResidualLse: [N, C] of (mean, rstd, weight, bias), see groupnorm/params.h
  int64_t n;                  // samples
  int c_in, c_out;            // per conv group
  int c_out_total;
  int groups;
  int in[3], out[3];
  FewChannelsPlan plan;
};

}  // namespace kgopt
