// GroupNorm forward of channels_last tensors with x on chip, for GPUs with clusters.
#include "group_norm_columns_kernel.cuh"
#include "groupnorm.h"

namespace kgopt {
namespace {

constexpr const char* kName = "group_norm_columns_fwd_kernel";

template <typename Traits>
Status launch(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  const auto kernel = group_norm_columns_fwd_kernel<Traits>;
  // The limit of all plans, or two threads that launch at a time would set each other's.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_limit);
  if (error == cudaSuccess && plan.cluster && p.shares.blocks > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess && p.words) {
    error = cudaMemsetAsync(p.words, 0, plan.words * sizeof(uint64_t), stream);
  }
  cudaLaunchAttribute attribute{};
  if (plan.cluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = p.shares.blocks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  } else {  // all blocks must run at the same time
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(p.shares.teams * p.shares.blocks);
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // answered by the caller
    return Status::Unsupported(kName, "this process may use fewer multiprocessors than the GPU has");
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, kName, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace

Status run_group_norm_columns_fwd(const GroupNormColumnsFwdParams& p, const ColumnPlan& plan, cudaStream_t stream) {
  Status status;
  switch (p.dtype) {
#define KGOPT_COLUMNS_DTYPE(name, T)                                                        \
  case Dtype::name:                                                                         \
    KGOPT_DISPATCH_CHAINS(p.pre_act, p.act, kPre, kAct,                                     \
                          status = (launch<ColumnTraits<T, kPre, kAct>>(p, plan, stream))); \
    break;
    KGOPT_COLUMNS_DTYPE(kFloat32, float)
    KGOPT_COLUMNS_DTYPE(kBFloat16, __nv_bfloat16)
    KGOPT_COLUMNS_DTYPE(kFloat16, __half)
#undef KGOPT_COLUMNS_DTYPE
    default: return Status::Unsupported(kName, "float64");
  }
  return status;
}

}  // namespace kgopt
