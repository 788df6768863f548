// Which family of kernels a GroupNorm takes, and its plan. Host code, free of CUDA, so that it can be looked at without
// a GPU. explain.h puts a choice into words, launch.h runs it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>

#include "groupnorm/cluster/plan.h"
#include "groupnorm/columns/plan.h"
#include "groupnorm/plan_input.h"
#include "groupnorm/rows/plan.h"
#include "groupnorm/slab/plan.h"
#include "groupnorm/small/plan.h"
#include "groupnorm/tiles/plan.h"

namespace kgopt {

// A folder each.
enum class NormFamily { kSmall, kCluster, kTiles, kRows, kColumns, kSlab, kPasses };
inline constexpr int kNormFamilies = 7;
inline constexpr const char* kNormFamilyNames[kNormFamilies] = {"small",   "cluster", "tiles", "rows",
                                                                "columns", "slab",    "passes"};

struct PassesPlan {};  // every tensor: the launchers of passes/ cut it up

// The plan's type is the family: alternatives in the order of NormFamily.
using NormPlan = std::variant<SmallPlan, ClusterPlan, TilesPlan, RowPlan, ColumnPlan, SlabPlan, PassesPlan>;
static_assert(std::variant_size_v<NormPlan> == kNormFamilies);

struct NormChoice {
  NormPlan plan = PassesPlan();
  NormScratch scratch;
  // Why not each family: its plan's refusal, or what is faster. Null of the one that was taken, and of those that were
  // not asked or would have come after it.
  const char* why_not[kNormFamilies] = {};

  NormFamily family() const { return static_cast<NormFamily>(plan.index()); }
  const char*& why_not_of(NormFamily family) { return why_not[static_cast<int>(family)]; }
  const char* why_not_of(NormFamily family) const { return why_not[static_cast<int>(family)]; }
};

// From here on tiles were faster than clusters of sixteen, whatever else (H200).
inline constexpr int64_t kTiledGroupBytes = 1 << 20;

// The most data of a forward block where all clusters of sixteen run at a time and have a multiprocessor for each
// block: such a launch ends before tiles have told each other their moments (H200). More where registers hold it.
inline constexpr int64_t kOneWaveData = 48 << 10;

// Clusters of sixteen that tiles, where they have a plan, are faster than. A cluster of sixteen whose blocks have a
// multiprocessor each leaves a sixth of an H200 idle and overlaps nothing, and a few such clusters leave even more.
inline bool is_crowded(const NormPlanInput& in, const ClusterPlan& plan) {
  const GroupShares& p = plan.shares;
  const int64_t size = dtype_size(in.dims.dtype), bytes = int64_t(p.elements) * size * in.tensors;
  const bool one_wave = !in.backward() && p.groups * p.blocks <= in.sm_count &&
                        (plan.hold > 0 || int64_t(p.share) * size <= kOneWaveData);
  return p.blocks == kClusterMaxBlocks && !one_wave &&
         (2 * (plan.smem_bytes + kReservedSmem) > in.smem_per_sm || leaves_gpu_idle(plan, in.sm_count) ||
          bytes >= kTiledGroupBytes);
}

// The first of the families that takes it.
inline NormChoice choose_group_norm(const NormPlanInput& in) {
  NormChoice choice;
  const auto take = [&](const auto& plan) {
    choice.plan = plan;
    choice.scratch = scratch_of(plan, in);
    choice.why_not_of(choice.family()) = nullptr;
    return choice;
  };

  if (in.dims.by_sample) {
    for (const char*& why : choice.why_not) why = "it has one weight and one bias a channel";
    const ColumnPlan columns = plan_group_norm_columns(in);
    choice.why_not_of(NormFamily::kColumns) = columns.refusal;
    choice.why_not_of(NormFamily::kPasses) = nullptr;
    if (!columns.refusal) return take(columns);
    return choice;
  }

  const SmallPlan small = plan_group_norm_small(in);
  // Forward's clusters go element by element: vectors of columns come first.
  const bool small_shared = !small.refusal && !in.backward() && small.shares.blocks_log2 > 0;
  const bool is_narrow = !in.backward() && has_narrow_groups(in.dims) && in.dims.s > kSmallNarrowPositions;
  ColumnPlan columns;
  if (is_narrow) columns = plan_group_norm_columns(in);
  const bool side_by_side = !small.refusal && is_narrow && columns.cluster;
  if (!small.refusal && !small_shared && !side_by_side) return take(small);
  choice.why_not_of(NormFamily::kSmall) =
      small_shared ? "its clusters go element by element: kernels with vectors are faster" : small.refusal;
  if (side_by_side) choice.why_not_of(NormFamily::kSmall) = "narrow groups of many positions go side by side";

  const TilesPlan alone = plan_group_norm_alone(in);
  if (!alone.refusal) return take(alone);

  const ClusterPlan cluster = plan_group_norm_cluster(in);
  const TilesPlan tiles = plan_group_norm_tiles(in);
  const RowPlan rows = plan_group_norm_rows(in);
  if (!is_narrow) columns = plan_group_norm_columns(in);
  const SlabPlan slab = plan_group_norm_slab(in);
  // Of small tensors, others end before teams have told each other their moments (H200).
  const bool is_small = in.dims.numel() * dtype_size(in.dims.dtype) < kColumnSmallTensor;
  const bool others = small_shared || !slab.refusal;
  const bool by_columns = !columns.refusal && (columns.cluster || !is_small || !others);
  // What knows its channels by their place takes x where it can, but for clusters of columns: they take 10 to 20 us
  // where those that have samples of one group in registers take 7 to 13 (H200).
  const bool held = !cluster.refusal && cluster.shares.minor && cluster.hold > 0;
  const bool other_columns = !columns.refusal && !(columns.cluster && held);
  const bool for_others = cluster.shares.minor && (!rows.refusal || other_columns);
  const bool whole = held && !for_others;
  const bool tiles_first = !cluster.refusal && !tiles.refusal && is_crowded(in, cluster);

  choice.why_not_of(NormFamily::kCluster) = cluster.refusal ? cluster.refusal
                                            : for_others    ? "rows or columns know a channel by its place: faster"
                                            : tiles_first   ? "clusters of sixteen leave the GPU idle: tiles are faster"
                                                            : nullptr;
  choice.why_not_of(NormFamily::kTiles) = tiles.refusal;
  choice.why_not_of(NormFamily::kRows) = rows.refusal;
  choice.why_not_of(NormFamily::kColumns) = columns.refusal ? columns.refusal
                                            : by_columns    ? nullptr
                                                            : "x is small: others end before teams of blocks do";
  choice.why_not_of(NormFamily::kSlab) = slab.refusal;

  if (small_shared && rows.refusal && !by_columns && !whole) return take(small);
  if (!cluster.refusal && !for_others && !tiles_first) return take(cluster);
  if (!tiles.refusal) return take(tiles);
  if (!rows.refusal) return take(rows);
  if (by_columns) return take(columns);
  if (!slab.refusal) return take(slab);
  return choice;
}

}  // namespace kgopt
