// How a norm over channels is cut into blocks. Plain arithmetic, free of CUDA, so that it can be tested without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "channel_norm/channel_norm_params.h"

namespace kgopt {

// Vectors of x that a thread holds in registers until the norm is known. What is beyond is read again. The contiguous
// forward holds them in shared memory, more of them where channels are many.
inline constexpr int kPlanesHeld = 8, kPlanesHeldBackward = 4, kPixelsHeld = 4;
// Three of eight elements: the sums of four are more than fit in the registers beside them.
inline constexpr int kPixelsHeldOfEight = 3;
// Channels whose parameters a block keeps in shared memory in the type of sums: 32 KB of doubles. Beyond, they lie in
// global memory.
inline constexpr int64_t kChannelNormTable = 2048;

struct ChannelNormPlan {
  int vec = 1;  // elements of an access: 16 bytes, or one element
  int along = 1, threads = 32;
  int64_t blocks = 0, tiles = 0;
  int64_t rows = 0;  // backward: of partial sums
  int held = 0;      // contiguous forward: vectors of a tile that a thread holds in shared memory
  int ring_bytes = 0, smem_bytes = 0;
};

// The contiguous forward's shared memory, beside `other` bytes, and its grid: a block has tiles one after the other,
// and where it has several, the next one's vectors arrive while it computes one. Two blocks share a multiprocessor, or
// more.
inline void plan_ring(ChannelNormPlan& plan, int64_t vectors, int other, int dtype_bytes, int sm_count, int sm_bytes) {
  constexpr int kReserved = 1024;  // by the system, of each block
  const int64_t slot = int64_t(plan.threads) * plan.vec * dtype_bytes, stages = plan.tiles > sm_count ? 2 : 1;
  const int64_t room = (sm_bytes / 2 - kReserved - other) / (stages * slot);
  plan.held = static_cast<int>(std::max<int64_t>(1, std::min(vectors, room)));
  plan.ring_bytes = static_cast<int>(stages * plan.held * slot);
  plan.smem_bytes = plan.ring_bytes + other;
  // 84 registers a thread.
  const int together = std::max(1, std::min(768 / plan.threads, sm_bytes / (plan.smem_bytes + kReserved)));
  plan.blocks = std::min<int64_t>(plan.tiles, int64_t(sm_count) * together);
}

// `aligned`: all tensors of x's sizes start at multiples of 16 bytes.
inline ChannelNormPlan plan_channel_norm(const ChannelNormParams& p, bool backward, bool aligned, int sm_count,
                                         int sm_bytes) {
  ChannelNormPlan plan;
  const int full = 16 / dtype_size(p.dtype), acc = p.dtype == Dtype::kFloat64 ? 8 : 4;
  const bool vectors = aligned && p.dtype != Dtype::kFloat64 && (p.channels_last ? p.c : p.s) % full == 0;
  plan.vec = vectors ? full : 1;
  const int64_t table = p.c <= kChannelNormTable ? 2 * p.c * acc : 0;
  if (p.channels_last) {
    // The fewest lanes that hold a position, but two where that fills a sector of memory.
    const int64_t count = p.c / plan.vec, held = backward && plan.vec == 8 ? kPixelsHeldOfEight : kPixelsHeld;
    plan.along = count > 1 ? 2 : 1;
    while (plan.along < 32 && plan.along * held < count) plan.along *= 2;
    // Twelve warps of 168 registers in the backward, which keeps the sums of its channels, too.
    plan.threads = backward ? 128 : 256;
    const int64_t a_block = plan.threads / plan.along, positions = p.n * p.s;
    plan.tiles = (positions + a_block - 1) / a_block;
    plan.blocks = std::min<int64_t>(plan.tiles, int64_t(sm_count) * (backward ? 3 : 8));
    const int64_t warps = plan.threads / 32;
    if (backward && p.c > 32 * held * plan.vec) {  // rows are kept in memory: not too many
      plan.blocks = std::min(plan.blocks, std::max<int64_t>(1, (int64_t(4) << 20) / (p.c * warps)));
    }
    plan.rows = backward ? plan.blocks * warps : 0;
    plan.smem_bytes = static_cast<int>(table);
    return plan;
  }
  // Rows of a tile are as long as the threads allow, 64 bytes at least, or a warp of single elements.
  const int held = backward ? kPlanesHeldBackward : kPlanesHeld, least = vectors ? 4 : 32;
  // Forward: pieces of 256 bytes of a row, where two tiles find room. Of 128 bytes memory reaches a tenth less.
  const int most = 256, row = std::max(least, backward ? 8 : 16);
  int64_t deep = std::max<int64_t>(1, (p.c + held - 1) / held);
  int along = 128;
  while (along > row && along * deep > most) along /= 2;
  const auto fits = [&](int a) { return 2 * p.c * a * plan.vec * dtype_size(p.dtype) <= sm_bytes / 2 - (12 << 10); };
  while (!backward && along > least && !fits(along)) along /= 2;
  if (backward && along * deep > most) along = least;
  // Small tensors: more blocks rather than longer rows.
  const auto tiles_of = [&](int a) { return p.n * ((p.s + int64_t(a) * plan.vec - 1) / (int64_t(a) * plan.vec)); };
  while (along > least && tiles_of(along) < (backward ? 2 : 4) * sm_count) along /= 2;
  deep = backward ? std::min<int64_t>(deep, most / along) : std::min<int64_t>(p.c, std::max(1, most / along));
  plan.along = along;
  plan.threads = static_cast<int>((along * deep + 31) / 32 * 32);
  plan.tiles = tiles_of(along);
  const int groups = plan.threads / std::max(32, along);
  const int other = static_cast<int>(table + int64_t(2 * groups + 1) * plan.vec * along * acc);  // and means
  if (!backward) {
    plan_ring(plan, (p.c - 1) / (plan.threads / along) + 1, other, dtype_size(p.dtype), sm_count, sm_bytes);
    return plan;
  }
  plan.blocks = std::min<int64_t>(plan.tiles, int64_t(sm_count) * std::max(2, 512 / plan.threads));
  const int64_t a_block = std::max(1, along / 32);
  if (p.c > held * (plan.threads / along)) {
    plan.blocks = std::min(plan.blocks, std::max<int64_t>(1, (int64_t(4) << 20) / (p.c * a_block)));
  }
  plan.rows = plan.blocks * a_block;
  plan.smem_bytes = other;
  return plan;
}

}  // namespace kgopt
