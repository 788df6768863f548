// Launchers of the GroupNorm kernels. Each checks its launches and returns a status.
#pragma once

#include <cuda_runtime_api.h>

#include "groupnorm/cluster/plan.h"
#include "groupnorm/columns/plan.h"
#include "groupnorm/params.h"
#include "groupnorm/rows/plan.h"
#include "groupnorm/small/plan.h"
#include "groupnorm/tiles/bwd_params.h"
#include "groupnorm/tiles/fwd_params.h"
#include "groupnorm/tiles/plan.h"

namespace kgopt {

// Splits statistics into slices so that the GPU is full whatever N and G are: sets partials.rows, partials.slices and
// slice_length. per_channel: one row a channel also for contiguous x.
void plan_group_stats(GroupStatsParams* p, bool per_channel, int sm_count);
Status run_group_stats(const GroupStatsParams& p, cudaStream_t stream);
// With `shift`, [C] of shift_dtype, as if it had been added to every channel; only where channel_mean is asked for.
Status run_group_stats_finalize(const GroupStatsFinalizeParams& p, cudaStream_t stream, const void* shift = nullptr,
                                Dtype shift_dtype = Dtype::kFloat32);
Status run_channel_moments(const ChannelMomentsParams& p, cudaStream_t stream);
Status run_moments_table(const MomentsTableParams& p, cudaStream_t stream);
// Whether the current device runs code of this binary that was built for compute capability 9.0 or later.
bool has_bulk_copy();
// Unsupported where not all blocks can run at a time; nothing was launched then.
Status run_group_norm_fwd(const GroupNormFwdParams& p, const TilesPlan& plan, cudaStream_t stream);
// The most blocks of a cluster on `device`, the current one, with all shared memory taken; 0 where it has no clusters.
int max_cluster_blocks(int device);
Status run_group_norm_cluster_fwd(const GroupNormClusterFwdParams& p, const ClusterPlan& plan, cudaStream_t stream);
// What these two do for plans of teams.
Status run_group_norm_team_fwd(const GroupNormClusterFwdParams& p, const ClusterPlan& plan, cudaStream_t stream);
Status run_group_norm_team_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan, cudaStream_t stream);
// As run_group_norm_fwd.
Status run_group_norm_bwd(const GroupNormBwdParams& p, const TilesPlan& plan, cudaStream_t stream);
// dweight and dbias, its second step.
Status run_tile_gradient(const GroupNormBwdParams& p, cudaStream_t stream);
Status run_group_norm_cluster_bwd(const GroupNormClusterBwdParams& p, const ClusterPlan& plan, cudaStream_t stream);
// As run_group_norm_fwd.
Status run_group_norm_columns_fwd(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream);
Status run_group_norm_rows_fwd(const GroupNormRowsFwdParams& p, const RowPlan& plan, cudaStream_t stream);
Status run_group_norm_rows_bwd(const GroupNormRowsBwdParams& p, const RowPlan& plan, cudaStream_t stream);
// Of plan_group_norm_small and plan_group_norm_slab.
Status run_group_norm_small_fwd(GroupNormSmallFwdParams p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_small_bwd(GroupNormSmallBwdParams p, const SmallPlan& plan, cudaStream_t stream);
// What these two do for plans of planes.
Status run_group_norm_plane_fwd(const GroupNormSmallFwdParams& p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_plane_bwd(const GroupNormSmallBwdParams& p, const SmallPlan& plan, cudaStream_t stream);
Status run_group_norm_slab_fwd(const GroupNormSlabFwdParams& p, const SlabPlan& plan, cudaStream_t stream);
Status run_group_norm_slab_bwd(const GroupNormSlabBwdParams& p, const SlabPlan& plan, cudaStream_t stream);
Status run_normalize(const NormalizeParams& p, cudaStream_t stream);
Status run_group_norm_mean(const GroupNormMeanParams& p, cudaStream_t stream);

// Sets slices and slice_length.
void plan_group_norm_backward(GroupNormBackwardParams* p, int sm_count);
// dweight and dbias from the channel sums, the second of two steps.
Status run_affine_gradient(const AffineGradientParams& p, cudaStream_t stream);
Status run_group_norm_backward(const GroupNormBackwardParams& p, cudaStream_t stream);
Status run_group_stats_backward(const GroupStatsBackwardParams& p, cudaStream_t stream);

}  // namespace kgopt
