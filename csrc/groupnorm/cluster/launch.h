// Launch of a kernel over clusters of blocks.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "groupnorm/cluster/plan.h"

namespace kgopt {

template <typename Params>
Status launch_clusters(const char* name, void (*kernel)(Params), const Params& p, const ClusterPlan& plan,
                       cudaStream_t stream) {
  // The limit of all plans, or two threads that launch at a time would set each other's.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.smem_limit);
  if (error == cudaSuccess && p.shares.blocks > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = p.shares.blocks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.grid);
  config.blockDim = dim3(plan.threads);
  config.dynamicSmemBytes = plan.smem_bytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, p);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

// The most blocks of a cluster that the device can run with all of a block's shared memory; 0 without clusters.
template <typename Params>
int max_cluster_of(void (*kernel)(Params)) {
  cudaFuncAttributes attributes;
  int device = 0, smem = 0, blocks = 0;
  cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess && attributes.ptxVersion < 90) return 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  smem -= kClusterStaticSmem;
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  }
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kClusterMaxBlocks);
  config.blockDim = dim3(kClusterMaxThreads);
  config.dynamicSmemBytes = smem;
  if (error == cudaSuccess) error = cudaOccupancyMaxPotentialClusterSize(&blocks, kernel, &config);
  if (error != cudaSuccess) {
    cudaGetLastError();  // it was a question; leave no error behind
    return 0;
  }
  return blocks;
}

}  // namespace kgopt
