// A kernel that may start before the one ahead of it in the stream has ended: its launch, some 2 us on an H200, then
// hides behind that kernel. It must wait before it touches what that kernel reads or writes.
#pragma once

#include <cuda_runtime.h>

#include "status.h"

namespace kgopt {

// By the kernel ahead: once every block has called it or ended, the next kernel's blocks may come beside its own.
__device__ __forceinline__ void let_dependents_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// By the kernel behind, in every block: returns when the one ahead has ended and its stores are there.
__device__ __forceinline__ void wait_for_prerequisites() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Whether code that was built for compute capability 9.0 or later runs kKernel here: older code does not wait.
template <auto kKernel>
bool waits_for_prerequisites() {
  static const bool waits = [] {
    cudaFuncAttributes attributes;
    if (cudaFuncGetAttributes(&attributes, kKernel) != cudaSuccess) {
      cudaGetLastError();  // it was a question; leave no error behind
      return false;
    }
    return attributes.ptxVersion >= 90 && attributes.binaryVersion >= 90;
  }();
  return waits;
}

template <auto kKernel, typename Params>
Status launch_dependent(const char* name, const Params& p, unsigned blocks, int threads, cudaStream_t stream) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = waits_for_prerequisites<kKernel>() ? 1 : 0;
  cudaError_t error = cudaLaunchKernelEx(&config, kKernel, p);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
