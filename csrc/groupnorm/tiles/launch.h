// Launch of a kernel over tiles.
#pragma once

#include <cuda_runtime.h>

#include "common/status.h"
#include "groupnorm/tiles/plan.h"

namespace kgopt {

// All blocks run at a time where they exchange words. `smem_bytes` is the kernel's own, whatever the plan.
template <typename Params>
Status launch_tiles(const char* name, void (*kernel)(Params), int threads, int smem_bytes, Params p,
                    const TilesPlan& plan, cudaStream_t stream) {
  void* arguments[] = {&p};
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess && plan.words > 0 && !p.shares.clears) {
    error = cudaMemsetAsync(p.words, 0, plan.words * sizeof(uint64_t), stream);
  }
  const dim3 blocks(plan.blocks), threads_of_block(threads);
  if (error == cudaSuccess) {
    error = plan.words > 0
                ? cudaLaunchCooperativeKernel(kernel, blocks, threads_of_block, arguments, smem_bytes, stream)
                : cudaLaunchKernel(kernel, blocks, threads_of_block, arguments, smem_bytes, stream);
  }
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    cudaGetLastError();  // answered by the caller
    return Status::Unsupported(name, "this process may use fewer multiprocessors than the GPU has");
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
