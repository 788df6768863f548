// One description for every convolution of the family: 2D is 3D with depth 1, and a transposed convolution of
// stride s is s^d interleaved stride-1 convolutions ("classes"), each with its own subset of the kernel's taps.
// Sizes, strides and offsets are in elements; dims are ordered depth, height, width.
#pragma once

#include <cstdint>

#include "common/activation.h"
#include "conv3d/problem.h"

namespace kgopt {

inline constexpr int kConvThreads = 128;
inline constexpr int kConvWarps = kConvThreads / 32;
inline constexpr int kMaxDimClasses = 4;  // largest stride of a transposed convolution

// One dim of one class: output o = q * out_step + residue reads, for tap j < taps, input
// q * in_step + off0 + j * off_step through kernel index k0 + j * k_step.
struct ConvDimClass {
  int taps;
  int k0, k_step;
  int off0, off_step;
  int q_count;  // how many q there are
  int tile_lo;  // smallest offset of any tap: where the halo begins
};

// The launch plan: plain numbers, computed on the host, inspectable without a GPU.
struct ImplicitGemmPlan {
  const char* refusal = nullptr;  // why this kernel family cannot run it; null when it can
  ConvMath math = ConvMath::kTf32;
  int mb = 2;                  // 16-row blocks of positions per warp
  int nb = 1;                  // 8-column blocks of output channels per thread block
  int n_tiles = 1;             // thread blocks along output channels, per conv group
  int words = 1;               // 32-bit words of input channels per chunk (a word: 1 fp32 or 2 half channels)
  int chunks = 1;              // chunks of input channels
  int classes[3] = {1, 1, 1};  // residues per dim
  int out_step[3] = {1, 1, 1};
  int in_step[3] = {1, 1, 1};
  ConvDimClass dim[3][kMaxDimClasses] = {};
  int tile_log2[3] = {0, 0, 0};  // positions per tile and dim
  int halo[3] = {1, 1, 1};       // input extent of a tile; halo[2] is the width without padding
  int pitch = 1;                 // words between rows of a plane
  int plane = 1;                 // words between channel planes
  bool taps_fast = false;        // order of K inside a chunk: taps innermost, else channel words innermost
  int k_steps_max = 1;           // largest number of 8-word K steps of a chunk over all classes
  int zero_plane = 0;            // 1 when some class pads K: padded entries read a plane of zeros
  int64_t tiles[3] = {1, 1, 1};  // tiles per dim
  int64_t tiles_per_sample = 1;
  int64_t slices = 1;  // thread blocks per sample (and class, group, channel tile)
  int64_t tiles_per_slice = 1;
  int smem_bytes = 0;
  int64_t packed_words = 0;        // size of the packed weights
  int64_t packed_class_words = 0;  // the same for one class
};

// Arguments of the kernels. Passed by value as a __grid_constant__.
struct ImplicitGemmParams {
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[3];
  int x_pair_load;                // half types: two neighbouring channels can be read as one aligned word
  const uint32_t* packed_weight;  // written by the pack kernel in mma fragment order
  const float* bias;              // padded to n_tiles * nb * 8 per group, zeros without a bias
  void* y;                        // null for kStats; the result [N, positions] in fp32 for kResidualLse
  int64_t y_stride_n, y_stride_c, y_stride[3];
  float* partials;         // kStats, kStoreStats: see StatsPartials in groupnorm/params.h
  const void* norm_table;  // kResidualLse: [N, C] of (mean, rstd, weight, bias), see groupnorm/params.h
  bool relu;               // kStore, kStoreStats
  int c_in, c_out;         // per conv group
  int c_out_total;
  int groups;
  int in[3], out[3];
  ImplicitGemmPlan plan;
};

// Arguments of the weight packing.
struct ImplicitGemmPackParams {
  const void* weight;
  int64_t stride_out, stride_in, stride_k[3];  // along output channels, input channels (both within a group), taps
  int64_t stride_group;                        // from one conv group's weights to the next
  const void* bias;                            // [c_out * groups] of the weight's dtype, or null
  uint32_t* packed;
  float* packed_bias;
  int c_in, c_out, groups;
  Dtype dtype;
  ImplicitGemmPlan plan;
};

// Arguments of the direct kernel: any shape, one output element a thread, fp32 or fp64 FMA.
struct ConvDirectParams {
  const void* x;
  int64_t x_stride_n, x_stride_c, x_stride[3];
  const void* weight;
  int64_t w_stride_out, w_stride_in, w_stride_group, w_stride_k[3];
  const void* bias;
  void* y;
  int64_t y_stride_n, y_stride_c, y_stride[3];
  Dtype dtype;
  int64_t n;
  int c_in, c_out, groups;  // channels per conv group
  int in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];
  int transposed;
};

}  // namespace kgopt
