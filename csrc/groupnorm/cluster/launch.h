// Launch of a kernel over clusters of blocks.
#pragma once

#include "groupnorm/cluster/plan.h"
#include "groupnorm/shared/launch.h"

namespace kgopt {

template <typename Params>
Status launch_clusters(const char* name, void (*kernel)(Params), const Params& p, const ClusterPlan& plan,
                       cudaStream_t stream) {
  NormLaunch launch;
  launch.grid = plan.grid;
  launch.threads = plan.threads;
  launch.smem_bytes = plan.smem_bytes;
  launch.smem_limit = plan.smem_limit;
  launch.cluster = p.shares.blocks;
  return launch_norm(name, kernel, p, launch, stream);
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
