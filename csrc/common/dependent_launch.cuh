// A kernel that may start before the one ahead of it in the stream has ended: its launch, some 2 us on an H200, then
// hides behind that kernel. It must wait before it touches what that kernel reads or writes.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "launch.h"
#include "status.h"

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

// Whether kKernel may be launched early on the current device: it runs code built for compute capability 9.0 or later,
// since older code does not wait, and the driver can have such launches in graphs.
template <auto kKernel>
bool can_start_early() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // 0: not yet asked
  int device = 0, driver = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kDevices) return false;
  int answer = known[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    cudaFuncAttributes attributes;
    const bool asked =
        cudaFuncGetAttributes(&attributes, kKernel) == cudaSuccess && cudaDriverGetVersion(&driver) == cudaSuccess;
    if (!asked) cudaGetLastError();  // it was a question; leave no error behind
    answer = asked && attributes.ptxVersion >= 90 && driver >= 12030 ? 1 : -1;
    known[device].store(answer, std::memory_order_relaxed);
  }
  return answer == 1;
}

// With `early`, as a kernel that waits for the one ahead.
template <auto kKernel, typename... Args>
Status launch_after(bool early, const char* name, dim3 grid, int threads, int smem_bytes, cudaStream_t stream,
                    const Args&... args) {
  cudaError_t error = allow_dynamic_smem<kKernel>(smem_bytes);
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early && can_start_early<kKernel>() ? 1 : 0;
  error = cudaLaunchKernelEx(&config, kKernel, args...);
  if (error == cudaSuccess) error = cudaGetLastError();
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

template <auto kKernel, typename... Args>
Status launch_after(bool early, const char* name, unsigned blocks, int threads, cudaStream_t stream,
                    const Args&... args) {
  return launch_after<kKernel>(early, name, dim3(blocks), threads, 0, stream, args...);
}

}  // namespace kgopt
