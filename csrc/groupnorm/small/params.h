// What the GroupNorm kernels are told that take small groups, in either layout: a team of threads has a group in its
// registers, each of them a few elements. Nothing is staged and nothing is vectorized: with little to do, what counts
// is that every load is on its way at once and that a block waits once.
#pragma once

#include "groupnorm/params.h"

namespace kgopt {

inline constexpr int kSmallMaxThreads = 1024;
inline constexpr int kSmallRun = 4;                 // elements of a vector
inline constexpr int kSmallMaxElements = 8;         // of a thread
inline constexpr int kSmallMaxBwdThreads = 512;     // with the most elements: they take 128 registers
inline constexpr int kSmallMaxBlocks = 8;           // of a cluster: what every device with clusters can run
inline constexpr int64_t kSmallPlaneElements = 32;  // up to here a lane each is enough

// n / d as n * magic >> 32, exact while n * d is below 2^32; magic is 0 for d = 1.
struct SmallDivisor {
  uint32_t d = 1, magic = 0;
#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const { return magic == 0 ? n : __umulhi(n, magic); }
#endif
};

// A unit is a group of a sample. Its elements are counted as they lie in memory: element i is element i % minor of row
// i / minor, and rows are `pitch` apart. A row is a channel (contiguous), or the group's channels at a position
// (channels_last). A thread has single elements, each of which
// its neighbour continues, or, where alignment and rows allow, vectors of kSmallRun.
struct SmallShares {
  SmallDivisor by_lanes;   // threads of a team: a power of two below 32, or whole warps
  uint32_t teams = 1;      // units of a block
  uint32_t units = 0;      // of the tensor
  SmallDivisor by_groups;  // groups of a sample
  uint32_t sample = 0;     // elements of a sample
  uint32_t stride = 0;     // from group to group
  uint32_t chunk = 0;      // elements of a team: of a unit, or of a block's part of it
  uint32_t elements = 0;   // of a unit
  SmallDivisor by_minor;
  uint32_t pitch = 0;
  uint32_t channels = 1;          // of a unit
  float scale = 1.f;              // 1 / elements
  uint32_t middle = 0, last = 0;  // from a unit's first element to two others
  bool channels_last = false;
  bool owner = false;       // backward: a block has one group of every sample, and writes dweight and dbias
  uint8_t blocks_log2 = 0;  // blocks of a cluster that share a unit; then a block has one team
  Chain pre_kind = Chain::kNone, act_kind = Chain::kNone;  // of the activations; the launcher sets them
  // Backward's channel sums, where a unit has several channels: threads of one sum (a power of two below 32, or whole
  // warps), sums of a block, and terms of a sum. A term is an element, or a vector of a contiguous row.
  SmallDivisor by_sum_lanes;
  uint32_t sum_teams = 1;  // sums at a time
  uint32_t sums = 0, terms = 0;
  SmallDivisor by_channels;
  SmallDivisor by_row_terms;  // terms of a channel of one unit
  uint32_t run_log2 = 0;      // elements of a term
};

struct GroupNormSmallFwdParams : GroupNormFwdArgs {
  SmallShares shares;
};

struct GroupNormSmallBwdParams : GroupNormBwdArgs {
  SmallShares shares;
  float* channel_sums = nullptr;  // [N, blocks of a cluster, C, 2], where no block has all samples
  void* dweight = nullptr;        // [C], where one has
  void* dbias = nullptr;
  Dtype gradient_dtype = Dtype::kFloat32;  // of dweight and dbias
};

}  // namespace kgopt
