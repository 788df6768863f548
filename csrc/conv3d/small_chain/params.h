// A whole chain of the first and third pipeline in one launch: convolution, GroupNorm, then the mean of each sample or
// tanh, hardswish, residual and logsumexp over channels. A cluster of blocks has a sample; dims are ordered depth,
// height, width. Sizes, strides and offsets are in elements, of shared memory in 32-bit words.
#pragma once

#include <cstdint>

#include "conv3d/implicit_gemm/params.h"
#include "conv3d/wgmma/tap_columns/params.h"

namespace kgopt {

inline constexpr int kChainMaxThreads = 512;
inline constexpr int kChainMaxBlocks = 16;  // of a cluster, where the device can run so many
inline constexpr int kChainLoads = 8;       // of x that a thread has under way
inline constexpr int kChainWeights = 4;     // of weights, beside them

// Plain numbers, computed on the host, inspectable without a GPU.
struct ChainPlan {
  const char* refusal = nullptr;  // why this kernel cannot run it; null when it can
  bool exact = false;             // fp32 accuracy
  bool is_team = false;           // blocks of a sample are no cluster, but all blocks run at a time
  int split[2] = {1, 1};          // blocks of a sample along depth and height of the output
  int blocks = 1;                 // their product
  int threads = 256;
  int halo[3] = {1, 1, 1};  // input extent of a block
  int plane = 1;            // words between its channels
  int row_lanes_log2 = 0;   // neighbouring threads that load a row of it, `pieces` values each
  int pieces = 1;
  int load_rounds = 1;
  int k = 1, k_steps = 1;  // input channels of a conv group times taps, and steps of 8 of them
  int n_tiles = 1;         // of 8 output channels, of a conv group
  int n_batch = 1;         // of which a warp multiplies so many at once
  // Positions whose outputs are in shared memory at a time. Where that is not all of a block's, the convolution runs a
  // second time for what follows the statistics.
  int chunk = 16;
  int chunks = 1;
  int chunk_pitch = 16;     // words between channels of them
  int stat_lanes_log2 = 0;  // threads that sum up a part of a channel
  int stat_parts = 1;       // of a channel
  int stat_parts_log2 = 0;
  int team_lanes_log2 = 0;                      // that merge a channel's moments
  int lanes_log2 = 0;                           // neighbouring threads that share a position's channels
  KnownDivisor by_blocks, by_split[2];          // rank and sample of a block, part of a rank
  KnownDivisor by_pieces, by_height, by_depth;  // loads: pieces, rows of a plane, planes of a channel
  KnownDivisor by_padded_k, by_weight_rows;     // K entries of an output channel, output channels of a conv group
  KnownDivisor by_kernel[3];
  KnownDivisor by_out_width, by_batches;
  KnownDivisor by_channels, by_group;  // all channels, and those of a group of the norm
  double cycles = 0;                   // estimated, of the launch
  int smem_bytes = 0;
};

// Arguments of the kernel. Passed by value as a __grid_constant__.
struct ChainParams {
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[3];  // a sample's values are less than 2^31 apart
  const void* weight;
  int64_t w_stride_out, w_stride_in, w_stride_k[3];
  int64_t w_stride_group;   // from one conv group's weights to the next
  const void* bias;         // [c_out * groups] of x's dtype, or null
  Dtype dtype;              // of x, weight and bias
  const void* norm_weight;  // [c_out * groups] or null (ones)
  const void* norm_bias;    // [c_out * groups] or null (zeros)
  Dtype affine_dtype;
  int num_groups;  // of the norm
  float eps;
  bool lse;
  void* y;  // lse: [N, positions], else [N]
  Dtype y_dtype;
  float* mean;          // [N, num_groups], or null
  float* rstd;          // [N, num_groups], or null
  float* channel_mean;  // [N, c_out * groups], or null
  void* moments;        // teams: [N, blocks, c_out * groups] of a float4 (mean, sum of squared deviations, count)
  uint32_t* arrived;    // teams: [N], zero
  int64_t n;
  int c_in, c_out;  // per conv group
  int groups;
  int in[3], out[3], kernel[3], step[3], padding[3], dilation[3];
  ChainPlan plan;
};

}  // namespace kgopt
