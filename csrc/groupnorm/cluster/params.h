// What the GroupNorm kernels are told that keep a group on chip: in the shared memory of a cluster of blocks, or, where
// it is small, in the registers of a team of lanes. x is contiguous, or a sample is one group. Group after group starts
// wherever the one before ended, so neither a group's start nor its length needs to be a multiple of a vector.
#pragma once

#include "groupnorm/params.h"

namespace kgopt {

// How groups are dealt out. Positions count from the 128-byte line in which the group starts, so that loads and stores
// touch no line twice; block r of a cluster has the positions from r * share on.
struct GroupShares {
  int64_t groups = 0;
  uint32_t elements = 0;  // of a group
  uint32_t share = 0;     // positions of a block: a multiple of 128 bytes
  uint32_t x_line = 0;    // elements from a 128-byte line to x, and to every other tensor of its shape
  uint32_t blocks = 1;    // of a cluster; 0: a group is one team's
  int32_t lanes = 0;      // of a team: 8 or 32
  int32_t passes = 0;     // vectors of such a lane: kTeamPasses or kTeamMostPasses
  uint32_t s = 0;         // elements of a channel
  uint32_t s_magic = 0;   // quotients by s of numbers below 2^31
  int32_t s_shift = 0;
  uint32_t channels = 1;    // of a group
  uint32_t per_sample = 1;  // groups of a sample
  uint32_t rows = 0;        // channels of which a block has a part, at most
  bool minor = false;       // channels_last, one group: its channels lie side by side, `s` of them
  bool together = false;    // all warps sum a channel up together, or each warp has its own channels (backward)
};

struct GroupNormClusterFwdParams : GroupNormFwdArgs {
  GroupShares shares;
};

struct GroupNormClusterBwdParams : GroupNormBwdArgs {
  GroupShares shares;
  float* channel_sums = nullptr;  // [N, C, 2]: sum of dz and of dz * xhat
  // [C], of one sample: its channel sums, which then go here instead. Null: there are more samples.
  void* dweight = nullptr;
  void* dbias = nullptr;
  Dtype gradient_dtype = Dtype::kFloat32;
};

inline constexpr int kClusterPasses = 4;      // vectors of a piece that one thread handles
inline constexpr int kClusterMaxPieces = 16;  // of a block's share
inline constexpr int kClusterMaxThreads = 512;
inline constexpr int kClusterMaxBlocks = 16;
// Where a block keeps its share in registers: its threads and vectors of each, at most; where it has a multiprocessor
// for itself, up to kHeldMostThreads with kHeldWide each; in backward, of x and of dy each, of kHeldRows channels.
inline constexpr int kHeldThreads = 128, kHeldFew = 4, kHeldMost = 10, kHeldMostThreads = 512, kHeldWide = 8;
inline constexpr int kHeldBwd = 5, kHeldRows = 4;
// Vectors of a lane where a group is one team's, or in backward of x and of dy each, and threads of a block of teams.
inline constexpr int kTeamPasses = 4, kTeamMostPasses = 8, kTeamThreads = 256;

}  // namespace kgopt
