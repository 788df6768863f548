// Runs a choice: the families' launchers under one signature. A family that cannot run here after all, as not all of
// its blocks find room at a time, answers Unsupported and has launched nothing: then passes do it.
#pragma once

#include "groupnorm/choice.h"
#include "groupnorm/groupnorm.h"

namespace kgopt {

// Where a launch's scratch is, and where the gradients go of one that writes them itself.
struct NormPlaces {
  uint64_t* words = nullptr;  // of NormScratch; null where there are none, for which kernels look
  float* sums = nullptr;
  void* dweight = nullptr;  // [C]
  void* dbias = nullptr;    // [C]
  Dtype gradient_dtype = Dtype::kFloat32;
};

struct NormFwdLaunch {
  const GroupNormFwdArgs& a;
  const NormPlaces& to;
  cudaStream_t stream;

  Status operator()(const SmallPlan& p) const { return run_group_norm_small_fwd({a, p.shares}, p, stream); }
  Status operator()(const ClusterPlan& p) const { return run_group_norm_cluster_fwd({a, p.shares}, p, stream); }
  Status operator()(const TilesPlan& p) const { return run_group_norm_tiles_fwd({a, p.shares, to.words}, p, stream); }
  Status operator()(const RowPlan& p) const { return run_group_norm_rows_fwd({a, p.shares, to.words}, p, stream); }
  Status operator()(const ColumnPlan& p) const {
    return run_group_norm_columns_fwd({a, p.shares, to.words}, p, stream);
  }
  Status operator()(const SlabPlan& p) const { return run_group_norm_slab_fwd({a, p.shares}, p, stream); }
  Status operator()(const PassesPlan&) const {
    return Status::Unsupported("group_norm", "passes are several launches");
  }
};

struct NormBwdLaunch {
  const GroupNormBwdArgs& a;
  const NormPlaces& to;
  cudaStream_t stream;

  Status operator()(const SmallPlan& p) const {
    return run_group_norm_small_bwd({a, p.shares, to.sums, to.dweight, to.dbias, to.gradient_dtype}, p, stream);
  }
  Status operator()(const ClusterPlan& p) const {
    return run_group_norm_cluster_bwd({a, p.shares, to.sums, to.dweight, to.dbias, to.gradient_dtype}, p, stream);
  }
  Status operator()(const TilesPlan& p) const {
    return run_group_norm_tiles_bwd({a, p.shares, to.words, to.sums}, p, stream);
  }
  Status operator()(const RowPlan& p) const {
    return run_group_norm_rows_bwd({a, p.shares, to.words, to.sums}, p, stream);
  }
  Status operator()(const ColumnPlan&) const { return Status::Unsupported("group_norm_columns", "forward alone"); }
  Status operator()(const SlabPlan& p) const { return run_group_norm_slab_bwd({a, p.shares, to.sums}, p, stream); }
  Status operator()(const PassesPlan&) const {
    return Status::Unsupported("group_norm", "passes are several launches");
  }
};

inline Status run_norm_fwd(const NormChoice& choice, const GroupNormFwdArgs& args, const NormPlaces& to,
                           cudaStream_t stream) {
  return std::visit(NormFwdLaunch{args, to, stream}, choice.plan);
}

// dx; and where it has no sums in its scratch, dweight and dbias.
inline Status run_norm_bwd(const NormChoice& choice, const GroupNormBwdArgs& args, const NormPlaces& to,
                           cudaStream_t stream) {
  return std::visit(NormBwdLaunch{args, to, stream}, choice.plan);
}

// Where it has sums: dweight and dbias from them, `channels` of each.
inline Status run_norm_affine_gradient(const NormChoice& choice, const GroupNormBwdArgs& args, int64_t channels,
                                       const NormPlaces& to, cudaStream_t stream) {
  if (const auto* const tiles = std::get_if<TilesPlan>(&choice.plan)) {
    return run_group_norm_tiles_gradient(
        {args, tiles->shares, to.words, to.sums, to.dweight, to.dbias, to.gradient_dtype}, stream);
  }
  AffineGradientParams p;
  p.channel_sums = to.sums;
  p.n = choice.scratch.sum_rows;
  p.c = channels;
  p.dweight = to.dweight;
  p.dbias = to.dbias;
  p.affine_dtype = to.gradient_dtype;
  return run_affine_gradient(p, stream);
}

}  // namespace kgopt
