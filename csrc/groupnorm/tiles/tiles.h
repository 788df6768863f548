// Tiles of contiguous groups, for the GroupNorm kernels that keep a group on chip all over the GPU.
//
// A group is cut into tiles, which the blocks take in turn, a run of neighbouring ones at a time: run r belongs to
// block r modulo the grid. A block keeps its tiles on chip, in a ring of places in shared memory and in the registers
// of a few warps, until what the group needs of all of them is known. Where several blocks have tiles of a group, all
// blocks must run at the same time, so the launch is cooperative.
#pragma once

#include "groupnorm/params.h"

namespace kgopt {

struct GroupTiles {
  GroupNormDims dims;
  uint32_t tiles = 0;            // in all; below 2^31
  uint32_t tiles_per_group = 1;  // the group's last tile may be shorter
  uint32_t run = 1;              // divides tiles_per_group; a block has one of a group at most, or they are of one tile
  uint32_t parts = 1;            // blocks that have tiles of a group
  uint32_t merger_step = 1;      // group g is merged by the block of its part g * merger_step modulo parts
  int32_t channels_per_group = 1;
  int64_t group_vectors = 0;  // 16-byte vectors of a group
  uint32_t x_line = 0;        // vectors from a 128-byte line to x
  uint32_t ahead = 0;         // tiles of a block that are on their way to L2 before they have a place
  uint32_t under_way = 1;     // loads of a block at a time, at most; at least 1
  bool clears = false;        // the kernel clears its words itself
  // Quotients by s: (position * magic >> 32) >> shift for positions below 2^31, offset * magic64 >> 64.
  uint32_t s_magic = 0;
  int32_t s_shift = 0;
  uint64_t s_magic64 = 0;
};

inline constexpr int kTilesMaxBlocks = 256;  // whose words a warp merges
inline constexpr int kTilesSlotBytes = 16 << 10;
inline constexpr int kTilesSlots = 14;   // tiles of a block in shared memory
inline constexpr int kTilesHolders = 3;  // tiles of a block in registers, where a plan asks for them
inline constexpr int kTilesVisits = 24;  // groups with tiles on chip: at most as many as places
static_assert(kTilesVisits >= kTilesSlots + kTilesHolders);
// With what a kernel's barriers and descriptions of tiles take.
inline constexpr int kTilesSmemBytes = kTilesSlots * kTilesSlotBytes + 3072;

// Vectors of a tile, where it has `tensors` tensors.
constexpr int tile_vectors(int tensors) { return kTilesSlotBytes / 16 / tensors; }

}  // namespace kgopt
