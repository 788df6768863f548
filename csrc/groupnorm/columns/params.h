// What the channels_last GroupNorm forward is told that keeps x on chip.
//
// A slab is some neighbouring groups of one sample at all its positions: the sample itself, or, where it has many
// channels, a column of it that is still wide enough for whole sectors. A team of blocks takes slab after slab. Each of
// its blocks has a share of the slab's positions, in chunks that go through the slots of its shared memory; a thread
// loads, sums up and normalizes the same vectors of the same channels, so nobody waits for another thread's loads.
//
// A row is the least number of positions that are whole 16-byte vectors: one, unless C is no multiple of a vector.
#pragma once

#include "groupnorm/params.h"

namespace kgopt {

// Quotients of numbers below 2^31 by a divisor that the host knows.
struct ColumnDivisor {
  uint32_t magic = 1u << 31;
  int32_t shift = 0;
#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t operator()(uint32_t n) const { return __umulhi(n * 2, magic) >> shift; }
#endif
};

struct ColumnShares {
  uint32_t slabs = 0;  // in all
  uint32_t slabs_per_sample = 1;
  uint32_t teams = 1, blocks = 1;  // of the grid, and of a team
  uint32_t rows = 0;               // of a sample
  uint32_t share = 0;              // rows of a block
  int64_t pitch = 0;               // elements from row to row
  uint32_t cleared = 0;            // words, where the kernel clears them itself
  uint32_t ahead = 0;              // whether the next slab comes to L2 before it has slots
  uint32_t chunks = 0;             // of a share: kColumnPasses passes over the block's threads each
  uint32_t held = 0;               // the first of them may stay in registers: none or kColumnHeld
  // Which vectors a thread has. A warp takes `columns` vectors of `positions` rows; where a row is longer than a warp,
  // `warps_per_row` warps have a part of it each.
  uint32_t vectors = 0;  // of a slab's row
  uint32_t columns = 0, positions = 0, warps_per_row = 1;
  uint32_t positions_power = 1;  // the least power of two that is not less
  uint32_t walkers = 0;          // warps, or groups of warps_per_row, that walk over the rows
  uint32_t stride = 0;           // rows that the block has in one pass
  uint32_t pass_bytes = 0, slot_bytes = 0, data_bytes = 0;  // of shared memory
  // Channels and groups of a slab. A row is `turns` times all channels.
  uint32_t channels = 0, channels_per_group = 1, groups = 1, turns = 1;
  // Runs: neighbouring elements of a vector that are of one group whatever the vector.
  uint32_t run_log2 = 0;
  uint32_t runs_per_vector = 1, group_runs = 1, turn_runs = 1, runs = 1;  // of a vector, a group, a turn, a row
  // Lanes that merge a group: in a block, in a team. One step of a block's lanes is so many walkers and runs.
  uint32_t block_lanes_log2 = 0, team_lanes_log2 = 0;
  uint32_t lanes_walkers = 1, lanes_runs = 0;
  // Values of a group that a block has: the first blocks, the one after them; none have the others.
  uint32_t full_blocks = 0;
  float full_count = 0, rest_count = 0, total_count = 0;
  ColumnDivisor by_blocks, by_warps_per_row, by_columns, by_stride, by_channels, by_channels_per_group,
      by_slabs_per_sample, by_group_runs;
#if defined(__CUDACC__)
  __device__ __forceinline__ uint32_t slabs_of(uint32_t team) const {
    return team + last_round < slabs ? rounds : rounds - 1;
  }
#endif
  uint32_t rounds = 1, last_round = 0;  // slabs of the first teams; the slabs before their last ones
  uint32_t affines = 0;                 // places of a table of channels: whole vectors of them
};

struct GroupNormColumnsFwdParams : GroupNormFwdArgs {
  ColumnShares shares;
  uint64_t* words = nullptr;  // [slabs][groups][blocks] (groupnorm/shared/words.cuh), or null where a team is a cluster
};

// Words of a group that a lane has under way at a time.
inline constexpr int kTeamWords = 9;

inline constexpr int kColumnSlots = 8;   // a power of two
inline constexpr int kColumnPasses = 3;  // vectors of a chunk of one thread; 8 slots of 24 KB with 512 threads
inline constexpr int kColumnHeld = 3;    // chunks in registers
inline constexpr int kColumnRing = 4;  // slots of chunks that do not stay, where some are in registers; a power of two
inline constexpr int kColumnMaxThreads = 512;

}  // namespace kgopt
