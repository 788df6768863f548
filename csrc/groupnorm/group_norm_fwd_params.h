// What the GroupNorm forward that reads x once is told.
//
// A group of contiguous x is cut into tiles, which the blocks take in turn: tile t belongs to block t modulo the grid.
// A block keeps its tiles on chip, in a ring of places in shared memory and in the registers of a few warps, until the
// group's statistics are complete. All blocks must run at the same time, so the launch is cooperative.
#pragma once

#include "groupnorm_params.h"

namespace kgopt {

struct GroupNormFwdParams {
  const void* x = nullptr;
  void* y = nullptr;             // may be x
  const void* weight = nullptr;  // [C] or null (ones)
  const void* bias = nullptr;    // [C] or null (zeros)
  Dtype affine_dtype = Dtype::kFloat32;
  GroupNormDims dims;
  ActChain pre_act, act;
  bool add_input = false;
  float eps = 1e-5f;
  float* mean = nullptr;         // [N, G]
  float* rstd = nullptr;         // [N, G]
  uint32_t tiles = 0;            // in all; below 2^31
  uint32_t tiles_per_group = 1;  // the group's last tile may be shorter
  uint32_t parts = 1;            // blocks that have tiles of a group
  int32_t channels_per_group = 1;
  int64_t group_vectors = 0;  // 16-byte vectors of a group
  uint32_t x_line = 0;        // vectors from a 128-byte line to x
  // Quotients by s: (position * magic >> 32) >> shift for positions below 2^31, offset * magic64 >> 64.
  uint32_t s_magic = 0;
  int32_t s_shift = 0;
  uint64_t s_magic64 = 0;
  uint64_t* words = nullptr;  // (words.cuh) [groups][parts] mean and sum of squared deviations; zero at launch
};

inline constexpr int kFwdTileVectors = 1024;  // of 16 bytes
inline constexpr int kFwdSlots = 14;          // tiles of a block in shared memory
inline constexpr int kFwdHolders = 3;         // tiles of a block in registers, where a plan asks for them
inline constexpr int kFwdMaxBlocks = 256;     // whose words a warp merges
// With what the kernel's barriers and descriptions of tiles take.
inline constexpr int kFwdSmemBytes = kFwdSlots * kFwdTileVectors * 16 + 3072;

}  // namespace kgopt
