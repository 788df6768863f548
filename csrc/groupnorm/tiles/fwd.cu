// GroupNorm forward with one read of x, for GPUs with bulk copies.
#include <atomic>

#include "groupnorm/groupnorm.h"
#include "groupnorm/tiles/fwd_kernel.cuh"

namespace kgopt {
namespace {

template <typename Traits>
Status launch_kernel(GroupNormFwdParams p, const TilesPlan& plan, cudaStream_t stream) {
  const auto kernel = group_norm_fwd_kernel<Traits>;
  constexpr int kSmem = Traits::kSlots * Traits::kTileBytes;
  void* arguments[] = {&p};
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (error == cudaSuccess && plan.words > 0 && !p.shares.clears) {
    error = cudaMemsetAsync(p.words, 0, plan.words * sizeof(uint64_t), stream);
  }
  const dim3 blocks(plan.blocks), threads(Traits::kThreads);
  if (error == cudaSuccess) {
    error = plan.words > 0 ? cudaLaunchCooperativeKernel(kernel, blocks, threads, arguments, kSmem, stream)
                           : cudaLaunchKernel(kernel, blocks, threads, arguments, kSmem, stream);
  }
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // answered by the caller
    return Status::Unsupported("group_norm_fwd_kernel", "this process may use fewer multiprocessors than the GPU has");
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, "group_norm_fwd_kernel", cudaGetErrorString(error)};
  return Status::Ok();
}

template <typename T, Chain kPre, Chain kAct>
Status launch(const GroupNormFwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  if constexpr (kAct != Chain::kAny) {  // chains that are walked have more warps in the holders' place
    if (plan.holders > 0) return launch_kernel<GroupNormFwdTraits<T, kPre, kAct, kTilesHolders, true>>(p, plan, stream);
    if (plan.collects) return launch_kernel<GroupNormFwdTraits<T, kPre, kAct, 0, true>>(p, plan, stream);
  }
  return launch_kernel<GroupNormFwdTraits<T, kPre, kAct, 0, false>>(p, plan, stream);
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
    const auto kernel = group_norm_fwd_kernel<GroupNormFwdTraits<float, Chain::kNone, Chain::kNone, 0, false>>;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      cudaGetLastError();  // it was a question; leave no error behind
      return false;
    }
    answer = attributes.ptxVersion >= 90 ? 1 : -1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 1;
}

Status run_group_norm_fwd(const GroupNormFwdParams& p, const TilesPlan& plan, cudaStream_t stream) {
  Status status;
  switch (p.dtype) {
#define KGOPT_FWD_DTYPE(name, T)                                                                            \
  case Dtype::name:                                                                                         \
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct, status = (launch<T, kPre, kAct>(p, plan, stream))); \
    break;
    KGOPT_FWD_DTYPE(kFloat32, float)
    KGOPT_FWD_DTYPE(kBFloat16, __nv_bfloat16)
    KGOPT_FWD_DTYPE(kFloat16, __half)
#undef KGOPT_FWD_DTYPE
    default: return Status::Unsupported("group_norm_fwd_kernel", "float64");
  }
  return status;
}

}  // namespace kgopt
