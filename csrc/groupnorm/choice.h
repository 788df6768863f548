// Which family of kernels a GroupNorm takes. Host code, free of CUDA, so that it can be looked at without a GPU.
#pragma once

#include <algorithm>
#include <cstdint>

#include "groupnorm/cluster/plan.h"
#include "groupnorm/columns/plan.h"
#include "groupnorm/rows/plan.h"
#include "groupnorm/small/plan.h"
#include "groupnorm/tiles/plan.h"

namespace kgopt {

// The families: a small group in registers; a group in a cluster or a team; tiles of a group all over the GPU;
// channels_last x in whole samples or in slabs on chip or, for narrow groups, through L2; passes over memory.
enum class NormWay { kSmall, kOnChip, kOneRead, kRows, kColumns, kSlabs, kPasses };

struct NormChoice {
  NormWay way = NormWay::kPasses;
  SmallPlan small;
  ClusterPlan on_chip;
  TilesPlan one_read;
  RowPlan rows;
  ColumnPlan columns;
  SlabPlan slabs;
};

// From here on tiles were faster than clusters of sixteen, whatever else (H200).
inline constexpr int64_t kTiledGroupBytes = 1 << 20;

// The most data of a forward block where all clusters of sixteen run at a time and have a multiprocessor for each
// block: such a launch ends before tiles have told each other their moments (H200). More where registers hold it.
inline constexpr int64_t kOneWaveData = 48 << 10;

// The first of the ways that takes it. A cluster of sixteen whose blocks have a multiprocessor each leaves a sixth of
// an H200 idle and overlaps nothing, and a few such clusters leave even more: then the tiles come first.
inline NormChoice choose_group_norm(const ClusterPlanInput& cluster, const TilesPlanInput& tiles,
                                    const ColumnPlanInput& columns) {
  NormChoice choice;
  choice.small =
      plan_group_norm_small({cluster.dims, cluster.tensors == 2, tiles.aligned, cluster.max_blocks, cluster.plain});
  // Forward's clusters go element by element: vectors of columns come first.
  const bool small_shared = !choice.small.refusal && cluster.tensors == 1 && choice.small.shares.blocks_log2 > 0;
  if (!choice.small.refusal && !small_shared) {
    choice.way = NormWay::kSmall;
    return choice;
  }
  choice.on_chip = plan_group_norm_cluster(cluster);
  choice.one_read = plan_group_norm_alone(tiles);
  if (!choice.one_read.refusal) {
    choice.way = NormWay::kOneRead;
    return choice;
  }
  choice.one_read = plan_group_norm_tiles(tiles);
  choice.rows = plan_group_norm_rows(columns);
  choice.columns = plan_group_norm_columns(columns);
  choice.slabs = plan_group_norm_slab(cluster.dims, cluster.sm_count);
  const ClusterPlan& c = choice.on_chip;
  const int64_t bytes = int64_t(c.shares.elements) * dtype_size(cluster.dims.dtype) * cluster.tensors;
  const bool one_wave = cluster.tensors == 1 && c.shares.groups * c.shares.blocks <= cluster.sm_count &&
                        (c.hold > 0 || int64_t(c.shares.share) * dtype_size(cluster.dims.dtype) <= kOneWaveData);
  const bool crowded = c.shares.blocks == kClusterMaxBlocks && !one_wave &&
                       (2 * (c.smem_bytes + kReservedSmem) > cluster.smem_per_sm ||
                        leaves_gpu_idle(c, cluster.sm_count) || bytes >= kTiledGroupBytes);
  // Of small tensors, others end before teams have told each other their moments (H200).
  const bool is_small = cluster.dims.numel() * dtype_size(cluster.dims.dtype) < kColumnSmallTensor;
  const bool others = small_shared || !choice.slabs.refusal;
  const bool by_columns = !choice.columns.refusal && (choice.columns.cluster || !is_small || !others);
  // What knows its channels by their place takes x where it can, but for clusters of columns: they take 10 to 20 us
  // where those that have samples of one group in registers take 7 to 13 (H200).
  const bool held = !c.refusal && c.shares.minor && c.hold > 0;
  const bool other_columns = !choice.columns.refusal && !(choice.columns.cluster && held);
  const bool for_others = c.shares.minor && (!choice.rows.refusal || other_columns);
  const bool whole = held && !for_others;
  if (small_shared && choice.rows.refusal && !by_columns && !whole) {
    choice.way = NormWay::kSmall;
  } else if (!c.refusal && !for_others && (!crowded || choice.one_read.refusal)) {
    choice.way = NormWay::kOnChip;
  } else if (!choice.one_read.refusal) {
    choice.way = NormWay::kOneRead;
  } else if (!choice.rows.refusal) {
    choice.way = NormWay::kRows;
  } else if (by_columns) {
    choice.way = NormWay::kColumns;
  } else if (!choice.slabs.refusal) {
    choice.way = NormWay::kSlabs;
  }
  return choice;
}

}  // namespace kgopt
