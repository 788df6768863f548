// Launch of a kernel that may need more dynamic shared memory than the default.
#pragma once

#include <cuda_runtime.h>

#include <mutex>

#include "status.h"

namespace kgopt {

// Lets kKernel be launched with `bytes` of dynamic shared memory on the current device. The limit is the kernel's, not
// the launch's, so it is only ever raised: a smaller plan in another thread must not take it back before the launch.
template <auto kKernel>
cudaError_t allow_dynamic_smem(int bytes) {
  constexpr int kDevices = 64;
  static std::mutex mutex;
  static int allowed[kDevices];
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const std::lock_guard<std::mutex> lock(mutex);
  if (device < kDevices && bytes <= allowed[device]) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess && device < kDevices) allowed[device] = bytes;
  return error;
}

template <auto kKernel, typename Params>
Status launch_kernel(const char* name, const Params& p, dim3 grid, int threads, int smem_bytes, cudaStream_t stream) {
  cudaError_t error = allow_dynamic_smem<kKernel>(smem_bytes);
  if (error == cudaSuccess) {
    kKernel<<<grid, threads, smem_bytes, stream>>>(p);
    error = cudaGetLastError();
  }
  if (error != cudaSuccess) return {StatusCode::kCudaError, name, cudaGetErrorString(error)};
  return Status::Ok();
}

}  // namespace kgopt
