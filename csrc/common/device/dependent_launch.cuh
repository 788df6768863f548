// A kernel that may start before the one ahead of it in the stream has ended: its launch, some 2 us on an H200, then
// hides behind that kernel. It must wait before it touches what that kernel reads or writes.
#pragma once

#include <cuda_runtime.h>

#include "common/host/launch.h"
#include "common/status.h"

namespace kgopt {

// By the kernel ahead: once every block has called it or ended, the next kernel's blocks may come beside its own.
// Called after wait_for_prerequisites, it also tells them that all kernels ahead of this one have ended.
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

// With `early`, as a kernel that waits for the one ahead; where its code or the driver cannot, as any other.
template <auto kKernel, typename... Args>
Status launch_after(bool early, const char* name, dim3 grid, int threads, int smem_bytes, cudaStream_t stream,
                    const Args&... args) {
  return launch_with(kKernel, facts_of<kKernel>(), name, {grid, threads, smem_bytes, early}, stream, args...);
}

template <auto kKernel, typename... Args>
Status launch_after(bool early, const char* name, unsigned blocks, int threads, cudaStream_t stream,
                    const Args&... args) {
  return launch_after<kKernel>(early, name, dim3(blocks), threads, 0, stream, args...);
}

}  // namespace kgopt
