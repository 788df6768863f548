// GroupNorm backward with one read of x and dy, for GPUs with bulk copies.
#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"
#include "groupnorm/tiles/bwd_kernel.cuh"
#include "groupnorm/tiles/launch.h"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_tiles_bwd_kernel";

template <typename Traits>
Status launch_with_traits(const GroupNormTilesBwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  return launch_tiles(kName, group_norm_tiles_bwd_kernel<Traits>, Traits::kThreads, Traits::kSlots * kTilesSlotBytes, p,
                      plan, stream);
}

template <typename T, Chain kPre, Chain kAct>
Status launch(NormTraits<T, kPre, kAct>, const GroupNormTilesBwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  if constexpr (kAct != Chain::kAny) {
    if (plan.holders > 0)
      return launch_with_traits<GroupNormTilesBwdTraits<T, kPre, kAct, kTilesHolders>>(p, plan, stream);
  }
  return launch_with_traits<GroupNormTilesBwdTraits<T, kPre, kAct, 0>>(p, plan, stream);
}

template <int kVec>
Status launch_gradient(const GroupNormTilesBwdParams& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.shares.dims.c);
  return launch_after<group_norm_tiles_gradient_kernel<kVec>>(true, "group_norm_tiles_gradient_kernel", blocks,
                                                              kTileGradientThreads, stream, p);
}

}  // namespace

Status run_group_norm_tiles_gradient(const GroupNormTilesBwdParams& p, cudaStream_t stream) {
  return p.dtype == Dtype::kFloat32 ? launch_gradient<kVecSize<float>>(p, stream)
                                    : launch_gradient<kVecSize<__half>>(p, stream);
}

Status run_group_norm_tiles_bwd(const GroupNormTilesBwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  return dispatch_norm(kName, p, [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
