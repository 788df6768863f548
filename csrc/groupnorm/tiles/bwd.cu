// GroupNorm backward with one read of x and dy, for GPUs with bulk copies.
#include "groupnorm/groupnorm.h"
#include "groupnorm/tiles/bwd_kernel.cuh"

namespace kgopt {
namespace {

template <typename Traits>
Status launch_kernel(GroupNormBwdParams p, const TilesPlan& plan, cudaStream_t stream) {
  const auto kernel = group_norm_bwd_kernel<Traits>;
  constexpr int kSmem = Traits::kSlots * kTilesSlotBytes;
  void* arguments[] = {&p};
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (error == cudaSuccess && !p.shares.clears) {
    error = cudaMemsetAsync(p.words, 0, plan.words * sizeof(uint64_t), stream);
  }
  if (error == cudaSuccess) {
    error = cudaLaunchCooperativeKernel(kernel, dim3(plan.blocks), dim3(Traits::kThreads), arguments, kSmem, stream);
  }
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // answered by the caller
    return Status::Unsupported("group_norm_bwd_kernel", "this process may use fewer multiprocessors than the GPU has");
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, "group_norm_bwd_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

template <typename T, Chain kPre, Chain kAct>
Status launch(const GroupNormBwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  if constexpr (kAct != Chain::kAny) {
    if (plan.holders > 0) return launch_kernel<GroupNormBwdTraits<T, kPre, kAct, kTilesHolders>>(p, plan, stream);
  }
  return launch_kernel<GroupNormBwdTraits<T, kPre, kAct, 0>>(p, plan, stream);
}

template <int kVec>
Status launch_gradient(const GroupNormBwdParams& p, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(p.shares.dims.c);
  return launch_after<tile_gradient_kernel<kVec>>(true, "tile_gradient_kernel", blocks, kTileGradientThreads, stream,
                                                  p);
}

}  // namespace

Status run_tile_gradient(const GroupNormBwdParams& p, cudaStream_t stream) {
  return p.dtype == Dtype::kFloat32 ? launch_gradient<kVecSize<float>>(p, stream)
                                    : launch_gradient<kVecSize<__half>>(p, stream);
}

Status run_group_norm_bwd(const GroupNormBwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  Status status;
  switch (p.dtype) {
#define KGOPT_BWD_DTYPE(name, T)                                                                            \
  case Dtype::name:                                                                                         \
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, status = (launch<T, kPre, kAct>(p, plan, stream))); \
    break;
    KGOPT_BWD_DTYPE(kFloat32, float)
    KGOPT_BWD_DTYPE(kBFloat16, __nv_bfloat16)
    KGOPT_BWD_DTYPE(kFloat16, __half)
#undef KGOPT_BWD_DTYPE
    default: return Status::Unsupported("group_norm_bwd_kernel", "float64");
  }
  return status;
}

}  // namespace kgopt
