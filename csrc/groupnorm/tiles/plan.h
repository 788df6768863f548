// How the GroupNorm kernels that read a contiguous tensor once cut it up, or why they do not take it. Host code, free
// of CUDA.
#pragma once

#include <algorithm>
#include <numeric>

#include "common/refusal.h"
#include "groupnorm/plan_input.h"
#include "groupnorm/shared/divisor.h"
#include "groupnorm/tiles/tiles.h"

namespace kgopt {

// Tiles of a group. With fewer, waiting for one another takes longer than the tiles.
inline constexpr uint32_t kTilesLeast = 32;
// Tiles of a group that a block has. The places beyond hide the 4 us from a group's last loads to its statistics, of
// which each hides one at an H200's bandwidth; with more tiles, two passes are faster.
inline constexpr uint32_t kTilesMost = 10, kTilesMostBesideHeld = 14;
static_assert(kTilesMost < kTilesSlots && kTilesMostBesideHeld < kTilesSlots + kTilesHolders);
// Tiles in registers: 1 to 8% faster in these ranges, slower outside (H200).
inline constexpr uint32_t kTilesLeastHeld = 8, kTilesBwdLeastHeld = 6, kTilesBwdMostHeld = 9;

// Loads of a block at a time. Where all slots are free, memory has 0.7 us to do for each: with fourteen at a time a
// word takes 9 us, with four 3 us. Of large groups, for the slowest block of which all others wait, fewer: the fast
// blocks do not run ahead then (H200).
inline constexpr uint32_t kTilesBwdUnderWay = 4;
inline constexpr uint32_t tiles_under_way(uint32_t needed) { return needed < 6 ? 3 : needed < 10 ? 2 : 1; }

// Tiles of a run, at most: each group costs a block's servants 1 us (H200).
inline constexpr uint32_t kTilesTogether = 2;

// Tiles of a group that a block has where every block merges the group's words for itself, one trip to L2 less: 2%
// faster in this range and with holders, up to 8% where all tiles have places from the start, and up to 7% slower
// elsewhere, since all of them ask for the same lines (H200).
inline constexpr uint32_t kTilesLeastCollected = 5, kTilesMostCollected = 6;

// Tiles of a group that is one block's (H200).
inline constexpr uint32_t kTilesAloneLeast = 4, kTilesAloneMost = 12;
static_assert(kTilesAloneMost < kTilesSlots);

// Words that a block clears, at most, with a warp.
inline constexpr int64_t kTilesClearedWords = 32 * kClearedWords;

// The bytes of x that backward's three passes read faster: below, they end before tiles have told each other their
// sums.
inline constexpr int64_t kTilesBwdBytes = 4 << 20;

struct TilesPlan {
  const char* refusal = nullptr;  // why not, or null
  GroupTiles shares;
  unsigned blocks = 0;
  int holders = 0;        // of a block
  bool collects = false;  // every block merges a group's words for itself
  int64_t words = 0;      // zero at launch, unless the kernel clears them
};

// Where the groups' tiles are, for both plans below: sets plan->shares but for what depends on the grid. Why not, or
// null.
inline const char* cut_into_tiles(const NormPlanInput& in, TilesPlan* plan) {
  const GroupNormDims& d = in.dims;
  if (!in.has_bulk_copy) return "bulk copies need compute capability 9.0 and code built for it";
  if (in.smem_bytes < kTilesSmemBytes) return "a block has less than 227 KB of shared memory";
  if (d.dtype == Dtype::kFloat64) return "float64 keeps its statistics in float64";
  if (d.channels_last) return "a group of a channels_last tensor is not contiguous";
  if (!in.aligned) return "the tensors do not start at a multiple of 16 bytes";
  if (d.numel() == 0) return "x is empty";
  const int size = dtype_size(d.dtype), vec = 16 / size;
  const int64_t groups = d.n * d.g, elements = d.numel() / groups, tile = tile_vectors(in.tensors);
  if (elements % vec != 0) return "a group is no multiple of 16 bytes";
  if (d.s < vec || d.s > (int64_t(1) << 31) - (1 << 20)) return "a channel of less than 16 bytes or over 2^31";
  if (in.tensors == 2 && d.s < tile * vec) return "a channel is shorter than a tile, which sums up two";
  GroupTiles& p = plan->shares;
  p.dims = d;
  p.channels_per_group = static_cast<int32_t>(d.channels_per_group());
  p.group_vectors = elements / vec;
  p.x_line = in.x_offset / 16 % 8;
  set_divisor(static_cast<uint32_t>(d.s), &p.s_magic, &p.s_shift);
  p.s_magic64 = ~uint64_t(0) / static_cast<uint64_t>(d.s) + 1;  // exact while offset * s is below 2^64
  // Up to seven vectors before a group belong to its first tile's line.
  const int64_t head = p.group_vectors % 8 == 0 && p.x_line == 0 ? 0 : 7;
  const int64_t tiles_per_group = (p.group_vectors + head + tile - 1) / tile;
  if (groups * tiles_per_group >= (int64_t(1) << 31)) return "over 2^31 tiles";
  p.tiles_per_group = static_cast<uint32_t>(tiles_per_group);
  p.tiles = static_cast<uint32_t>(groups * tiles_per_group);
  return nullptr;
}

// A group's first part is the block's that follows the last one of the group before, so that neighbouring groups'
// mergers are parts + step blocks apart: with 32 parts, 132 blocks and a step of 1 four blocks merged everything.
inline uint32_t merger_step(uint32_t parts, uint32_t blocks) {
  uint32_t step = 0;
  while (step + 1 < parts && std::gcd(parts + step, blocks) != 1) ++step;
  return step;
}

// Groups all over the GPU.
inline TilesPlan plan_group_norm_tiles(const NormPlanInput& in) {
  const GroupNormDims& d = in.dims;
  TilesPlan plan;
  const auto refuse = refuser(plan);
  if (const char* const why = cut_into_tiles(in, &plan)) return refuse(why);
  if (in.tensors == 2 && d.numel() * dtype_size(d.dtype) <= kTilesBwdBytes) {
    return refuse("x is small: two passes are faster");
  }
  GroupTiles& p = plan.shares;
  if (p.tiles_per_group < kTilesLeast) return refuse("a group has few tiles: two passes are faster");
  const uint32_t most_blocks = static_cast<uint32_t>(std::min(in.sm_count, kTilesMaxBlocks));
  uint32_t needed = (p.tiles_per_group + most_blocks - 1) / most_blocks;
  if (in.tensors == 1 && needed < kTilesTogether) {
    const auto most_tiles = [&](uint32_t run) {  // of a block
      const int64_t runs = d.n * d.g * ((p.tiles_per_group + run - 1) / run);
      return (runs + most_blocks - 1) / most_blocks * run;
    };
    // A block has one run of a group, several runs, and hardly more tiles for it.
    uint32_t run = kTilesTogether;
    while (run > 1 && (p.tiles_per_group > run * most_blocks || p.tiles < run * (run - 1) * most_blocks ||
                       most_tiles(run) * 16 > most_tiles(1) * 17)) {
      run /= 2;
    }
    p.run = run;
    p.tiles_per_group = (p.tiles_per_group + run - 1) / run * run;
    p.tiles = static_cast<uint32_t>(d.n * d.g * p.tiles_per_group);
    needed = std::max(run, needed);
  }
  plan.blocks = std::min(p.tiles / p.run, most_blocks);
  // A chain that is walked has other warps in the holders' place, or slow derivatives.
  const bool may_hold = !in.long_chain;
  const uint32_t most = may_hold && in.tensors == 1 ? kTilesMostBesideHeld : kTilesMost;
  if (needed > most) return refuse("a group is larger than what the GPU holds on chip: two passes are faster");
  const bool holds =
      in.tensors == 1 ? needed >= kTilesLeastHeld : needed >= kTilesBwdLeastHeld && needed <= kTilesBwdMostHeld;
  plan.holders = holds && may_hold ? kTilesHolders : 0;
  // Further ahead, lines leave L2 before they are loaded; with fewer tiles it was slower (H200).
  p.ahead = needed >= 3 && p.run == 1 ? 3 : 0;
  p.under_way = in.tensors == 1 ? tiles_under_way(needed) : kTilesBwdUnderWay;
  p.parts = std::min(p.tiles_per_group / p.run, plan.blocks);
  plan.collects = may_hold && (holds || p.tiles <= plan.blocks * kTilesSlots ||
                               (needed >= kTilesLeastCollected && needed <= kTilesMostCollected));
  if (in.tensors == 1 && p.parts < plan.blocks) p.merger_step = merger_step(p.parts, plan.blocks);
  plan.words = d.n * d.g * (int64_t(p.parts) + 1);  // and the group's result
  p.clears = int64_t(plan.blocks) * 2 > in.sm_count && plan.words <= int64_t(plan.blocks) * kTilesClearedWords;
  return plan;
}

// Groups that a block has for itself, one after the other: forward alone.
inline TilesPlan plan_group_norm_alone(const NormPlanInput& in) {
  TilesPlan plan;
  const auto refuse = refuser(plan);
  if (const char* const why = cut_into_tiles(in, &plan)) return refuse(why);
  GroupTiles& p = plan.shares;
  const int64_t groups = in.dims.n * in.dims.g;
  if (in.tensors == 2) return refuse("x and dy do not fit");
  if (in.long_chain) return refuse("slow activations need more threads");
  if (p.tiles_per_group < kTilesAloneLeast) return refuse("a group has few tiles: a block each is faster");
  if (p.tiles_per_group > kTilesAloneMost) return refuse("a group is larger than what a block holds");
  // The last round leaves blocks idle, and with one round nothing overlaps.
  const int64_t rounds = (groups + in.sm_count - 1) / in.sm_count;
  if (rounds < 2 || groups * 10 < rounds * in.sm_count * 7) return refuse("few groups leave the GPU idle");
  plan.blocks = static_cast<unsigned>(in.sm_count);
  p.run = p.tiles_per_group;
  p.ahead = 3;
  p.under_way = tiles_under_way(1);
  return plan;
}

// Backward's sums are of tiles: run_group_norm_tiles_gradient adds them up.
inline NormScratch scratch_of(const TilesPlan& plan, const NormPlanInput& in) {
  return {plan.words, in.backward() ? int64_t(plan.shares.tiles) * 4 : 0, 0};
}

}  // namespace kgopt
