// GroupNorm forward with one read of x, for GPUs with bulk copies.
#include <atomic>

#include "groupnorm/groupnorm.h"
#include "groupnorm/shared/dispatch.cuh"
#include "groupnorm/tiles/fwd_kernel.cuh"
#include "groupnorm/tiles/launch.h"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_tiles_fwd_kernel";

template <typename Traits>
Status launch_with_traits(const GroupNormTilesFwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  return launch_tiles(kName, group_norm_tiles_fwd_kernel<Traits>, Traits::kThreads, Traits::kSlots * Traits::kTileBytes,
                      p, plan, stream);
}

template <typename T, Chain kPre, Chain kAct>
Status launch(NormTraits<T, kPre, kAct>, const GroupNormTilesFwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  if constexpr (kAct != Chain::kAny) {  // chains that are walked have more warps in the holders' place
    if (plan.holders > 0 && !p.is_extended)
      return launch_with_traits<GroupNormTilesFwdTraits<T, kPre, kAct, kTilesHolders, true>>(p, plan, stream);
    if (plan.collects) return launch_with_traits<GroupNormTilesFwdTraits<T, kPre, kAct, 0, true>>(p, plan, stream);
  }
  return launch_with_traits<GroupNormTilesFwdTraits<T, kPre, kAct, 0, false>>(p, plan, stream);
}

}  // namespace

bool has_bulk_copy() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not yet asked; asking takes as long as a launch
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes attributes;
    const auto kernel =
        group_norm_tiles_fwd_kernel<GroupNormTilesFwdTraits<float, Chain::kNone, Chain::kRelu, 0, false>>;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      cudaGetLastError();  // it was a question; leave no error behind
      return false;
    }
    answer = attributes.ptxVersion >= 90 ? 1 : -1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 1;
}

Status run_group_norm_tiles_fwd(const GroupNormTilesFwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  return dispatch_norm(kName, p, [&](auto traits) { return launch(traits, p, plan, stream); });
}

}  // namespace kgopt
