// What the channels_last GroupNorm kernels are told whose blocks have roles (groupnorm/rows/kernel.cuh).
//
// A team of blocks takes sample after sample; each of its blocks has a share of a sample's rows, in chunks that go
// through the slots of its shared memory. A row is the least number of positions that are whole 16-byte vectors: one,
// unless C is no multiple of a vector. A share lies in one piece.
//
// Chunks of a share either stay in their slots from the sums to the results, or are read again: the first `rereads` of
// them give their slots up once they are summed up and come a second time, from L2, into slots of their own, when the
// block's sums are known.
#pragma once

#include "groupnorm/columns/params.h"

namespace kgopt {

struct RowShares {
  uint32_t samples = 0;            // in all
  uint32_t teams = 1, blocks = 1;  // of the grid, and of a team
  uint32_t rows = 0, share = 0;    // of a sample, of a block
  uint32_t vectors = 0;            // of a row
  uint32_t summers = 0;            // threads that sum up
  uint32_t walkers = 0;            // rows that they have at a time
  uint32_t chunk_rows = 0;         // no more than walkers times a summer's vectors of a chunk
  uint32_t chunks = 0, rereads = 0;
  uint32_t slots = 0, again_slots = 0;  // of chunks that come for the first time, and again
  uint32_t held = 0;                    // of those that stay, the first are in the writers' registers
  uint32_t distance = 0;                // chunks from one that comes to one that comes again, at most; 0: any
  uint32_t cleared = 0;                 // words, where the kernel clears them itself
  uint32_t nothing = 0;                 // 0, which the compiler does not know
  bool backwards = false;               // the last come again first: those are in L2 of a sample that is larger
  uint32_t tensor_bytes = 0;            // of a slot for each tensor
  uint32_t channels = 0, channels_per_group = 1, groups = 1;
  uint32_t turns = 1;  // a row is so many times all channels
  // Lanes that add up the sums of an element of the row, a group's elements and a group's words.
  uint32_t element_lanes_log2 = 0, group_lanes_log2 = 0, team_lanes_log2 = 0;
  // Values of a group that a block has: the first blocks, the one after them; none have the others.
  uint32_t full_blocks = 0;
  float full_count = 0, rest_count = 0, total_count = 0;
  ColumnDivisor by_blocks, by_vectors, by_walkers, by_chunk_rows, by_slots, by_channels, by_channels_per_group;
};

struct GroupNormRowsFwdParams : GroupNormFwdArgs {
  RowShares shares;
  uint64_t* words = nullptr;  // zero at launch or cleared: [samples][groups][blocks] (groupnorm/shared/words.cuh)
                              // moments; counts, see RowBlock
};

struct GroupNormRowsBwdParams : GroupNormBwdArgs {
  RowShares shares;
  uint64_t* words = nullptr;    // the same with two sums
  float* block_sums = nullptr;  // [teams * blocks][C][2]: sum of dz and of dz * xhat over a block's positions
};

inline constexpr int kRowSlots = 32;     // of a block
inline constexpr int kRowWriters = 256;  // threads
// Threads that sum up. Where writers hold chunks these are fewer, which leaves the writers more registers.
inline constexpr int kRowSummers = 256, kRowFewSummers = 128;
inline constexpr int kRowProducers = 2, kRowCollectors = 2, kRowPublishers = 4;  // warps
// Chunks that a producer has under way at a time. With more, or some on their way to L2 besides, loads only queue in
// memory, the longer the further away a multiprocessor is, and a team waits for its last: 2 to 6% slower (H200).
inline constexpr uint32_t kRowFlight = 3;
// Samples whose words a block may tell before it knows the first one's statistics; a power of two.
inline constexpr int kRowAhead = 4;
// Chunks of a share that are not worth sharing between summers and writers: 23.4 us instead of 22.0 with five, 23.3
// instead of 25.5 with ten (H200).
inline constexpr uint32_t kRowFewChunks = 8;
inline constexpr int kRowPasses = 4;  // vectors of a chunk, of all tensors, that a thread handles
// Words of a group that a collecting lane may have under way: all that a large team has to tell, where summers leave
// registers for that, so that they are one trip to L2.
inline constexpr int row_words(int tensors, int size, bool holds) {
  return tensors == 1 && size == 4 && holds ? 17 : kTeamWords;
}
// Chunks that writers have in registers, at most: those that leave a kernel without spills.
inline constexpr int row_held(int tensors, int size) { return tensors == 1 ? 4 : size == 2 ? 5 : 6; }

}  // namespace kgopt
