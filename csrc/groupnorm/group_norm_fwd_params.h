// What the GroupNorm forward that reads x once is told.
//
// A group of contiguous x is cut into tiles, which the blocks take in turn: tile t belongs to block t modulo the grid.
// A block keeps its tiles in shared memory, in a ring of slots, from the statistics to the normalization `lag` tiles
// later, when the group's statistics are complete. All blocks must run at the same time, so the launch is cooperative.
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
  uint32_t lag = 1;              // tiles of a block between statistics and normalization
  int32_t channels_per_group = 1;
  int64_t group_vectors = 0;  // 16-byte vectors of a group
  uint32_t x_line = 0;        // vectors from a 128-byte line to x
  // Quotients by s: (position * magic >> 32) >> shift for positions below 2^31, offset * magic64 >> 64.
  uint32_t s_magic = 0;
  int32_t s_shift = 0;
  uint64_t s_magic64 = 0;
  bool streaming_stores = false;  // y is larger than L2
  // Words (words.cuh), zero at launch, in this order.
  uint64_t* ready = nullptr;     // [groups] mean and rstd
  uint64_t* partials = nullptr;  // [groups][tiles_per_group] mean and sum of squared deviations
};

inline constexpr int kFwdThreads = 512;  // that compute
inline constexpr int kFwdSlots = 7;      // 32 KB each: 224 KB of shared memory
inline constexpr int kFwdPasses = 4;     // vectors of a tile that one thread handles
// With what the kernel's barriers take.
inline constexpr int kFwdSmemBytes = kFwdSlots * kFwdThreads * kFwdPasses * 16 + 1024;

}  // namespace kgopt
