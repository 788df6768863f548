// A choice in words. Host code, free of CUDA.
#pragma once

#include <string>

#include "groupnorm/choice.h"

namespace kgopt {

// The kernels that run a choice, by the names that a profiler shows.
inline std::string norm_kernels(const NormChoice& choice, const NormPlanInput& in) {
  struct Names {
    std::string operator()(const SmallPlan& p) const {
      return p.plane ? "group_norm_small_plane" : p.single ? "group_norm_small_single" : "group_norm_small";
    }
    std::string operator()(const ClusterPlan& p) const {
      return p.shares.blocks == 0 ? "group_norm_cluster_team"
             : p.hold > 0         ? "group_norm_cluster_held"
                                  : "group_norm_cluster";
    }
    std::string operator()(const TilesPlan&) const { return "group_norm_tiles"; }
    std::string operator()(const RowPlan&) const { return "group_norm_rows"; }
    std::string operator()(const ColumnPlan&) const { return "group_norm_columns"; }
    std::string operator()(const SlabPlan&) const { return "group_norm_slab"; }
    std::string operator()(const PassesPlan&) const { return ""; }
  };
  if (choice.family() == NormFamily::kPasses) {
    return in.backward() ? "channel sums, group_norm_passes_bwd_merge_kernel, input gradient"
                         : "group statistics, group_stats_finalize_kernel, normalize";
  }
  std::string names = std::visit(Names(), choice.plan) + (in.backward() ? "_bwd_kernel" : "_fwd_kernel");
  if (choice.family() == NormFamily::kTiles && in.backward()) names += ", group_norm_tiles_gradient_kernel";
  if (choice.scratch.sum_rows > 0) names += ", affine_gradient_kernel";
  return names;
}

// How often x is read and where a group lies meanwhile, or why there are several passes over memory.
inline std::string norm_way(const NormChoice& choice, const NormPlanInput& in) {
  struct Way {
    const NormChoice& choice;
    const NormPlanInput& in;
    std::string once() const { return in.backward() ? "one read of x and dy: " : "one read of x: "; }

    std::string operator()(const SmallPlan&) const {
      return once() + "a group in the registers of a team of threads, one launch";
    }
    std::string operator()(const ClusterPlan& p) const {
      const uint32_t blocks = p.shares.blocks;
      if (blocks == 0) return once() + "a group in the registers of a few lanes, one launch";
      if (blocks == 1) return once() + "a group in the shared memory of a block, one launch";
      return once() + "a group in the shared memory of a cluster of " + std::to_string(blocks) + " blocks, one launch";
    }
    std::string operator()(const TilesPlan& p) const {
      if (p.shares.parts == 1) return once() + "a group in the shared memory of a block, then the next one";
      return once() + "tiles of a group in the shared memory of the whole GPU";
    }
    std::string operator()(const RowPlan& p) const {
      return once() + "channels_last samples, shared by teams of " + std::to_string(p.shares.blocks) + " blocks" +
             (p.shares.rereads > 0 ? ", in part read again from L2" : "");
    }
    std::string operator()(const ColumnPlan& p) const {
      return once() + "channels_last samples in the shared memory of teams of " + std::to_string(p.shares.blocks) +
             " blocks";
    }
    std::string operator()(const SlabPlan&) const {
      return "slabs of a channels_last sample, read twice, the second time from L2, one launch";
    }
    std::string operator()(const PassesPlan&) const {
      const NormFamily nearest = in.dims.dtype == Dtype::kFloat64 ? NormFamily::kCluster
                                 : !in.dims.channels_last         ? NormFamily::kTiles
                                 : in.backward()                  ? NormFamily::kRows
                                                                  : NormFamily::kColumns;
      const char* const why = choice.why_not_of(nearest);
      return std::string("passes over memory: ") + (why ? why : "no way on chip takes it");
    }
  };
  return std::visit(Way{choice, in}, choice.plan);
}

// The same, and with `reasons` the kernels' names and why not each of the other families.
inline std::string explain_norm_choice(const NormChoice& choice, const NormPlanInput& in, bool reasons) {
  std::string text = norm_way(choice, in);
  if (!reasons) return text;
  const int family = static_cast<int>(choice.family());
  text += "; family " + std::string(kNormFamilyNames[family]) + " (" + norm_kernels(choice, in) + ")";
  for (int i = 0; i < kNormFamilies; ++i) {
    if (choice.why_not[i]) text += std::string("; not ") + kNormFamilyNames[i] + ": " + choice.why_not[i];
  }
  return text;
}

}  // namespace kgopt
