// Launch of a kernel of clusters, or of blocks that all run at a time.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/status.h"

namespace kgopt {

struct NormLaunch {
  unsigned grid = 0;
  int threads = 0;
  int smem_bytes = 0;         // dynamic, of a block
  int smem_limit = 0;         // of all plans, or two threads that launch at a time would set each other's
  unsigned cluster = 0;       // blocks of a cluster; 0: no clusters, and all blocks run at the same time
  uint64_t* words = nullptr;  // to be cleared ahead of the launch
  int64_t word_count = 0;
};

template <typename Params>
Status launch_norm(const char* name, void (*kernel)(Params), const Params& p, const NormLaunch& l,
                   cudaStream_t stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, l.smem_limit);
  if (error == cudaSuccess && l.cluster > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error == cudaSuccess && l.words) error = cudaMemsetAsync(l.words, 0, l.word_count * sizeof(uint64_t), stream);
  cudaLaunchAttribute attribute{};
  if (l.cluster > 0) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = l.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  } else {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(l.grid);
  config.blockDim = dim3(l.threads);
  config.dynamicSmemBytes = l.smem_bytes;
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
