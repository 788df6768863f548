// Launch of a kernel over slabs: of clusters, or of blocks that all run at a time.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "groupnorm/columns/plan.h"

namespace kgopt {

template <typename Params, typename Plan>
Status launch_columns(const char* name, void (*kernel)(Params), int threads, const Params& p, const Plan& plan,
                      cudaStream_t stream) {
  // The limit of all plans, or two threads that launch at a time would set each other's.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_limit);
  if (error == cudaSuccess && plan.cluster && p.shares.blocks > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess && p.words && p.shares.cleared == 0) {
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
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = plan.smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // answered by the caller
    return Status::Unsupported(name, "this process may use fewer multiprocessors than the GPU has");
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
