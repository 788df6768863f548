// Launchers of the GroupNorm kernels. Each checks its launches and returns a status.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm/cluster/plan.h"
#include "groupnorm/columns/plan.h"
#include "groupnorm/params.h"
#include "groupnorm/rows/plan.h"
#include "groupnorm/slab/plan.h"
#include "groupnorm/small/plan.h"
#include "groupnorm/tiles/bwd_params.h"
#include "groupnorm/tiles/fwd_params.h"
#include "groupnorm/tiles/plan.h"

namespace kgopt {

// Asked once a device.
//
// Whether the current device runs code of this binary that was built for compute capability 9.0 or later.
bool has_bulk_copy();
// The most blocks of a cluster on `device`, the current one, with all shared memory taken; 0 where it has no clusters.
int max_cluster_blocks(int device);

// The families that keep a group on chip, each by a plan of its own; launch.h runs the one that was chosen. Tiles, rows
// and columns answer Unsupported where not all blocks can run at a time, and have launched nothing then.
Status run_group_norm_small_fwd(GroupNormSmallFwdParams p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_small_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_cluster_fwd(const GroupNormClusterFwdParams& p, const ClusterPlan& plan, cudaStream_t stream);
Status run_group_norm_cluster_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan, cudaStream_t stream);
Status run_group_norm_tiles_fwd(const GroupNormTilesFwdParams& p, const TilesPlan& plan, cudaStream_t stream);
Status run_group_norm_tiles_bwd(const GroupNormTilesBwdParams& p, const TilesPlan& plan, cudaStream_t stream);
Status run_group_norm_rows_fwd(const GroupNormRowsFwdParams& p, const RowPlan& plan, cudaStream_t stream);
Status run_group_norm_rows_bwd(const GroupNormRowsBwdParams& p, const RowPlan& plan, cudaStream_t stream);
Status run_group_norm_columns_fwd(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream);
Status run_group_norm_slab_fwd(const GroupNormSlabFwdParams& p, const SlabPlan& plan, cudaStream_t stream);
Status run_group_norm_slab_bwd(const GroupNormSlabBwdParams& p, const SlabPlan& plan, cudaStream_t stream);

// What the launchers of small and cluster do for plans of single elements, of planes and of teams.
Status run_group_norm_small_single_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_small_plane_bwd(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_cluster_team_fwd(const GroupNormClusterFwdParams& p, const ClusterPlan& plan,
                                       cudaStream_t stream);
Status run_group_norm_cluster_team_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan,
                                       cudaStream_t stream);

// dweight and dbias, the second step of a backward: from sums of tiles, and from sums of channels.
Status run_group_norm_tiles_gradient(const GroupNormTilesBwdParams& p, cudaStream_t stream);
Status run_affine_gradient(const AffineGradientParams& p, cudaStream_t stream);

// Passes over memory. The first splits statistics into slices so that the GPU is full whatever N and G are: it sets
// partials.rows, partials.slices and slice_length. per_channel: one row a channel also for contiguous x.
void plan_group_stats(GroupStatsParams* p, bool per_channel, int sm_count);
Status run_group_stats(const GroupStatsParams& p, cudaStream_t stream);
// With `shift`, [C] of shift_dtype, as if it had been added to every channel; only where channel_mean is asked for.
Status run_group_stats_finalize(const GroupStatsFinalizeParams& p, cudaStream_t stream, const void* shift = nullptr,
                                Dtype shift_dtype = Dtype::kFloat32);
Status run_channel_moments(const ChannelMomentsParams& p, cudaStream_t stream);
Status run_moments_table(const MomentsTableParams& p, cudaStream_t stream);
Status run_normalize(const NormalizeParams& p, cudaStream_t stream);
Status run_normalize_prelu(const NormalizeParams& p, cudaStream_t stream);
// Sets what says how the tensors are cut, and norm.partial_values.
void plan_prelu_bwd(PReluBwdParams* p, int sm_count);
Status run_prelu_bwd(const PReluBwdParams& p, cudaStream_t stream);
Status run_group_norm_mean(const GroupNormMeanParams& p, cudaStream_t stream);
// Sets slices and slice_length.
void plan_group_norm_passes_bwd(GroupNormPassesBwdParams* p, int sm_count);
Status run_group_norm_passes_bwd(const GroupNormPassesBwdParams& p, cudaStream_t stream);
// What follows its partial sums: the groups' terms, dweight and dbias; then, unless p.dx is null, dx.
Status run_group_norm_passes_bwd_merge(const GroupNormPassesBwdParams& p, cudaStream_t stream);
Status run_group_norm_passes_bwd_dx(const GroupNormPassesBwdParams& p, cudaStream_t stream);
Status run_group_stats_backward(const GroupStatsBackwardParams& p, cudaStream_t stream);

}  // namespace kgopt
